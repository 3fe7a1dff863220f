// Weights in the quantised blocks of a GGUF file, and how they become numbers again.
//
// A block is 32 consecutive k of one row of W. Each weight is an integer q of 4 or 8 bits; its value is
// scale * q + offset (ggml-common.h has the formats; the offset is zero but for Q4_1 and Q4_K, and Q4_0 counts from -8).
// W is packed in panels of 64 rows, as all weights are (see linear.h), and takes as many bytes as in the file:
//   Q4_0: [panel][k / 32] of scale [64], words [4][64]
//   Q4_1: [panel][k / 32] of scale [64], offset [64], words [4][64]
//   Q8_0: [panel][k / 32] of scale [64], words [8][64]
//   Q4_K: [panel][k / 256] of scale [64], scale of offsets [64], factors [12][64] bytes, 8 times words [4][64]
// Scales are float16. A word is four bytes of a row, in their order in the file: bytes of 8 bits, or of 4 bits the
// lower halves for k = 4 w .. 4 w + 3 and the upper halves for those k + 16. (Q4_K pairs 32 with the next 32 in the
// file; packing brings them into this order.)
//
// Expanding rounds each value once, from float32 to the type of the activations. These are the numbers that a widened
// checkpoint would hold, in the same order, so quantised weights give the same bits as widened ones.
#pragma once
#include "numbers.h"

#if defined(__AVX512BF16__)
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
constexpr int64_t words_of(Kind kind) { return kind == Kind::q8_0 ? 8 : 4; }
constexpr int64_t row_bytes = panel_width * 4;  // of one word of all rows of a panel

#if defined(__AVX512F__)
constexpr int expanded_lanes = 16;
#elif defined(__AVX2__)
constexpr int expanded_lanes = 8;
#else
constexpr int expanded_lanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * expanded_lanes)));
typedef int32_t Ints __attribute__((vector_size(4 * expanded_lanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * expanded_lanes)));

// One block of 64 rows: value = (q - zero) * scale + offset.
struct Block {
    const char* words;
    int32_t zero;
    alignas(64) float scale[panel_width], offset[panel_width];
};

inline void read_halves(const char* source, float* target) {
    uint16_t halves[panel_width];
    std::memcpy(halves, source, sizeof halves);
    for (int64_t n = 0; n < panel_width; n++) target[n] = half_to_float(halves[n]);
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
    block.words = unit + (has_offset ? 2 : 1) * halves;
    read_halves(unit, block.scale);
    if (has_offset) {
        read_halves(unit + halves, block.offset);
    } else {
        for (float& offset : block.offset) offset = -0.0f;  // adding it changes nothing, not even the sign of a zero
    }
    if (kind == Kind::q4_k) {
        const int64_t group = index % (superblock_depth / block_depth);
        read_factors(reinterpret_cast<const uint8_t*>(block.words), group, block.scale, block.offset);
        block.words += 12 * panel_width + group * 4 * row_bytes;
    }
}

template <class Vector>
inline Vector load_vector(const void* source) {
    Vector vector;
    std::memcpy(&vector, source, sizeof vector);
    return vector;
}

// Where k of the block lies in its words, and its integers for some rows of W.
template <bool wide>
inline Ints integers(const char* words, int64_t k, int64_t row) {
    const int64_t word = wide ? k / 4 : k % 16 / 4;
    const Bits bits = load_vector<Bits>(words + word * row_bytes + row * 4);
    if (wide) return (Ints)(bits << (24 - k % 4 * 8)) >> 24;
    return (Ints)(bits >> (k % 4 * 8 + k / 16 * 4) & 15);
}

template <bool wide>
inline Floats values(const Block& block, int64_t k, int64_t row) {
    const Floats whole = __builtin_convertvector(integers<wide>(block.words, k, row) - block.zero, Floats);
    return whole * load_vector<Floats>(block.scale + row) + load_vector<Floats>(block.offset + row);
}

inline void store_pair(float* out, Floats even, Floats odd) {
    std::memcpy(out, &even, sizeof even);
    std::memcpy(out + panel_width, &odd, sizeof odd);
}

inline Bits rounded(Floats value) {
    const Bits bits = (Bits)value;
    return bits + 0x7fff + (bits >> 16 & 1);
}

inline void store_pair(bf16* out, Floats even, Floats odd) {
#if defined(__AVX512BF16__)
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    const Bits pairs = (Bits)_mm512_permutexvar_epi16(order, both);
#else
    const Bits pairs = rounded(even) >> 16 | (rounded(odd) & 0xffff0000u);
#endif
    std::memcpy(out, &pairs, sizeof pairs);
}

template <bool wide, class T>
inline void expand_words(const Block& block, T* out) {
    constexpr int64_t pair = 4 / sizeof(T);  // elements of one row of W that lie together
    for (int64_t k = 0; k < block_depth; k += 2)
        for (int64_t row = 0; row < panel_width; row += expanded_lanes)
            store_pair(out + k * panel_width + row * pair, values<wide>(block, k, row), values<wide>(block, k + 1, row));
}

// Write 32 k of 64 rows of W to out, in the order of linear.h.
template <class T>
void expand_block(Kind kind, const char* panel, int64_t index, T* out) {
    Block block;
    read_block(kind, panel, index, block);
    if (kind == Kind::q8_0)
        expand_words<true>(block, out);
    else
        expand_words<false>(block, out);
}

}  // namespace
