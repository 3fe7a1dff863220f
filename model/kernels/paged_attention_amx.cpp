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

    // The operand of ldtilecfg: Intel 64 manual, volume 1, section 18.2 "tile configuration". Tiles 0 and 1 hold
    // outputs, 2 values, 3 weights, 4 and 7 scores, 5 queries and 6 keys.
    struct alignas(64) Setup {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};

        explicit Setup(int queries) {
            for (int tile = 0; tile < 8; tile++) {
                row_bytes[tile] = TILE_BYTES;
                rows[tile] = static_cast<uint8_t>(queries < TILE_ROWS ? queries : TILE_ROWS);
            }
            rows[2] = BLOCK / PACK;
            row_bytes[3] = BLOCK * sizeof(Element);
            rows[6] = TILE_ROWS;
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

    static constexpr int PARTS = TILE_ROWS / 4;

    int head_dim() const { return tile.plan().head_dim; }
    int count() const { return smaller(TILE_ROWS, tile.queries - first); }

    // To the L2 cache: the L1 cache is full of what is being multiplied.
    void fetch(const uint16_t* address, int rows, size_t stride) const {
        for (int row = 0; row < rows; row++) _mm_prefetch(address + row * stride, _MM_HINT_T1);
    }

    // Part `part` of `parts` of the scores: of some blocks, two of which share each load of queries.
    void multiply_keys(int part, int parts) const {
        int block = part * span.blocks / parts;
        const int end = (part + 1) * span.blocks / parts;
        for (; block + 1 < end; block += 2) multiply_blocks<2>(block);
        if (block < end) multiply_blocks<1>(block);
    }

    template <int count>
    void multiply_blocks(int block) const {
        const int32_t* queries = tile.factors + first * head_dim() / Tiles::PACK;
        _tile_zero(4);
        _tile_zero(7);
        for (int d = 0; d < head_dim(); d += TILE_DIMENSIONS) {
            const size_t offset = size_t(d) * BLOCK;
            for (int b = block; b < block + count && next != nullptr; b++)
                fetch(next->keys[b] + offset, TILE_ROWS, TILE_BYTES / sizeof(uint16_t));
            _tile_loadd(5, queries + d / Tiles::PACK, head_dim() * sizeof(uint16_t));
            _tile_loadd(6, span.keys[block] + offset, TILE_BYTES);
            _tile_dpbf16ps(4, 5, 6);
            if constexpr (count == 2) {
                _tile_loadd(6, span.keys[block + 1] + offset, TILE_BYTES);
                _tile_dpbf16ps(7, 5, 6);
            }
        }
        _tile_stored(4, scores + block, SPAN * sizeof(float));
        if constexpr (count == 2) _tile_stored(7, scores + block + 1, SPAN * sizeof(float));
    }

    // Part `part` of `parts` of the outputs: of 32 dimensions after another, one block after another of each.
    void multiply_values(int part, int parts) const {
        const int all = head_dim() / TILE_DIMENSIONS * span.blocks, end = (part + 1) * all / parts;
        for (int i = part * all / parts; i < end; i++) add_values(i / span.blocks * TILE_DIMENSIONS, i % span.blocks);
    }

    // Add 32 dimensions of a block's values to the outputs, which stay in tiles from the first block to the last.
    void add_values(int dimension, int block) const {
        Floats* sums = tile.sums + first * tile.head_vectors() + dimension / LANES;
        const size_t sum_stride = head_dim() * sizeof(float), pair_stride = head_dim() * Tiles::PACK;
        const uint16_t* values = span.values[block] + dimension * Tiles::PACK;
        if (block == 0) {
            _tile_loadd(0, sums, sum_stride);
            _tile_loadd(1, sums + 1, sum_stride);
        }
        if (next != nullptr) {
            const uint16_t* ahead = next->values[block] + dimension * Tiles::PACK;
            fetch(ahead, BLOCK / Tiles::PACK, pair_stride);
            fetch(ahead + TILE_DIMENSIONS, BLOCK / Tiles::PACK, pair_stride);
        }
        _tile_loadd(3, weights + block * BLOCK / Tiles::PACK, SPAN * sizeof(uint16_t));
        _tile_loadd(2, values, pair_stride * sizeof(uint16_t));
        _tile_dpbf16ps(0, 3, 2);
        _tile_loadd(2, values + TILE_DIMENSIONS, pair_stride * sizeof(uint16_t));
        _tile_dpbf16ps(1, 3, 2);
        if (block < span.blocks - 1) return;
        _tile_stored(0, sums, sum_stride);
        _tile_stored(1, sums + 1, sum_stride);
    }

    // Weigh the scores, and call between(part, parts) for every part meanwhile.
    template <class Between>
    void weigh(const Between& between) const {
        alignas(TILE_BYTES) float decay[TILE_ROWS];
        const int vectors = tile.head_vectors();
        tile.weigh(first, count(), span, span.blocks, scores, weights, decay, [&](int i) {
            if (i % 4 == 3) between(i / 4, PARTS);
        });
        for (int part = count() / 4; part < PARTS; part++) between(part, PARTS);
        Floats* sums = tile.sums + first * vectors;
        for (int i = 0; i < count(); i++)
            for (int v = 0; v < vectors; v++) sums[i * vectors + v] *= decay[i];
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
    group(begin).multiply_keys(0, 1);
    for (int first = begin; first < end; first += TILE_ROWS) {
        const Group before = group(first - TILE_ROWS), behind = group(first + TILE_ROWS);
        const auto multiply = [&](int part, int parts) {
            if (first > begin) before.multiply_values(part, parts);
            if (first + TILE_ROWS < end) behind.multiply_keys(part, parts);
        };
        group(first).weigh(multiply);
    }
    group(end - TILE_ROWS).multiply_values(0, 1);
}

}  // namespace

OCTAVO_PAGED_ATTENTION(paged_attention_bf16, Tiles)
