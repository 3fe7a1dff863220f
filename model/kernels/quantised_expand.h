// How quantised weights become numbers (see quantised.h for the blocks), in the order of linear.h.
//
// Nibbles are looked up: the 16 values that the 32 weights of a row can have are computed and rounded once. So the numbers
// come out row by row, in words of 32 bits, a bfloat16 for two k or a float32 for one, and 16 rows are transposed.
// Bytes are too many to look up: each is multiplied and rounded, and comes out where it belongs.
#pragma once
#include "quantised.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// The upper half of each word is its float32 as a bfloat16. Rounds as from_float does; weights are finite.
template <class Bits>
inline Bits rounded(Bits bits) {
    return bits + 0x7fff + (bits >> 16 & 1);
}

#if defined(__AVX512BW__)
inline __m512i rounded(__m512 low, __m512 high) {
#if defined(__AVX512BF16__)
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
    const __m512i in_turn = _mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)(rounded((BitLanes)low) >> 16),
                                                    (__m512i)rounded((BitLanes)high));
    const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,  //
                                           30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutexvar_epi16(order, in_turn);
#endif
}
#endif

// The nibbles of four rows that take turns, from row n on.
inline const char* nibbles_of(const Block& block, int64_t n) { return block.integers + nibble_place(n, 0) / 2; }

// The values of 16 k of row n from `words` on, in which it is number n % 4.
inline Lanes values_of(const Block& block, int64_t n, const char* words) {
    const auto nibbles = __builtin_convertvector(load_vector<HalfLanes>(words) >> n % 4 * 4 & 15, IntLanes);
    return __builtin_convertvector(nibbles - block.zero, Lanes) * block.scale[n] + block.offset[n];
}

// Rows n .. n + 3 of a block in bfloat16: 32 k each.
inline void look_up(const Block& block, int64_t n, BitLanes (&rows)[1][16], int64_t first) {
    const char* words = nibbles_of(block, n);
    fetch(words);
#if defined(__AVX512BW__)
    // An index has five bits and chooses among the values of two rows; of the nibbles in a word only the last is alone once
    // it is shifted down, in the others the fifth bit is cleared or set.
    const __m512i all = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_sub_epi32(all, _mm512_set1_epi32(block.zero)));
    const __m512i nibble = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
    constexpr int and_or = 0xea;  // a & b | c
    const auto values = [&](int64_t row) __attribute__((always_inline)) {
        return _mm512_fmadd_ps(numbers, _mm512_set1_ps(block.scale[row]), _mm512_set1_ps(block.offset[row]));
    };
    const __m512i four = _mm512_loadu_si512(words);
    const __m512i low = rounded(values(n), values(n + 1)), high = rounded(values(n + 3), values(n + 2));
    const __m512i second = _mm512_ternarylogic_epi32(_mm512_srli_epi16(four, 4), nibble, upper, and_or);
    const __m512i third = _mm512_ternarylogic_epi32(_mm512_srli_epi16(four, 8), nibble, upper, and_or);
    rows[0][first] = (BitLanes)_mm512_permutexvar_epi16(_mm512_and_si512(four, nibble), low);
    rows[0][first + 1] = (BitLanes)_mm512_permutexvar_epi16(second, low);
    rows[0][first + 2] = (BitLanes)_mm512_permutexvar_epi16(third, high);
    rows[0][first + 3] = (BitLanes)_mm512_permutexvar_epi16(_mm512_srli_epi16(four, 12), high);
#elif defined(__AVX2__)
    // 16 bytes can be looked up at once: the lower bytes of 16 values, and the upper ones.
    const __m256 zero = _mm256_set1_ps(static_cast<float>(block.zero));
    const __m256 numbers = _mm256_sub_ps(_mm256_set_ps(11, 10, 9, 8, 3, 2, 1, 0), zero);
    const __m256 next_numbers = _mm256_add_ps(numbers, _mm256_set1_ps(4));
    const __m256i apart = _mm256_broadcastsi128_si256(_mm_set_epi8(15, 11, 7, 3, 13, 9, 5, 1, 14, 10, 6, 2, 12, 8, 4, 0));
    const __m256i nibble = _mm256_set1_epi16(15);
    const __m256i four = load_vector<__m256i>(words), next_four = load_vector<__m256i>(words + 32);
    typedef uint32_t Bits __attribute__((vector_size(32)));
#pragma GCC unroll 4
    for (int row = 0; row < 4; row++) {
        const __m256 scale = _mm256_set1_ps(block.scale[n + row]), offset = _mm256_set1_ps(block.offset[n + row]);
        const Bits values = rounded((Bits)_mm256_fmadd_ps(numbers, scale, offset)) >> 16;
        const Bits next_values = rounded((Bits)_mm256_fmadd_ps(next_numbers, scale, offset));
        const __m256i in_turn = _mm256_blend_epi16((__m256i)values, (__m256i)next_values, 0xaa);
        const __m256i bytes = _mm256_shuffle_epi8(in_turn, apart);
        const __m256i index = _mm256_packus_epi16(_mm256_and_si256(_mm256_srli_epi16(four, 4 * row), nibble),
                                                  _mm256_and_si256(_mm256_srli_epi16(next_four, 4 * row), nibble));
        const __m256i low = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(bytes, 0x88), index);
        const __m256i high = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(bytes, 0xdd), index);
        const __m256i both[] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
        std::memcpy(&rows[0][first + row], both, sizeof both);
    }
#else
    for (int64_t row = 0; row < 4; row++) {
        const auto half = [&](int64_t k) {
            return __builtin_convertvector(rounded((BitLanes)values_of(block, n + row, words + k * 2)) >> 16, HalfLanes);
        };
        const HalfLanes both[] = {half(0), half(16)};
        std::memcpy(&rows[0][first + row], both, sizeof both);
    }
#endif
}

// The same in float32: 16 k in rows[0], 16 in rows[1].
inline void look_up(const Block& block, int64_t n, BitLanes (&rows)[2][16], int64_t first) {
    const char* words = nibbles_of(block, n);
    fetch(words);
    for (int64_t row = 0; row < 4; row++)
        for (int64_t half = 0; half < 2; half++)
            rows[half][first + row] = (BitLanes)values_of(block, n + row, words + half * 32);
}

#if defined(__AVX512BW__)
// Exchange rows and columns of 16 x 16 words.
inline void transpose(__m512i (&rows)[16]) {
    __m512i other[16];
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
        }
    }
    // Each holds one column of four rows in each of its quarters: the quarters are exchanged next.
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 16; j += 8) {
            other[j + i] = _mm512_shuffle_i32x4(rows[j + i], rows[j + i + 4], 0x88);
            other[j + i + 4] = _mm512_shuffle_i32x4(rows[j + i], rows[j + i + 4], 0xdd);
        }
    }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
    }
}
#endif

// Write the words of 16 rows to out, column by column, `width` words apart.
template <int64_t width>
inline void store_columns(BitLanes (&rows)[16], uint32_t* out) {
#if defined(__AVX512BW__)
    transpose(reinterpret_cast<__m512i(&)[16]>(rows));
    for (int64_t i = 0; i < 16; i++) std::memcpy(out + i * width, &rows[i], sizeof rows[i]);
#elif defined(__AVX2__)
    for (int64_t top = 0; top < 16; top += 8) {
        for (int64_t left = 0; left < 16; left += 8) {
            __m256i a[8], b[8];
            for (int64_t i = 0; i < 8; i++) a[i] = load_vector<__m256i>(reinterpret_cast<uint32_t*>(&rows[top + i]) + left);
            for (int64_t i = 0; i < 8; i += 2) {
                b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
                b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
            }
            for (int64_t i = 0; i < 8; i += 4) {
                for (int64_t j = 0; j < 2; j++) {
                    a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
                    a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
                }
            }
            for (int64_t i = 0; i < 4; i++) {
                b[i] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
                b[i + 4] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
            }
            for (int64_t i = 0; i < 8; i++) std::memcpy(out + (left + i) * width + top, &b[i], sizeof b[i]);
        }
    }
#else
    for (int64_t i = 0; i < 16; i++)
        for (int64_t n = 0; n < 16; n++) out[i * width + n] = rows[n][i];
#endif
}

// What expand_rows does with nibbles.
template <int64_t width, class T>
inline void expand_nibbles(const Block& block, int64_t n, T* out) {
    constexpr int64_t words = sizeof(T) / 2;
    BitLanes rows[words][16];
    for (int64_t i = 0; i < 16; i += 4) look_up(block, n + i, rows, i);
    for (int64_t i = 0; i < words; i++) store_columns<width>(rows[i], reinterpret_cast<uint32_t*>(out) + i * 16 * width + n);
}

#if defined(__AVX512BW__)
constexpr int byte_lanes = 16;
#elif defined(__AVX2__)
constexpr int byte_lanes = 8;
#else
constexpr int byte_lanes = 4;
#endif
typedef float ByteFloats __attribute__((vector_size(4 * byte_lanes)));
typedef int32_t ByteInts __attribute__((vector_size(4 * byte_lanes)));
typedef uint32_t ByteBits __attribute__((vector_size(4 * byte_lanes)));

// The scale of each row for both k.
inline ByteFloats twice(const float* values) {
#if defined(__AVX512BW__)
    const __m512i order = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return (ByteFloats)_mm512_permutexvar_ps(order, _mm512_castps256_ps512(_mm256_loadu_ps(values)));
#elif defined(__AVX2__)
    const __m256i order = _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0);
    return (ByteFloats)_mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(values)), order);
#else
    return ByteFloats{values[0], values[0], values[1], values[1]};
#endif
}

// Store the values of an even and an odd k, in turn, of 16 rows from row n on.
template <int64_t width>
inline void store_pairs(bf16* out, int64_t n, const ByteFloats (&values)[32 / byte_lanes]) {
    out += 2 * n;
#if defined(__AVX512BW__)
    _mm512_storeu_si512(out, rounded((__m512)values[0], (__m512)values[1]));
#elif defined(__AVX2__)
    for (int i = 0; i < 4; i += 2, out += 16) {
        const ByteBits low = rounded((ByteBits)values[i]) >> 16, high = rounded((ByteBits)values[i + 1]) >> 16;
        const __m256i numbers = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)low, (__m256i)high), 0xd8);
        std::memcpy(out, &numbers, sizeof numbers);
    }
#else
    for (int i = 0; i < 32; i++) out[i] = static_cast<bf16>(rounded((ByteBits)values[i / byte_lanes])[i % byte_lanes] >> 16);
#endif
}

template <int64_t width>
inline void store_pairs(float* out, int64_t n, const ByteFloats (&values)[32 / byte_lanes]) {
    typedef uint64_t Pairs __attribute__((vector_size(4 * byte_lanes)));
    typedef uint32_t Rows __attribute__((vector_size(2 * byte_lanes)));
    for (const ByteFloats& some : values) {
        const Rows even = __builtin_convertvector((Pairs)some & 0xffffffffu, Rows);
        const Rows odd = __builtin_convertvector((Pairs)some >> 32, Rows);
        std::memcpy(out + n, &even, sizeof even);
        std::memcpy(out + width + n, &odd, sizeof odd);
        n += byte_lanes / 2;
    }
}

// The values of one byte of each word: (byte - byte_bias) * scale.
//
// A byte as the second of four, of which the first is 0 and the upper two are those of 2^15 as a float32, makes the number
// 2^15 + byte. Multiplied and less (2^15 + byte_bias) * scale, which needs 20 bits of 24, that is the value, which needs 19.
// Both are exact, as is the product in between: it is never rounded, which only the intrinsic promises.
constexpr float byte_base = 32768;

inline ByteFloats byte_values(ByteBits words, int byte, ByteFloats scale, ByteFloats less) {
#if defined(__AVX512BW__)
    // One of four without a shuffle, as rounding keeps the unit for these busy.
    const __m512i base = _mm512_set1_epi32(0x47000000), second_byte = _mm512_set1_epi32(0xff00);
    const __m512i places = _mm512_add_epi32(_mm512_set4_epi32(0x0c00, 0x0800, 0x0400, 0), _mm512_set1_epi32(256 * byte));
    constexpr int and_or = 0xea;  // a & b | c
    const __m512i numbers = byte == 1 ? _mm512_ternarylogic_epi32((__m512i)words, second_byte, base, and_or)
                                      : _mm512_mask_shuffle_epi8(base, 0x2222222222222222, (__m512i)words, places);
    return (ByteFloats)_mm512_fmadd_ps((__m512)numbers, (__m512)scale, (__m512)less);
#elif defined(__AVX2__)
    const __m256i first = _mm256_broadcastsi128_si256(_mm_set_epi32(0x80800c80, 0x80800880, 0x80800480, 0x80800080));
    const __m256i places = _mm256_add_epi32(first, _mm256_set1_epi32(256 * byte));
    const __m256i numbers = _mm256_or_si256(_mm256_shuffle_epi8((__m256i)words, places), _mm256_set1_epi32(0x47000000));
    return (ByteFloats)_mm256_fmadd_ps((__m256)numbers, (__m256)scale, (__m256)less);
#else
    return __builtin_convertvector((ByteInts)(words >> 8 * byte & 255) - byte_bias, ByteFloats) * scale;
#endif
}

// What expand_rows does with bytes.
template <int64_t width, class T>
inline void expand_bytes(const Block& block, int64_t n, T* out) {
    constexpr int vectors = 16 / byte_lanes;
    ByteFloats scale[2 * vectors], less[2 * vectors];
    for (int i = 0; i < 2 * vectors; i++) {
        scale[i] = twice(block.scale + n + i * byte_lanes / 2);
        less[i] = scale[i] * -(byte_base + byte_bias);
    }
    const char* bytes = block.integers + byte_place(n, 0);
    // Read before anything is written: for a while, what is written may look like the same place.
    ByteBits all[block_depth / 4][vectors];
    for (auto& words : all) {
        fetch(bytes);
        for (ByteBits& some : words) {
            some = load_vector<ByteBits>(bytes);
            bytes += sizeof some;
        }
    }
    for (const auto& words : all) {
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++, out += 2 * width) {
            ByteFloats values[2 * vectors];
            for (int i = 0; i < 2 * vectors; i++)
                values[i] = byte_values(words[i % vectors], 2 * pair + i / vectors, scale[i], less[i]);
            store_pairs<width>(out, n, values);
        }
    }
}

// Write 32 k of 16 rows of W, from row n on, to out, which is where the numbers of the panel's first row are or would be in
// the order of linear.h, but with `width` columns.
template <int64_t width, class T>
inline void expand_rows(Kind kind, const Block& block, int64_t n, T* out) {
    if (kind == Kind::q8_0)
        expand_bytes<width>(block, n, out);
    else
        expand_nibbles<width>(block, n, out);
}

// The same for rows first .. end - 1, multiples of 16.
template <int64_t width = panel_width, class T>
void expand_block(Kind kind, const char* panel, int64_t index, T* out, int64_t first = 0, int64_t end = panel_width) {
    Block block;
    read_block(kind, panel, index, block, first, end);
    for (int64_t n = first; n < end; n += 16) expand_rows<width>(kind, block, n, out);
}

}  // namespace
