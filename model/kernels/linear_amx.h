// Where the tiles of W come from, for products with W on the right: at(index, column) has 32 k of the 32 columns from
// `column` on, 4 bytes a column; the same columns of the next pair of k follow after `stride` bytes. The loops also call,
// while tiles are multiplied, prepare(index, column), which may make 16 columns of tiles before at() is asked for them, and
// fetch_next(index, column), which may begin to fetch the same place of the next panel.
#pragma once
#include <immintrin.h>

#include "linear.h"

namespace {

constexpr int tile_rows = 16, tile_bytes = 64, most_rows = 32;  // that are multiplied at once
constexpr int64_t panel_row_bytes = panel_width * 4;  // one k-pair of all columns
constexpr int64_t half_width = panel_width / 2;

// A panel as it lies in memory.
struct Numbers {
    const bf16* panel;
    int64_t depth;
    static constexpr int64_t stride = panel_row_bytes;

    explicit Numbers(const LinearCall<bf16>& call, int64_t index) : panel(call.panel(index)), depth(call.depth()) {}

    const char* at(int64_t index, int64_t column) const {
        return reinterpret_cast<const char*>(panel + index * tile_depth * panel_width + column * 2);
    }

    static void prepare(int64_t, int64_t) {}

    void fetch_next(int64_t index, int64_t column) const {
        const char* next = at(index, column) + depth * panel_row_bytes / 2;
        asm("" : "+r"(next));  // or GCC keeps 32 sums of offsets, in registers that it does not have
#pragma GCC unroll 16
        for (int64_t row = 0; row < tile_rows; row++) {
            _mm_prefetch(next + row * stride, _MM_HINT_T1);
            _mm_prefetch(next + row * stride + 64, _MM_HINT_T1);
        }
    }
};

// A quantised panel as numbers. Its halves lie one after the other, so that all sets of the L1 cache share in one of them.
struct Halves {
    bf16* halves;
    int64_t depth;
    static constexpr int64_t stride = half_width * 4;

    explicit Halves(const LinearCall<bf16>& call) : halves(call.expanded()), depth(call.depth()) {}

    bf16* place(int64_t index, int64_t column) const { return halves + column * depth + index * tile_depth * half_width; }

    const char* at(int64_t index, int64_t column) const { return reinterpret_cast<const char*>(place(index, column)); }

    static void prepare(int64_t, int64_t) {}
};

// The same for the rows of x that come first: at() expands what it is asked for, so it is called once for each place.
struct Expanding : Halves {
    Kind kind;
    const char *packed, *next_packed;

    Expanding(const LinearCall<bf16>& call, int64_t panel)
        : Halves(call),
          kind(call.linear.kind),
          packed(call.quantised_panel(panel)),
          next_packed(call.quantised_panel(panel + 1)) {}

    const char* at(int64_t index, int64_t column) const {
        expand_block<half_width>(kind, packed, index, place(index, column) - column * 2, column, column + half_width);
        return Halves::at(index, column);
    }

    void fetch_next(int64_t index, int64_t column) const {
        const int64_t tiles = depth / tile_depth, bytes = (next_packed - packed) / (2 * tiles);
        const char* next = next_packed + (column / half_width * tiles + index) * bytes;
        for (int64_t byte = 0; byte < bytes; byte += 64) _mm_prefetch(next + byte, _MM_HINT_T1);
    }
};

// A quantised panel that is needed for few rows only: its numbers never leave the L1 cache. prepare() expands 16 columns of
// the next tiles to one of two places, while at() gives those in the other.
struct Passing {
    Kind kind;
    const char* packed;
    int64_t tiles;
    mutable Block block;
    alignas(64) mutable bf16 places[2][panel_width * tile_depth];
    static constexpr int64_t stride = half_width * 4;

    Passing(const LinearCall<bf16>& call, int64_t panel)
        : kind(call.linear.kind), packed(call.quantised_panel(panel)), tiles(call.depth() / tile_depth) {}

    const char* at(int64_t index, int64_t column) const {
        if (index == 0)
            for (int64_t tile = 0; tile < half_width; tile += tile_rows) prepare(0, column + tile);
        return reinterpret_cast<const char*>(places[index % 2] + column * tile_depth);
    }

    void prepare(int64_t index, int64_t column) const {
        if (index == tiles) return;
        bf16* place = places[index % 2] + column / half_width * half_width * (tile_depth - 2);
        if (column % half_width == 0) read_block(kind, packed, index, block, column, column + half_width);
        expand_rows<half_width>(kind, block, column, place);
    }

    static void fetch_next(int64_t, int64_t) {}  // the next tiles are fetched as these are expanded
};

}  // namespace
