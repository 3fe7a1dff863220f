// The linear kernel for CPUs with AVX-512 BF16 (Intel Cooper Lake, Sapphire Rapids; AMD Zen 4): vdpbf16ps multiplies
// pairs of bfloat16 and adds both products to a float32.
// variants: avx512_bf16
#include <immintrin.h>

#include "linear.h"

namespace {

constexpr int most_rows = 6, vectors = 4;
constexpr int64_t prefetch_bytes = 4096;

template <int rows>
void compute(const LinearCall<bf16>& call, int64_t first_row, int64_t panel, const bf16* w) {
    __m512 sums[rows][vectors];
    for (auto& row : sums)
        for (auto& sum : row) sum = _mm512_setzero_ps();

    const auto add = [&](int64_t first_k, int64_t depth, const bf16* columns) __attribute__((always_inline)) {
        const bf16* x = call.row(first_row) + first_k;
        for (int64_t k = 0; k < depth; k += 2, columns += 2 * panel_width) {
            __m512bh w_pairs[vectors];
            for (int v = 0; v < vectors; v++) {
                if (rows <= 2) _mm_prefetch(reinterpret_cast<const char*>(columns + 32 * v) + prefetch_bytes, _MM_HINT_T0);
                w_pairs[v] = (__m512bh)_mm512_loadu_si512(columns + 32 * v);
            }
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                uint32_t pair = x[r * call.x_stride + k];  // the other half is zero where there is no other k
                if (k + 1 < depth) std::memcpy(&pair, x + r * call.x_stride + k, sizeof pair);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
                for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], w_pairs[v], both);
            }
        }
    };
    for_each_stretch(call, panel, w, add);

    alignas(64) float result[rows * panel_width];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) _mm512_store_ps(result + r * panel_width + 16 * v, sums[r][v]);
    store(call, first_row, rows, panel * panel_width, result);
}

}  // namespace

OCTAVO_KERNEL(linear_bf16)
(const Linear* linear, const bf16* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, Form form) {
    const LinearCall<bf16> call{*linear, x, x_stride, rows, out, out_stride, form};
    for_each_piece(call, [&](int64_t first_row, int64_t rows, int64_t panel, const bf16* w) {
        if (w == nullptr && call.rows > most_rows) w = call.expand(panel);
        for_each_group<most_rows>(rows, [&](int64_t first, auto count) {
            compute<decltype(count)::number>(call, first_row + first, panel, w);
        });
        return w;
    });
}
