// Weights in the quantised blocks of a GGUF file, and how they become numbers again.
//
// A block is 32 consecutive k of one row of W. Each weight is an integer q of 4 or 8 bits; its value is
// scale * q + offset (ggml-common.h has the formats; the offset is zero but for Q4_1 and Q4_K, and Q4_0 counts from -8).
// W is packed in panels of 64 rows, as all weights are (see linear.h), and takes as many bytes as in the file:
//   Q4_0: [panel][k / 32] of scale [64], nibbles [32][64]
//   Q4_1: [panel][k / 32] of scale [64], offset [64], nibbles [32][64]
//   Q8_0: [panel][k / 32] of scale [64], bytes [32][64]
//   Q4_K: [panel][k / 256] of scale [64], scale of offsets [64], factors [12][64] bytes, 8 times nibbles [32][64]
// Scales are float16. In which order a block has its nibbles or bytes depends on the instructions that expand them: see
// nibble_place and byte_place, here and in quantised_amx.h.
//
// Expanding rounds each value once, from float32 to the type of the activations. These are the numbers that a widened
// checkpoint would hold, in the same order, so quantised weights give the same bits as widened ones.
#pragma once
#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Mirrors KINDS in packing.py.
enum class Kind : int64_t { numbers, q4_0, q4_1, q8_0, q4_k };

constexpr int64_t panel_width = 64, block_depth = 32, superblock_depth = 256;

namespace {

// Bytes of a block of 64 rows with its scales; of a superblock of Q4_K.
constexpr int64_t unit_bytes(Kind kind) {
    return panel_width * (kind == Kind::q4_0 ? 18 : kind == Kind::q4_1 ? 20 : kind == Kind::q8_0 ? 34 : 144);
}
constexpr int64_t unit_depth(Kind kind) { return kind == Kind::q4_k ? superblock_depth : block_depth; }
constexpr int64_t nibbles_bytes = block_depth * panel_width / 2;

// One block of 64 rows: value = (q - zero) * scale + offset.
struct Block {
    const char* integers;
    int32_t zero;
    alignas(64) float scale[panel_width], offset[panel_width];
};

template <class Vector>
inline Vector load_vector(const void* source) {
    Vector vector;
    std::memcpy(&vector, source, sizeof vector);
    return vector;
}

// Begin to fetch what will be read a few thousand weights later.
inline void fetch(const char* address) { __builtin_prefetch(address + 4096); }

inline void read_halves(const char* source, float* target) {
    fetch(source);
    fetch(source + panel_width);
#if defined(__AVX512F__)
    for (int64_t n = 0; n < panel_width; n += 16)
        _mm512_storeu_ps(target + n, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 2 * n))));
#else
    uint16_t halves[panel_width];
    std::memcpy(halves, source, sizeof halves);
    for (int64_t n = 0; n < panel_width; n++) target[n] = half_to_float(halves[n]);
#endif
}

// The factors of group 0 .. 7 in a superblock: 6 bits each, packed as in get_scale_min_k4 of ggml-quants.c.
inline void read_factors(const uint8_t* packed, int64_t group, float* scale, float* offset) {
    const uint8_t* low = packed + group % 4 * panel_width;
    const uint8_t *middle = low + 4 * panel_width, *high = low + 8 * panel_width;
    for (int64_t n = 0; n < panel_width; n++) {
        const int factor = group < 4 ? low[n] & 63 : (high[n] & 15) | (low[n] >> 6) << 4;
        const int offset_factor = group < 4 ? middle[n] & 63 : high[n] >> 4 | (middle[n] >> 6) << 4;
        scale[n] *= static_cast<float>(factor);
        offset[n] *= -static_cast<float>(offset_factor);
    }
}

// Find block `index` (32 k each) of a panel and decode its scales.
inline void read_block(Kind kind, const char* panel, int64_t index, Block& block) {
    constexpr int64_t halves = panel_width * 2;
    const char* unit = panel + index * block_depth / unit_depth(kind) * unit_bytes(kind);
    const bool has_offset = kind == Kind::q4_1 || kind == Kind::q4_k;
    block.zero = kind == Kind::q4_0 ? 8 : 0;
    block.integers = unit + (has_offset ? 2 : 1) * halves;
    read_halves(unit, block.scale);
    if (has_offset) {
        read_halves(unit + halves, block.offset);
    } else {
        for (float& offset : block.offset) offset = -0.0f;  // adding it changes nothing, not even the sign of a zero
    }
    if (kind == Kind::q4_k) {
        const int64_t group = index % (superblock_depth / block_depth);
        read_factors(reinterpret_cast<const uint8_t*>(block.integers), group, block.scale, block.offset);
        block.integers += 12 * panel_width + group * nibbles_bytes;
    }
}

}  // namespace

#if defined(__AMX_TILE__)
#include "quantised_amx.h"
#else
namespace {

// Which nibble, counted from the first word of a block, or which byte holds q of row n and k. Nibbles are grouped in
// words of eight, so that one shift brings those of 16 words into place; a word belongs to one row n and has either the
// even or the odd k of 16. Bytes lie as [k / 2][64][2].
constexpr int64_t nibble_place(int64_t n, int64_t k) {
    const int64_t word = n / 16 * 64 + k / 16 * 32 + n / 8 % 2 * 16 + n % 8 * 2 + k % 2;
    return word * 8 + k / 2 % 8;
}
constexpr int64_t byte_place(int64_t n, int64_t k) { return (k / 2 * panel_width + n) * 2 + k % 2; }
constexpr int byte_bias = 0;  // what is added to q

// Numbers are expanded in vectors whose lanes are an even and an odd k, in turn, of some rows of W.
#if defined(__AVX512F__)
constexpr int expanded_lanes = 16;
#elif defined(__AVX2__)
constexpr int expanded_lanes = 8;
#else
constexpr int expanded_lanes = 4;
#endif
constexpr int expanded_rows = expanded_lanes / 2;
typedef int8_t Bytes __attribute__((vector_size(expanded_lanes)));
typedef float Floats __attribute__((vector_size(4 * expanded_lanes)));
typedef int32_t Ints __attribute__((vector_size(4 * expanded_lanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * expanded_lanes)));
typedef uint64_t Pairs __attribute__((vector_size(4 * expanded_lanes)));
typedef uint32_t HalfBits __attribute__((vector_size(2 * expanded_lanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * expanded_lanes)));

#if defined(__AVX512F__)
// The 16 possible integers of 4 bits: looking one up needs no mask, as the other bits of an index do not count.
struct Nibbles {
    __m512 table;

    explicit Nibbles(int32_t zero) {
        const __m512i all = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        table = _mm512_cvtepi32_ps(_mm512_sub_epi32(all, _mm512_set1_epi32(zero)));
    }
    Floats at(Bits words, int place) const {
        return (Floats)_mm512_permutexvar_ps((__m512i)(words >> (4 * place)), table);
    }
};

// Two lanes for each of 8 rows.
inline Floats twice(const float* values) {
    const __m512i order = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return (Floats)_mm512_permutexvar_ps(order, _mm512_castps256_ps512(_mm256_loadu_ps(values)));
}
#else
struct Nibbles {
    int32_t zero;

    Floats at(Bits words, int place) const {
        return __builtin_convertvector((Ints)(words >> (4 * place) & 15) - zero, Floats);
    }
};

inline Floats twice(const float* values) {
#if defined(__AVX2__)
    const __m256i order = _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0);
    return (Floats)_mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(values)), order);
#else
    Floats result;
    for (int lane = 0; lane < expanded_lanes; lane++) result[lane] = values[lane / 2];
    return result;
#endif
}
#endif

inline Floats widened(const char* bytes) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
#else
    return __builtin_convertvector(__builtin_convertvector(load_vector<Bytes>(bytes), Ints), Floats);
#endif
}

// Values of row n on at k and k + 1, k being even, are stored from `low` for half a vector's rows and `high` for the next.
template <int64_t width>
inline void store_half(float* out, Floats values) {
    const HalfBits even = __builtin_convertvector((Pairs)values & 0xffffffffu, HalfBits);
    const HalfBits odd = __builtin_convertvector((Pairs)values >> 32, HalfBits);
    std::memcpy(out, &even, sizeof even);
    std::memcpy(out + width, &odd, sizeof odd);
}

template <int64_t width>
inline void store_values(float* out, int64_t n, int64_t k, Floats low, Floats high) {
    store_half<width>(out + k * width + n, low);
    store_half<width>(out + k * width + n + expanded_rows, high);
}

template <int64_t width>
inline void store_values(bf16* out, int64_t n, int64_t k, Floats low, Floats high) {
    bf16* target = out + k * width + n * 2;  // k and k + 1 of a row lie together, as they do in the lanes
#if defined(__AVX512BF16__)
    const __m512bh numbers = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    std::memcpy(target, &numbers, sizeof numbers);
#else
    const auto rounded = [](Floats values) {
        const Bits bits = (Bits)values;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i in_turn = _mm256_packus_epi32((__m256i)rounded(low), (__m256i)rounded(high));
    const __m256i numbers = _mm256_permute4x64_epi64(in_turn, 0xd8);
    std::memcpy(target, &numbers, sizeof numbers);
#else
    const Halves first = __builtin_convertvector(rounded(low), Halves);
    const Halves second = __builtin_convertvector(rounded(high), Halves);
    std::memcpy(target, &first, sizeof first);
    std::memcpy(target + expanded_lanes, &second, sizeof second);
#endif
#endif
}

// Write 32 k of rows first .. end - 1 of a panel of W to out, which is where the numbers of its first row are or would
// be in the order of linear.h, but with `width` columns. first and end are multiples of 16.
template <int64_t width = panel_width, class T>
void expand_block(Kind kind, const char* panel, int64_t index, T* out, int64_t first = 0, int64_t end = panel_width) {
    Block block;
    read_block(kind, panel, index, block);
    const Nibbles nibbles{block.zero};
    for (int64_t n = first; n < end; n += 2 * expanded_rows) {
        const Floats low_scale = twice(block.scale + n), high_scale = twice(block.scale + n + expanded_rows);
        const Floats low_offset = twice(block.offset + n), high_offset = twice(block.offset + n + expanded_rows);
        const auto put = [&](int64_t k, Floats low, Floats high) __attribute__((always_inline)) {
            store_values<width>(out, n, k, low * low_scale + low_offset, high * high_scale + high_offset);
        };
        if (kind == Kind::q8_0) {
            for (int64_t k = 0; k < block_depth; k += 2) {
                const char* bytes = block.integers + byte_place(n, k);
                fetch(bytes);
                put(k, widened(bytes), widened(bytes + expanded_lanes));
            }
            continue;
        }
        for (int64_t k = 0; k < block_depth; k += 16) {
            const char* words = block.integers + nibble_place(n, k) / 2;
            const char* next_words = block.integers + nibble_place(n + expanded_rows, k) / 2;
            fetch(words);
            fetch(next_words);
            const Bits low = load_vector<Bits>(words), high = load_vector<Bits>(next_words);
#pragma GCC unroll 8
            for (int place = 0; place < 8; place++) put(k + 2 * place, nibbles.at(low, place), nibbles.at(high, place));
        }
    }
}

}  // namespace
#endif
