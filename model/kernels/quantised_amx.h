// How quantised weights lie and are expanded where AMX multiplies with them (see quantised.h for the blocks).
//
// Nibbles are looked up. The 16 values that the 32 weights of a row can have are computed and rounded once; one instruction
// looks up 32 of them. So four rows take turns in the nibbles of words of 16 bits, one word for each k. An index has five
// bits and chooses among the values of two rows; of the nibbles in a word only the last is alone once it is shifted down, in
// the others the fifth bit is cleared or set. The numbers of one row of W come out side by side, as a tile that is
// multiplied from the left wants them.
//
// Bytes are too many to look up: each is put into the bits of a float32, multiplied and rounded, and comes out where a tile
// that is multiplied from the right wants it. 64 bytes are two pairs of k of 16 rows, and four vectors of
// float32, an even and an odd k of 8 rows in turn; each word of 32 bits has a byte of every vector.
#pragma once

namespace {

// Which nibble, counted from the first word of a block, or which byte holds q of row n and k.
constexpr int64_t nibble_place(int64_t n, int64_t k) { return (n / 4 * block_depth + k) * 4 + n % 4; }
constexpr int64_t byte_place(int64_t n, int64_t k) {
    const int64_t vector = k / 2 % 2 * 2 + n / 8 % 2, lane = n % 8 * 2 + k % 2;
    return n / 16 * 16 * block_depth + k / 4 * 64 + lane * 4 + vector;
}
constexpr int byte_bias = 128;

// Call put(i, values) for rows first + i of a block of nibbles, i < count: with 32 k of a row in bfloat16.
template <class Put>
inline void for_each_row(const Block& block, int64_t first, int64_t count, const Put& put) {
    const float *scale = block.scale + first, *offset = block.offset + first;
    const __m512i all = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_sub_epi32(all, _mm512_set1_epi32(block.zero)));
    const __m512i nibble = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
    constexpr int and_or = 0xea;  // a & b | c
    const char* words = block.integers + nibble_place(first, 0) / 2;
    for (int64_t i = 0; i < count; i += 4, words += sizeof(__m512i)) {
        fetch(words);
        const __m512i four = _mm512_loadu_si512(words);
        const auto values = [&](int64_t j) {
            return _mm512_fmadd_ps(numbers, _mm512_set1_ps(scale[i + j]), _mm512_set1_ps(offset[i + j]));
        };
        const __m512i low = (__m512i)_mm512_cvtne2ps_pbh(values(1), values(0));
        const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(values(2), values(3));
        const __m512i second = _mm512_ternarylogic_epi32(_mm512_srli_epi16(four, 4), nibble, upper, and_or);
        const __m512i third = _mm512_ternarylogic_epi32(_mm512_srli_epi16(four, 8), nibble, upper, and_or);
        put(i, _mm512_permutexvar_epi16(_mm512_and_si512(four, nibble), low));
        put(i + 1, _mm512_permutexvar_epi16(second, low));
        put(i + 2, _mm512_permutexvar_epi16(third, high));
        put(i + 3, _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 12), high));
    }
}

// Exchange rows and columns of 16 x 16 words of 32 bits.
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

// Write 32 k of rows first .. first + count - 1 of a panel of nibbles to out [count][32]. Both are multiples of 4.
inline void expand_rows(Kind kind, const char* panel, int64_t index, bf16* out, int64_t first, int64_t count) {
    Block block;
    read_block(kind, panel, index, block);
    for_each_row(block, first, count, [&](int64_t i, __m512i values) __attribute__((always_inline)) {
        _mm512_storeu_si512(out + i * block_depth, values);
    });
}

// What expand_block does, of bytes.
//
// A byte of q + 128 as the second of four, of which the first is 0 and the upper two are those of 2^15 as a float32, makes
// the number 2^15 + 128 + q. Multiplied and less (2^15 + 128) * scale, which needs 20 bits of 24, that is scale * q, which
// needs 19: exact. One vector of four is made without a shuffle, as rounding keeps the unit for these busy.
template <int64_t width>
inline void expand_bytes(const char* panel, int64_t index, bf16* out, int64_t first, int64_t end) {
    const __m512i base = _mm512_set1_epi32(0x47000000), second_byte = _mm512_set1_epi32(0xff00);
    const __m512i low_twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i high_twice = _mm512_add_epi32(low_twice, _mm512_set1_epi32(8));
    const __m512 bias = _mm512_set1_ps(-32768 - byte_bias);
    constexpr int and_or = 0xea;  // a & b | c
    const char* unit = panel + index * unit_bytes(Kind::q8_0);
    for (int64_t n = first; n < end; n += 16) {
        const __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit + 2 * n)));
        const __m512 scale[2] = {_mm512_permutexvar_ps(low_twice, scales), _mm512_permutexvar_ps(high_twice, scales)};
        const __m512 less[2] = {_mm512_mul_ps(scale[0], bias), _mm512_mul_ps(scale[1], bias)};
        const char* bytes = unit + 2 * panel_width + byte_place(n, 0);
        __m512i all[8];
        for (int64_t i = 0; i < 8; i++) {
            fetch(bytes + 64 * i);
            all[i] = _mm512_loadu_si512(bytes + 64 * i);
        }
        for (int64_t k = 0; k < block_depth; k += 4, bytes += 64) {
            const __m512i four = all[k / 4];
            const auto value = [&](int vector) __attribute__((always_inline)) {
                const __m512i places = _mm512_add_epi32(_mm512_set4_epi32(0x0c00, 0x0800, 0x0400, 0), _mm512_set1_epi32(256 * vector));
                const __m512i number = vector == 1
                                           ? _mm512_ternarylogic_epi32(four, second_byte, base, and_or)
                                           : _mm512_mask_shuffle_epi8(base, 0x2222222222222222, four, places);
                return _mm512_fmadd_ps((__m512)number, scale[vector % 2], less[vector % 2]);
            };
            bf16* target = out + k * width + n * 2;
            _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(value(1), value(0)));
            _mm512_storeu_si512(target + 2 * width, (__m512i)_mm512_cvtne2ps_pbh(value(3), value(2)));
        }
    }
}

// Write 32 k of rows first .. end - 1 of a panel of W to out, which is where the numbers of its first row are or would
// be in the order of linear.h, but with `width` columns. first and end are multiples of 16.
template <int64_t width = panel_width>
void expand_block(Kind kind, const char* panel, int64_t index, bf16* out, int64_t first = 0, int64_t end = panel_width) {
    if (kind == Kind::q8_0) return expand_bytes<width>(panel, index, out, first, end);
    Block block;
    read_block(kind, panel, index, block);
    for (int64_t n = first; n < end; n += 16) {
        __m512i rows[16];
        for_each_row(block, n, 16, [&](int64_t i, __m512i values) __attribute__((always_inline)) {
            rows[i] = values;
        });
        transpose(rows);
        for (int64_t pair = 0; pair < 16; pair++) _mm512_storeu_si512(out + 2 * (pair * width + n), rows[pair]);
    }
}

}  // namespace
