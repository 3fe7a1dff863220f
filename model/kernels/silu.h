// SiLU(gate) * up, of tensors that lie in memory and of the outputs of a product.
#pragma once
#include "numbers.h"
#include "parallel.h"

namespace {

// e^x to about one unit in the last place: x = n ln 2 + r, and a polynomial in r (Moshier, Cephes, expf). Written for
// vectors: from a loop over scalars the compiler makes two more divisions, for the two ends of the range, whose
// results are so small that each takes a hundred cycles.
inline Lanes exponential(Lanes x) {
    x = x < -87.0f ? Lanes{} - 87.0f : x;
    x = x > 88.0f ? Lanes{} + 88.0f : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
    const Lanes shifted = x * 1.44269504f + magic, n = shifted - magic;
    const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (Lanes)((BitLanes)p + ((BitLanes)shifted << 23));  // n goes to the exponent; the bits of magic fall out
}

// 1 / x to about one unit in the last place: the division of 16 numbers takes as long as all else in SiLU.
inline Lanes reciprocal(Lanes x) {
#if defined(__AVX512F__)
    const Lanes estimate = (Lanes)_mm512_rcp14_ps((__m512)x);
    return estimate + estimate * (1.0f - x * estimate);
#else
    return 1.0f / x;
#endif
}

inline Lanes silu(Lanes x) { return x * reciprocal(1.0f + exponential(-x)); }

// Write SiLU(gate) * up over the gate, for `width` of each.
template <class T>
void silu_mul_row(T* gate, const T* up, int64_t width) {
    int64_t i = 0;
    for (; i + lane_count <= width; i += lane_count) store_lanes(gate + i, silu(load_lanes(gate + i)) * load_lanes(up + i));
    if (i == width) return;
    T rest[2][lane_count] = {};
    std::memcpy(rest[0], gate + i, (width - i) * sizeof(T));
    std::memcpy(rest[1], up + i, (width - i) * sizeof(T));
    store_lanes(rest[0], silu(load_lanes(rest[0])) * load_lanes(rest[1]));
    std::memcpy(gate + i, rest[0], (width - i) * sizeof(T));
}

// gate_up: [tokens][2][width]
template <class T>
void silu_mul(T* gate_up, int64_t stride, int64_t tokens, int64_t width) {
    for_each_token(tokens, width, [&](int64_t token) {
        silu_mul_row(gate_up + token * stride, gate_up + token * stride + width, width);
    });
}

}  // namespace
