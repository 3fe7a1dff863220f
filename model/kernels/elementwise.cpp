// Everything in a step that is neither a product nor attention: norms, residual additions, RoPE, SiLU, largest logits.
// Values are widened to float32, and rounded once where they are written.
// variants: plain avx2 avx512 avx512_bf16
#include <cmath>
#include <limits>

#include "numbers.h"
#include "parallel.h"
#include "silu.h"

// A tensor [tokens, heads, width], its last dimension contiguous; strides in elements. native.py packs these fields.
struct View {
    void* data;
    int64_t token_stride, head_stride, heads;
};

namespace {

template <class T>
T* row(const View& view, int64_t token, int64_t head) {
    return static_cast<T*>(view.data) + token * view.token_stride + head * view.head_stride;
}

// Call vector(i) for 16 elements after another, and one(i) for each of the rest.
template <class Vector, class One>
inline void for_each_lanes(int64_t width, const Vector& vector, const One& one) {
    int64_t i = 0;
    for (; i + lane_count <= width; i += lane_count) vector(i);
    for (; i < width; i++) one(i);
}

// In a fixed order, 64 sums side by side.
template <class T>
float sum_of_squares(const T* x, int64_t width) {
    constexpr int chains = 4;
    Lanes sums[chains] = {};
    float total = 0.0f;
    int64_t i = 0;
    for (; i + chains * lane_count <= width; i += chains * lane_count) {
        for (int chain = 0; chain < chains; chain++) {
            const Lanes values = load_lanes(x + i + chain * lane_count);
            sums[chain] += values * values;
        }
    }
    for (; i < width; i++) total += to_float(x[i]) * to_float(x[i]);
    const Lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int lane = 0; lane < lane_count; lane++) total += all[lane];
    return total;
}

template <class T>
void add_row(T* x, const T* branch, int64_t width) {
    for_each_lanes(
        width, [&](int64_t i) { store_lanes(x + i, load_lanes(x + i) + load_lanes(branch + i)); },
        [&](int64_t i) { x[i] = from_float<T>(to_float(x[i]) + to_float(branch[i])); });
}

template <class T>
void norm_row(const T* x, const T* weight, float epsilon, T* out, int64_t width) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, width) / static_cast<float>(width) + epsilon);
    for_each_lanes(
        width,
        [&](int64_t i) {
            T normalised[lane_count];
            store_lanes(normalised, load_lanes(x + i) * scale);
            store_lanes(out + i, load_lanes(normalised) * load_lanes(weight + i));
        },
        [&](int64_t i) {
            const float normalised = to_float(from_float<T>(to_float(x[i]) * scale));
            out[i] = from_float<T>(normalised * to_float(weight[i]));
        });
}

// branch.data may be null. It is read to its end before out, perhaps the same memory, is written.
template <class T>
void add_rms_norm(View x, View branch, View out, const T* weight, float epsilon, int64_t tokens, int64_t width) {
    for_each_token(tokens, x.heads * width, [&](int64_t token) {
        for (int64_t head = 0; head < x.heads; head++) {
            T* values = row<T>(x, token, head);
            if (branch.data != nullptr) add_row(values, row<T>(branch, token, head), width);
            norm_row(values, weight, epsilon, row<T>(out, token, head), width);
        }
    });
}

template <class T>
void rotate_heads(View x, int64_t token, const float* cosines, int64_t half) {
    const float* sines = cosines + half;
    for (int64_t head = 0; head < x.heads; head++) {
        T* low = row<T>(x, token, head);
        T* high = low + half;
        for_each_lanes(
            half,
            [&](int64_t i) {
                const Lanes a = load_lanes(low + i), b = load_lanes(high + i);
                const Lanes cosine = load_lanes(cosines + i), sine = load_lanes(sines + i);
                store_lanes(low + i, a * cosine - b * sine);
                store_lanes(high + i, b * cosine + a * sine);
            },
            [&](int64_t i) {
                const float a = to_float(low[i]), b = to_float(high[i]);
                low[i] = from_float<T>(a * cosines[i] - b * sines[i]);
                high[i] = from_float<T>(b * cosines[i] + a * sines[i]);
            });
    }
}

// Returns 1, and rotates nothing, if a position has no row in cos_sin.
template <class T>
int rotate(View q, View k, const int32_t* positions, int64_t tokens, const float* cos_sin, int64_t most, int64_t width) {
    for (int64_t token = 0; token < tokens; token++)
        if (positions[token] < 0 || positions[token] >= most) return 1;
    for_each_token(tokens, (q.heads + k.heads) * width, [&](int64_t token) {
        const float* cosines = cos_sin + positions[token] * width;
        rotate_heads<T>(q, token, cosines, width / 2);
        rotate_heads<T>(k, token, cosines, width / 2);
    });
    return 0;
}

// The id of a row's largest number, the lowest among equals; failed where some number is not finite.
inline int32_t largest(const float* x, int64_t width, bool& failed) {
    constexpr uint32_t infinity = 0x7f800000u;
    Lanes best = Lanes{} - std::numeric_limits<float>::infinity();
    IntLanes ids = {};
    BitLanes extremes = {};
    const int64_t whole = width / lane_count * lane_count;
    for (int64_t i = 0; i < whole; i += lane_count) {
        const Lanes values = load_lanes(x + i);
        const IntLanes larger = values > best;
        best = larger ? values : best;
        ids = larger ? IntLanes{} + static_cast<int32_t>(i) : ids;
        const BitLanes magnitudes = reinterpret_cast<BitLanes>(values) & 0x7fffffffu;
        extremes = magnitudes > extremes ? magnitudes : extremes;
    }
    int32_t id = 0;
    for (int lane = 0; lane < lane_count && whole > 0; lane++) {
        const int32_t other = ids[lane] + lane;
        if (x[other] > x[id] || (x[other] == x[id] && other < id)) id = other;
        failed |= extremes[lane] >= infinity;
    }
    for (int64_t i = whole; i < width; i++) {
        if (x[i] > x[id]) id = static_cast<int32_t>(i);
        failed |= !std::isfinite(x[i]);
    }
    return id;
}

}  // namespace

#define OCTAVO_ELEMENTWISE(type, suffix)                                                                              \
    /* views: x, branch (its data null for none), out */                                                              \
    OCTAVO_KERNEL(add_rms_norm_##suffix)                                                                              \
    (const View* views, const type* weight, float epsilon, int64_t tokens, int64_t width) {                           \
        add_rms_norm<type>(views[0], views[1], views[2], weight, epsilon, tokens, width);                             \
    }                                                                                                                 \
    /* views: q, k */                                                                                                 \
    OCTAVO_API int OCTAVO_NAME(rotate_##suffix)(const View* views, const int32_t* positions, int64_t tokens,          \
                                                const float* cos_sin, int64_t most, int64_t width) {                  \
        return rotate<type>(views[0], views[1], positions, tokens, cos_sin, most, width);                             \
    }                                                                                                                 \
    OCTAVO_KERNEL(silu_mul_##suffix)(type* gate_up, int64_t stride, int64_t tokens, int64_t width) {                  \
        silu_mul<type>(gate_up, stride, tokens, width);                                                               \
    }

OCTAVO_ELEMENTWISE(bf16, bf16)
#if !defined(__AVX512BF16__)
OCTAVO_ELEMENTWISE(float, f32)

// logits [rows, width]; ids and failed [rows]
OCTAVO_KERNEL(largest)
(const float* logits, int64_t stride, int64_t rows, int64_t width, int32_t* ids, bool* failed) {
    for_each_token(rows, width, [&](int64_t row) {
        failed[row] = false;
        ids[row] = largest(logits + row * stride, width, failed[row]);
    });
}
#endif
