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

// A tile has as many rows for each group of a Tile of queries. So only the last one may be incomplete: what it computes
// beyond its queries is in rows of their own, which nobody reads.
struct Group {
    Tile<Tiles>& tile;
    const Span<Tiles>& span;
    const Span<Tiles>* next;  // null where it is fetched already
    int first;
    Floats* scores;  // [16][SPAN]
    int32_t* weights;

    int head_dim() const { return tile.plan().head_dim; }

    void fetch(const uint16_t* address, int rows, size_t stride) const {
        for (int row = 0; row < rows; row++) __builtin_prefetch(address + row * stride);
    }

    void multiply_keys() const {
        for (int block = 0; block < span.blocks; block += 4) multiply_keys(block);
    }

    // The scores of up to four blocks.
    void multiply_keys(int block) const {
        const int blocks = smaller(4, span.blocks - block);
        const int32_t* queries = tile.factors + first * head_dim() / Tiles::PACK;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < head_dim(); d += TILE_DIMENSIONS) {
            const size_t offset = size_t(d) * BLOCK;
            _tile_loadd(4, queries + d / Tiles::PACK, head_dim() * sizeof(uint16_t));
            for (int b = 0; b < blocks; b++) {
                if (next != nullptr) fetch(next->keys[block + b] + offset, TILE_ROWS, TILE_BYTES / sizeof(uint16_t));
                _tile_loadd(5, span.keys[block + b] + offset, TILE_BYTES);
                if (b == 0) _tile_dpbf16ps(0, 4, 5);
                if (b == 1) _tile_dpbf16ps(1, 4, 5);
                if (b == 2) _tile_dpbf16ps(2, 4, 5);
                if (b == 3) _tile_dpbf16ps(3, 4, 5);
            }
        }
        constexpr int stride = SPAN * sizeof(float);
        _tile_stored(0, scores + block, stride);
        _tile_stored(1, scores + block + 1, stride);
        _tile_stored(2, scores + block + 2, stride);
        _tile_stored(3, scores + block + 3, stride);
    }

    void weigh() const {
        const int vectors = tile.head_vectors(), left = tile.queries - first;
        Floats* sums = tile.sums + first * vectors;
        for (int i = 0; i < TILE_ROWS && i < left; i++, sums += vectors) {
            const float decay =
                tile.weigh(first + i, span.base, span.blocks, scores + i * SPAN_VECTORS, weights + i * SPAN / Tiles::PACK);
            if (decay == 1.0f) continue;
            for (int v = 0; v < vectors; v++) sums[v] *= decay;
        }
    }

    void multiply_values() const {
        for (int dimension = 0; dimension < head_dim(); dimension += 4 * LANES) add_values(dimension);
    }

    // Add 64 dimensions of the blocks' values to the sums.
    void add_values(int dimension) const {
        Floats* sums = tile.sums + first * tile.head_vectors() + dimension / LANES;
        const size_t sum_stride = head_dim() * sizeof(float), value_stride = head_dim() * Tiles::PACK;
        _tile_loadd(0, sums, sum_stride);
        _tile_loadd(1, sums + 1, sum_stride);
        _tile_loadd(2, sums + 2, sum_stride);
        _tile_loadd(3, sums + 3, sum_stride);
        for (int b = 0; b < span.blocks; b++) {
            const uint16_t* values = span.values[b] + dimension * Tiles::PACK;
            _tile_loadd(6, weights + b * BLOCK / Tiles::PACK, SPAN * sizeof(uint16_t));
            for (int v = 0; v < 4 && next != nullptr; v++)
                fetch(next->values[b] + dimension * Tiles::PACK + v * TILE_DIMENSIONS, BLOCK / Tiles::PACK, value_stride);
            _tile_loadd(7, values, value_stride * sizeof(uint16_t));
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, values + TILE_DIMENSIONS, value_stride * sizeof(uint16_t));
            _tile_dpbf16ps(1, 6, 7);
            _tile_loadd(7, values + 2 * TILE_DIMENSIONS, value_stride * sizeof(uint16_t));
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(7, values + 3 * TILE_DIMENSIONS, value_stride * sizeof(uint16_t));
            _tile_dpbf16ps(3, 6, 7);
        }
        _tile_stored(0, sums, sum_stride);
        _tile_stored(1, sums + 1, sum_stride);
        _tile_stored(2, sums + 2, sum_stride);
        _tile_stored(3, sums + 3, sum_stride);
    }
};

// While the vectors weigh one group, the tiles multiply the keys of the group behind it and the values of the group
// before it, whose operands were written long enough ago.
template <>
void Tile<Tiles>::add(const Span<Tiles>& span, const Span<Tiles>& next) {
    Floats scores[2][TILE_ROWS * SPAN_VECTORS];
    Factor weights[2][TILE_ROWS * SPAN / PACK];
    const auto is_seen = [&](int first) {
        return sees(span, first, queries - first < TILE_ROWS ? queries - first : TILE_ROWS);
    };
    int begin = 0, end = (queries + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    while (!is_seen(begin)) begin += TILE_ROWS;
    while (!is_seen(end - TILE_ROWS)) end -= TILE_ROWS;
    const auto group = [&](int first) {
        const int turn = first / TILE_ROWS % 2;
        return Group{*this, span, first == begin ? &next : nullptr, first, scores[turn], weights[turn]};
    };
    group(begin).multiply_keys();
    for (int first = begin; first < end; first += TILE_ROWS) {
        if (first + TILE_ROWS < end) group(first + TILE_ROWS).multiply_keys();
        group(first).weigh();
        if (first > begin) group(first - TILE_ROWS).multiply_values();
    }
    group(end - TILE_ROWS).multiply_values();
}

}  // namespace

OCTAVO_PAGED_ATTENTION(paged_attention_bf16, Tiles)
