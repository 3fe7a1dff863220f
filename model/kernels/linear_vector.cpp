// The linear kernel for vector units without bfloat16 products: bfloat16 is widened to float32 on the fly.
// Written with the compiler's vector types; the instruction set decides how long a vector is.
// variants: plain avx2 avx512
#include "linear.h"

namespace {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64, accumulators = 24;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32, accumulators = 12;
#else
constexpr int vector_bytes = 16, accumulators = 12;
#endif
constexpr int lanes = vector_bytes / 4;
constexpr int most_rows = 6;

typedef float Vector __attribute__((vector_size(vector_bytes)));
typedef uint32_t Words __attribute__((vector_size(vector_bytes)));

// How many vectors of columns to sum at once, so that the sums of `rows` rows fit the registers.
constexpr int vectors_for(int rows) {
    int vectors = panel_width / lanes;
    while (vectors * rows > accumulators) vectors /= 2;
    return vectors;
}

template <int rows, int vectors>
inline void add_products(Vector (&sums)[rows][vectors], const Vector (&w)[vectors], const float (&x)[rows]) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] += w[v] * x[r];
}

// Add x [rows, in_features] times `vectors` vectors of columns of a packed float32 panel.
template <int rows, int vectors>
inline void multiply(Vector (&sums)[rows][vectors], const float* x, int64_t stride, int64_t depth, const float* panel) {
    for (int64_t k = 0; k < depth; k++) {
        Vector w[vectors];
        float values[rows];
        for (int v = 0; v < vectors; v++) w[v] = load_vector<Vector>(panel + k * panel_width + v * lanes);
        for (int r = 0; r < rows; r++) values[r] = x[r * stride + k];
        add_products(sums, w, values);
    }
}

// The same for bfloat16, whose words hold two consecutive k.
template <int rows, int vectors>
inline void multiply(Vector (&sums)[rows][vectors], const bf16* x, int64_t stride, int64_t depth, const bf16* panel) {
    for (int64_t k = 0; k < depth; k += 2) {
        Vector even[vectors], odd[vectors];
        float values[rows], next_values[rows];
        for (int v = 0; v < vectors; v++) {
            const Words pair = load_vector<Words>(panel + k * panel_width + v * lanes * 2);
            const Words low = pair << 16, high = pair & 0xffff0000u;
            even[v] = load_vector<Vector>(&low);
            odd[v] = load_vector<Vector>(&high);
        }
        for (int r = 0; r < rows; r++) {
            values[r] = to_float(x[r * stride + k]);
            next_values[r] = k + 1 < depth ? to_float(x[r * stride + k + 1]) : 0.0f;
        }
        add_products(sums, even, values);
        add_products(sums, odd, next_values);
    }
}

template <int rows, class T>
void compute(const LinearCall<T>& call, int64_t first_row, int64_t panel, const T* w) {
    constexpr int vectors = vectors_for(rows);
    constexpr int pair = 4 / sizeof(T);  // elements of one column that lie together
    alignas(64) float result[rows * panel_width] = {};
    for_each_stretch(call, panel, w, [&](int64_t k, int64_t depth, const T* numbers) __attribute__((always_inline)) {
        for (int column = 0; column < panel_width; column += vectors * lanes) {
            Vector sums[rows][vectors];
            for (int r = 0; r < rows; r++) std::memcpy(sums[r], result + r * panel_width + column, sizeof sums[r]);
            multiply(sums, call.row(first_row) + k, call.x_stride, depth, numbers + column * pair);
            for (int r = 0; r < rows; r++) std::memcpy(result + r * panel_width + column, sums[r], sizeof sums[r]);
        }
    });
    store(call, first_row, rows, panel * panel_width, result);
}

template <class T>
void run(const LinearCall<T>& call) {
    for_each_piece(call, [&](int64_t first_row, int64_t rows, int64_t panel, const T* w) {
        if (w == nullptr && call.rows > most_rows) w = call.expand(panel);
        for_each_group<most_rows>(rows, [&](int64_t first, auto count) {
            compute<decltype(count)::number>(call, first_row + first, panel, w);
        });
        return w;
    });
}

}  // namespace

OCTAVO_KERNEL(linear_bf16)
(const Linear* linear, const bf16* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, Form form) {
    run(LinearCall<bf16>{*linear, x, x_stride, rows, out, out_stride, form});
}

OCTAVO_KERNEL(linear_f32)
(const Linear* linear, const float* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, Form form) {
    run(LinearCall<float>{*linear, x, x_stride, rows, out, out_stride, form});
}
