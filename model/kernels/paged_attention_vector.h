// Vectors of float32 as wide as a register, and the two types of cache, for paged_attention.cpp.
//
// Written in the vector extensions of GCC and Clang, so that one text serves every instruction set; only the product of
// bfloat16 pairs has an instruction of its own.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

template <class Vector, class Source>
inline Vector load(const Source* source) {
    Vector vector;
    std::memcpy(&vector, source, sizeof(vector));
    return vector;
}

template <class Vector, class Target>
inline void store(Target* target, Vector vector) {
    std::memcpy(target, &vector, sizeof(vector));
}

inline Floats broadcast(float value) { return value - Floats{}; }

inline Ints lane_numbers() {
    Ints numbers;
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane;
    return numbers;
}

inline float bfloat16_to_float(uint16_t half) {
    uint32_t word = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
}

// The nearest bfloat16, ties to even, still as a float32; a NaN stays a NaN.
inline Floats round_to_bfloat16(Floats value) {
    Words word = (Words)value;
    Words rounded = (word + 0x7fff + ((word >> 16) & 1)) & 0xffff0000u;
    return value == value ? (Floats)rounded : value;
}

inline Halves upper_halves(Floats value) { return __builtin_convertvector((Words)value >> 16, Halves); }

// What the vector products have in common: GROUP queries share every load, and nothing is to be set up before.
struct Vectors {
#if defined(__AVX512F__)
    static constexpr int GROUP = 6;
#else
    static constexpr int GROUP = 3;
#endif
    // Evenly sized groups: few queries make poor use of a load.
    static int next_group(int queries) {
        const int groups = (queries + GROUP - 1) / GROUP;
        return (queries + groups - 1) / groups;
    }
    struct Setup {
        explicit Setup(int /* queries */) {}
    };
};

// How one type of cache is multiplied. A Factor is the PACK numbers that are broadcast against an Operand.
struct Float32 : Vectors {
    using Element = float;
    using Factor = float;
    using Operand = Floats;
    static constexpr int PACK = 1;

    static Operand load_operand(const Element* source) { return load<Floats>(source); }
    static Floats multiply_add(Floats sum, Operand operand, Factor factor) { return sum + operand * factor; }
    static void make_factors(const Element* source, int count, Factor* factors) {
        std::memcpy(factors, source, count * sizeof(Element));
    }
    static void store_weights(Floats weights, Factor* factors) { store(factors, weights); }
    static void store_output(Floats output, Element* target) { store(target, output); }
};

#if defined(__AVX512BF16__)
struct BFloat16 : Vectors {
    using Element = uint16_t;
    using Factor = int32_t;  // a pair
    using Operand = __m512bh;
    static constexpr int PACK = 2;

    static Operand load_operand(const Element* source) { return (__m512bh)_mm512_loadu_si512(source); }
    static Floats multiply_add(Floats sum, Operand operand, Factor factor) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, operand, (__m512bh)_mm512_set1_epi32(factor));
    }
    static void make_factors(const Element* source, int count, Factor* factors) {
        std::memcpy(factors, source, count * sizeof(Element));
    }
    static void store_weights(Floats weights, Factor* factors) { store(factors, _mm512_cvtneps_pbh((__m512)weights)); }
    static void store_output(Floats output, Element* target) { store(target, upper_halves(round_to_bfloat16(output))); }
};
#else
struct BFloat16 : Vectors {
    using Element = uint16_t;
    struct Factor {
        float even, odd;
    };
    struct Operand {
        Floats even, odd;
    };
    static constexpr int PACK = 2;

    static Operand load_operand(const Element* source) {
        Words pairs = load<Words>(source);
        return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
    }
    static Floats multiply_add(Floats sum, Operand operand, Factor factor) {
        sum = sum + operand.even * factor.even;
        return sum + operand.odd * factor.odd;
    }
    static void make_factors(const Element* source, int count, Factor* factors) {
        for (int i = 0; i < count / 2; i++)
            factors[i] = {bfloat16_to_float(source[2 * i]), bfloat16_to_float(source[2 * i + 1])};
    }
    static void store_weights(Floats weights, Factor* factors) { store(factors, round_to_bfloat16(weights)); }
    static void store_output(Floats output, Element* target) { store(target, upper_halves(round_to_bfloat16(output))); }
};
#endif

// The larger of each pair; NaN where b is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0, to about one unit in the last place; exactly 1 at 0, never below 2^-126; NaN stays NaN.
inline Floats exp2_of_nonpositive(Floats x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
    x = larger(broadcast(-126.0f), x);
    const Floats shifted = x + magic;
    const Floats r = x - (shifted - magic);
    // Minimax polynomial of 2^r on [-1/2, 1/2], relative error 9e-8.
    Floats p = r * 1.32647e-3f + 9.67151e-3f;
    p = p * r + 5.550734e-2f;
    p = p * r + 2.4022242e-1f;
    p = p * r + 6.9314698e-1f;
    p = p * r + 1.0f;
    return (Floats)((Ints)p + ((Ints)shifted << 23));  // the integer goes to the exponent; the bits of magic fall out
}

// Halve a vector until one number is left, in an order that is always the same.
template <class Combine>
inline float fold_lanes(Floats vector, const Combine& combine) {
    float numbers[LANES];
    store(numbers, vector);
#pragma GCC unroll 8
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) numbers[lane] = combine(numbers[lane], numbers[lane + width]);
    return numbers[0];
}

inline float highest_lane(Floats vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)vector);
#else
    return fold_lanes(vector, [](float a, float b) { return b > a ? b : a; });
#endif
}

inline float sum_of_lanes(Floats vector) {
    return fold_lanes(vector, [](float a, float b) { return a + b; });
}

}  // namespace
