// bfloat16 <-> float32. bfloat16 is the upper half of a float32.
#pragma once
#include <cstdint>
#include <cstring>

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
