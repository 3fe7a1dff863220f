// bfloat16 <-> float32, and float16 -> float32. bfloat16 is the upper half of a float32.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

using bf16 = uint16_t;

static inline float to_float(float value) { return value; }

static inline float to_float(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

template <class T>
static inline T from_float(float value);

template <>
inline float from_float<float>(float value) {
    return value;
}

// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
template <>
inline bf16 from_float<bf16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<bf16>(value != value ? (bits >> 16) | 0x40 : rounded);
}

// 16 numbers side by side; where registers are narrower, the compiler makes several of them.
#pragma GCC diagnostic ignored "-Wpsabi"  // how vectors are passed matters to nobody: what takes them is inlined
constexpr int lane_count = 16;
typedef float Lanes __attribute__((vector_size(lane_count * sizeof(float))));
typedef int32_t IntLanes __attribute__((vector_size(lane_count * sizeof(int32_t))));
typedef uint32_t BitLanes __attribute__((vector_size(lane_count * sizeof(uint32_t))));
typedef uint16_t HalfLanes __attribute__((vector_size(lane_count * sizeof(uint16_t))));

template <class Vector>
static inline Vector load_vector(const void* from) {
    Vector values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

static inline Lanes load_lanes(const float* from) { return load_vector<Lanes>(from); }

static inline Lanes load_lanes(const bf16* from) {
    return reinterpret_cast<Lanes>(__builtin_convertvector(load_vector<HalfLanes>(from), BitLanes) << 16);
}

static inline void store_lanes(float* to, Lanes values) { std::memcpy(to, &values, sizeof values); }

// Rounds as from_float does; the instruction takes a subnormal number for zero.
static inline void store_lanes(bf16* to, Lanes values) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(values));
    std::memcpy(to, &rounded, sizeof rounded);
#else
    const BitLanes bits = reinterpret_cast<BitLanes>(values);
    const BitLanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const HalfLanes halves = __builtin_convertvector(values != values ? (bits >> 16) | 0x40 : rounded, HalfLanes);
    std::memcpy(to, &halves, sizeof halves);
#endif
}

// float16, given as its bits: 1 sign, 5 of exponent, 10 of mantissa. Moved into a float32's fields, the number is 2^112
// times too small, a subnormal one too.
static inline float half_to_float(uint16_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
    float value;
    std::memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (magnitude >= 0x0f800000u) bits = magnitude | 0x7f800000u;  // an infinity or a NaN
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
