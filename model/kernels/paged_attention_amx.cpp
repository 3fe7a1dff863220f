// The products of paged attention in AMX tiles; see paged_attention.h. The order of the cache is the one that tiles want:
// 16 pairs of dimensions of K by 16 positions, and 8 pairs of positions of V by 16 dimensions. One tile product adds
// 32 dimensions to the scores of 16 queries, or 16 positions to their outputs; each query is a row, and no sum of a row
// depends on the others.
// variants: amx_bf16
#include <immintrin.h>

#include "paged_attention.h"

namespace {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;
constexpr int TILE_DIMENSIONS = 32;  // of q and K in one tile product

struct Tiles : BFloat16 {
    static constexpr int GROUP = TILE_ROWS;

    // A tile has as many rows for each group of a Tile of queries. So only the last one may be incomplete: what it
    // computes beyond its queries is in rows of their own, which nobody reads.
    static int next_group(int queries) { return queries < GROUP ? queries : GROUP; }

    // The operand of ldtilecfg: Intel 64 manual, volume 1, section 18.2 "tile configuration". Tiles 0 to 3 hold sums,
    // 4 queries, 5 keys, 6 weights and 7 values.
    struct alignas(64) Setup {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};

        explicit Setup(int queries) {
            for (int tile = 0; tile < 8; tile++) {
                row_bytes[tile] = TILE_BYTES;
                rows[tile] = static_cast<uint8_t>(queries < TILE_ROWS ? queries : TILE_ROWS);
            }
            row_bytes[6] = BLOCK * sizeof(Element);
            rows[5] = TILE_ROWS;
            rows[7] = BLOCK / PACK;
            _tile_loadconfig(this);
        }
        ~Setup() { _tile_release(); }
    };
};

void fetch(const void* address, int rows, size_t stride) {
    for (int row = 0; row < rows; row++) __builtin_prefetch(static_cast<const char*>(address) + row * stride);
}

// scores [16][SPAN] of the span's blocks; queries [16][head_dim]
void multiply_keys(const uint16_t* queries, int head_dim, const Span<Tiles>& span, const Span<Tiles>& next, Floats* scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < head_dim; d += TILE_DIMENSIONS) {
        const size_t offset = size_t(d) * BLOCK;
        _tile_loadd(4, queries + d, head_dim * sizeof(uint16_t));
        for (int b = 0; b < span.blocks; b++) {
            fetch(next.keys[b] + offset, TILE_ROWS, TILE_BYTES);
            _tile_loadd(5, span.keys[b] + offset, TILE_BYTES);
            if (b == 0) _tile_dpbf16ps(0, 4, 5);
            if (b == 1) _tile_dpbf16ps(1, 4, 5);
            if (b == 2) _tile_dpbf16ps(2, 4, 5);
            if (b == 3) _tile_dpbf16ps(3, 4, 5);
        }
    }
    constexpr int stride = SPAN * sizeof(float);
    _tile_stored(0, scores, stride);
    _tile_stored(1, scores + 1, stride);
    _tile_stored(2, scores + 2, stride);
    _tile_stored(3, scores + 3, stride);
}

// Add 64 dimensions of the blocks' values to sums [16][head_dim]; weights [16][SPAN].
void multiply_values(const uint16_t* weights, int head_dim, int dimension, const Span<Tiles>& span, const Span<Tiles>& next,
                     Floats* sums) {
    const size_t sum_stride = head_dim * sizeof(float), value_stride = head_dim * Tiles::PACK * sizeof(uint16_t);
    _tile_loadd(0, sums, sum_stride);
    _tile_loadd(1, sums + 1, sum_stride);
    _tile_loadd(2, sums + 2, sum_stride);
    _tile_loadd(3, sums + 3, sum_stride);
    for (int b = 0; b < span.blocks; b++) {
        const uint16_t* values = span.values[b] + dimension * Tiles::PACK;
        const uint16_t* ahead = next.values[b] + dimension * Tiles::PACK;
        _tile_loadd(6, weights + b * BLOCK, SPAN * sizeof(uint16_t));
        for (int v = 0; v < 4; v++) fetch(ahead + v * TILE_DIMENSIONS, BLOCK / Tiles::PACK, value_stride);
        _tile_loadd(7, values, value_stride);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, values + TILE_DIMENSIONS, value_stride);
        _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, values + 2 * TILE_DIMENSIONS, value_stride);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(7, values + 3 * TILE_DIMENSIONS, value_stride);
        _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, sums, sum_stride);
    _tile_stored(1, sums + 1, sum_stride);
    _tile_stored(2, sums + 2, sum_stride);
    _tile_stored(3, sums + 3, sum_stride);
}

template <>
void Tile<Tiles>::add(const Span<Tiles>& span, const Span<Tiles>& next, int first, int count) {
    Floats scores[TILE_ROWS * SPAN_VECTORS];
    Factor weights[TILE_ROWS * SPAN / PACK];
    const int head_dim = plan().head_dim;
    Floats* own_sums = sums + first * head_vectors();
    multiply_keys(reinterpret_cast<const uint16_t*>(factors + first * head_dim / PACK), head_dim, span, next, scores);
    for (int i = 0; i < count; i++) {
        const float decay = weigh(first + i, span.base, span.blocks, scores + i * SPAN_VECTORS, weights + i * SPAN / PACK);
        if (decay == 1.0f) continue;
        for (int v = 0; v < head_vectors(); v++) own_sums[i * head_vectors() + v] *= decay;
    }
    for (int dimension = 0; dimension < head_dim; dimension += 4 * LANES)
        multiply_values(reinterpret_cast<const uint16_t*>(weights), head_dim, dimension, span, next,
                        own_sums + dimension / LANES);
}

}  // namespace

OCTAVO_PAGED_ATTENTION(paged_attention_bf16, Tiles)
