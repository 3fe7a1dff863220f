// Weights in the quantised blocks of a GGUF file, and how they become numbers again.
//
// A block is 32 consecutive k of one row of W. Each weight is an integer q of 4 or 8 bits; its value is
// scale * q + offset (ggml-common.h has the formats; the offset is zero but for Q4_1 and Q4_K, and Q4_0 counts from -8).
// W is packed in panels of 64 rows, as all weights are (see linear.h), and takes as many bytes as in the file:
//   Q4_0: [panel][k / 32] of scale [64], nibbles [32][64]
//   Q4_1: [panel][k / 32] of scale [64], offset [64], nibbles [32][64]
//   Q8_0: [panel][k / 32] of scale [64], bytes [32][64]
//   Q4_K: [panel][k / 256] of scale [64], scale of offsets [64], factors [12][64] bytes, 8 times nibbles [32][64]
// Scales are float16. nibble_place and byte_place say in which order a block has its nibbles or bytes.
//
// Expanding them (quantised_expand.h) rounds each value once, from float32 to the type of the activations. These are the
// numbers that a widened checkpoint would hold, in the same order, so quantised weights give the same bits as widened ones.
#pragma once
#include "numbers.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

// After `numbers`, in the order of QUANTISED in packing.py.
enum class Kind : int64_t { numbers, q4_0, q4_1, q8_0, q4_k };

constexpr int64_t panel_width = 64, block_depth = 32, superblock_depth = 256;

namespace {

// Bytes of a block of 64 rows with its scales; of a superblock of Q4_K.
constexpr int64_t unit_bytes(Kind kind) {
    return panel_width * (kind == Kind::q4_0 ? 18 : kind == Kind::q4_1 ? 20 : kind == Kind::q8_0 ? 34 : 144);
}
constexpr int64_t unit_depth(Kind kind) { return kind == Kind::q4_k ? superblock_depth : block_depth; }
constexpr int64_t nibbles_bytes = block_depth * panel_width / 2;

// One block of 64 rows, or some of them: value = (stored number - zero) * scale + offset.
struct Block {
    const char* integers;
    int32_t zero;
    alignas(64) float scale[panel_width], offset[panel_width];
};

// Which nibble, counted from the first word of a block, holds q of row n and k: four rows take turns in words of 16 bits.
constexpr int64_t nibble_place(int64_t n, int64_t k) { return (n / 4 * block_depth + k) * 4 + n % 4; }

// Which byte holds q + byte_bias. 64 bytes are four k of 16 rows: 16 words of 32 bits for an even and an odd k of 8 rows in
// turn, which have a byte for either pair of k and either 8 rows.
constexpr int64_t byte_place(int64_t n, int64_t k) {
    const int64_t word = n % 8 * 2 + k % 2, byte = k / 2 % 2 * 2 + n / 8 % 2;
    return n / 16 * 16 * block_depth + k / 4 * 64 + word * 4 + byte;
}
constexpr int byte_bias = 128;

// Begin to fetch what will be read a few thousand weights later.
inline void fetch(const char* address) { __builtin_prefetch(address + 4096); }

// Float16 numbers first .. end - 1 of 64.
inline void read_halves(const char* source, float* target, int64_t first, int64_t end) {
    fetch(source + 2 * first);
#if defined(__AVX512F__)
    for (int64_t n = first; n < end; n += 16)
        _mm512_storeu_ps(target + n, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 2 * n))));
#elif defined(__F16C__)
    for (int64_t n = first; n < end; n += 8)
        _mm256_storeu_ps(target + n, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 2 * n))));
#else
    uint16_t halves[panel_width];
    std::memcpy(halves, source, sizeof halves);
    for (int64_t n = first; n < end; n++) target[n] = half_to_float(halves[n]);
#endif
}

// The factors of group 0 .. 7 in a superblock: 6 bits each, packed as in get_scale_min_k4 of ggml-quants.c.
inline void read_factors(const uint8_t* packed, int64_t group, Block& block, int64_t first, int64_t end) {
    const uint8_t* low = packed + group % 4 * panel_width;
    const uint8_t *middle = low + 4 * panel_width, *high = low + 8 * panel_width;
    for (int64_t n = first; n < end; n++) {
        const int factor = group < 4 ? low[n] & 63 : (high[n] & 15) | (low[n] >> 6) << 4;
        const int offset_factor = group < 4 ? middle[n] & 63 : high[n] >> 4 | (middle[n] >> 6) << 4;
        block.scale[n] *= static_cast<float>(factor);
        block.offset[n] *= -static_cast<float>(offset_factor);
    }
}

// Find block `index` (32 k each) of a panel and decode the scales of its rows first .. end - 1, multiples of 16.
inline void read_block(Kind kind, const char* panel, int64_t index, Block& block, int64_t first, int64_t end) {
    constexpr int64_t halves = panel_width * 2;
    const char* unit = panel + index * block_depth / unit_depth(kind) * unit_bytes(kind);
    const bool has_offset = kind == Kind::q4_1 || kind == Kind::q4_k;
    block.zero = kind == Kind::q8_0 ? byte_bias : kind == Kind::q4_0 ? 8 : 0;
    block.integers = unit + (has_offset ? 2 : 1) * halves;
    read_halves(unit, block.scale, first, end);
    if (has_offset) {
        read_halves(unit + halves, block.offset, first, end);
    } else {  // minus zero: adding it changes nothing, not even the sign of a zero
        for (int64_t n = first; n < end; n++) block.offset[n] = -0.0f;
    }
    if (kind == Kind::q4_k) {
        const int64_t group = index % (superblock_depth / block_depth);
        read_factors(reinterpret_cast<const uint8_t*>(block.integers), group, block, first, end);
        block.integers += 12 * panel_width + group * nibbles_bytes;
    }
}

}  // namespace
