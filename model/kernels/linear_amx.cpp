// The linear kernel for CPUs with AMX (Intel Sapphire Rapids and later): a tile product adds x [16, 32] times
// w [32, 16] to sums [16, 16] in one instruction. It serves every number of rows, down to one, by configuring lower
// tiles: the sum of one output does not depend on how many rows its tile has.
// variants: amx_bf16
#include <immintrin.h>

#include "linear.h"

namespace {

constexpr int tile_rows = 16, tile_bytes = 64;
constexpr int64_t panel_row_bytes = panel_width * 4;  // one k-pair of all columns
constexpr int64_t half_width = panel_width / 2;
constexpr int64_t l1_bytes = 40 * 1024;  // of the 48 KB of a CPU with AMX

// The operand of ldtilecfg: Intel 64 manual, volume 1, section 18.2 "tile configuration".
struct alignas(64) TileConfiguration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Sums are tiles 0-3. Up to 16 rows: x is tile 4, w is 5-7. Up to 32 rows: x is 4 and 5, w is 6 and 7; the sums of
    // the lower rows of x are 2 and 3, or 1 and 3 where x is on the right and its rows are columns.
    explicit TileConfiguration(int64_t x_rows, bool x_right = false) {
        for (int tile = 0; tile < 8; tile++) {
            row_bytes[tile] = tile_bytes;
            rows[tile] = tile_rows;
        }
        const auto narrow = [&](auto... tiles) {
            const int64_t left = x_rows <= tile_rows ? x_rows : x_rows - tile_rows;
            if (x_right)
                ((row_bytes[tiles] = static_cast<uint16_t>(left * 4)), ...);
            else
                ((rows[tiles] = static_cast<uint8_t>(left)), ...);
        };
        if (x_rows <= tile_rows)
            narrow(0, 1, 2, 3, 4);
        else
            narrow(x_right ? 1 : 2, 3, 5);
        _tile_loadconfig(this);
    }
    ~TileConfiguration() { _tile_release(); }  // an idle CPU sleeps deeper, and switches tasks faster, without tiles
};

// Rows of x as tiles along k. A last, incomplete tile is completed with zeros in a copy.
struct TiledRows {
    const bf16* x;
    int64_t stride, whole_tiles, tiles;
    alignas(64) bf16 last[2 * tile_rows * tile_depth];

    TiledRows(const LinearCall<bf16>& call, int64_t first_row, int64_t rows)
        : x(call.row(first_row)), stride(call.x_stride) {
        const int64_t depth = call.linear.in_features;
        whole_tiles = depth / tile_depth;
        tiles = (depth + tile_depth - 1) / tile_depth;
        if (tiles == whole_tiles) return;
        std::memset(last, 0, sizeof last);
        for (int64_t r = 0; r < rows; r++)
            std::memcpy(last + r * tile_depth, x + r * stride + whole_tiles * tile_depth,
                        (depth - whole_tiles * tile_depth) * sizeof(bf16));
    }
};

// Where the tiles of W come from: at(index) has 32 k of the columns from `column` on, 4 bytes a column. A row of 16 or
// 32 columns is followed by the same columns of the next pair of k after `stride` bytes, by other columns after `half`.
struct Numbers {
    const char* panel;
    int64_t stride = panel_row_bytes, half = panel_row_bytes / 2;

    explicit Numbers(const bf16* whole) : panel(reinterpret_cast<const char*>(whole)) {}
    // Two halves of a panel, one after the other: the tiles of a half of a whole panel share half of the sets of the L1
    // cache, where these fit.
    Numbers(const bf16* halves, int64_t depth)
        : panel(reinterpret_cast<const char*>(halves)), stride(panel_row_bytes / 2), half(depth / 2 * stride) {}

    const char* at(int64_t index, int64_t column) const {
        return panel + index * tile_rows * stride + column / half_width * half;
    }
};

// Few rows of x as columns of tiles, for products with W on the left: for each 32 k one tile of up to 16 rows or two,
// [k / 2][16][2]. A single row has this order by itself. Every thread makes its own copy, once for the call of this number
// and where it would else expand a panel, which takes twice the room: what another core has just written is slow to read,
// and x is smaller than its tiles.
struct Columns {
    const bf16* pairs;
    int64_t tiles = 1, stride = 4;  // stride: bytes from a pair of k to the next

    Columns(const LinearCall<bf16>& call, int64_t number) : pairs(call.x) {
        if (call.rows == 1) return;
        bf16* next = call.expanded();
        pairs = next;
        tiles = (call.rows + tile_rows - 1) / tile_rows;
        stride = tile_bytes;
        static thread_local int64_t copied = 0;
        if (copied == number) return;
        copied = number;
        for (int64_t k = 0; k < call.linear.in_features; k += tile_depth) {
            for (int64_t top = 0; top < call.rows; top += tile_rows, next += tile_rows * tile_depth) {
                __m512i rows[tile_rows] = {};
                for (int64_t r = 0; r < tile_rows && top + r < call.rows; r++)
                    rows[r] = _mm512_loadu_si512(call.row(top + r) + k);
                transpose(rows);
                for (int64_t r = 0; r < tile_rows; r++) _mm512_storeu_si512(next + r * tile_depth, rows[r]);
            }
        }
    }

    const bf16* at(int64_t index, int64_t tile) const {
        return pairs + index * tiles * tile_rows * stride / 2 + tile * tile_rows * tile_depth;
    }
};

// sums [rows][64] for up to 16 rows: one tile of rows by four tiles of columns.
void sum_low(const TiledRows& rows, const Numbers& weights, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    auto add = [&](const bf16* x, int64_t stride, const char* w) {
        _tile_loadd(4, x, stride * 2);
        _tile_loadd(5, w, weights.stride);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w + 64, weights.stride);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, w + weights.half, weights.stride);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w + weights.half + 64, weights.stride);
        _tile_dpbf16ps(3, 4, 5);
    };
    for (int64_t tile = 0; tile < rows.whole_tiles; tile++)
        add(rows.x + tile * tile_depth, rows.stride, weights.at(tile, 0));
    if (rows.tiles > rows.whole_tiles) add(rows.last, tile_depth, weights.at(rows.whole_tiles, 0));
    _tile_stored(0, sums, panel_row_bytes);
    _tile_stored(1, sums + 16, panel_row_bytes);
    _tile_stored(2, sums + 32, panel_row_bytes);
    _tile_stored(3, sums + 48, panel_row_bytes);
}

// sums [rows][sums_width] of half a panel (32 columns) for 17 to 32 rows: two tiles of rows by two tiles of columns.
// There are enough products here to fetch the same place of the next panel from memory meanwhile. With `stream`, x should
// not drive the weights from the L1 cache.
template <bool fetch, bool stream>
void sum_high(const TiledRows& rows, const Numbers& weights, int64_t column, float* sums, int64_t sums_width) {
    const int64_t panel_bytes = rows.tiles * tile_rows * panel_row_bytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    auto add = [&](const bf16* x, int64_t stride, const char* w) {
        if constexpr (fetch) {
            const char* next = w + panel_bytes;
            asm("" : "+r"(next));  // or GCC keeps 32 sums of offsets, in registers that it does not have
#pragma GCC unroll 16
            for (int64_t row = 0; row < tile_rows; row++) {
                _mm_prefetch(next + row * panel_row_bytes, _MM_HINT_T1);
                _mm_prefetch(next + row * panel_row_bytes + 64, _MM_HINT_T1);
            }
        }
        const bf16* x_below = x + tile_rows * stride;
        if constexpr (stream) {
            _tile_stream_loadd(4, x, stride * 2);
            _tile_stream_loadd(5, x_below, stride * 2);
        } else {
            _tile_loadd(4, x, stride * 2);
        }
        _tile_loadd(6, w, weights.stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, weights.stride);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (!stream) _tile_loadd(5, x_below, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    };
    for (int64_t tile = 0; tile < rows.whole_tiles; tile++)
        add(rows.x + tile * tile_depth, rows.stride, weights.at(tile, column));
    if (rows.tiles > rows.whole_tiles) add(rows.last, tile_depth, weights.at(rows.whole_tiles, column));
    const int64_t sums_stride = sums_width * 4;
    _tile_stored(0, sums, sums_stride);
    _tile_stored(1, sums + 16, sums_stride);
    _tile_stored(2, sums + tile_rows * sums_width, sums_stride);
    _tile_stored(3, sums + tile_rows * sums_width + 16, sums_stride);
}

// sums [rows][64] for up to 32 rows.
template <bool fetch>
void sum_rows(const TiledRows& tiled, int64_t rows, const Numbers& numbers, float* sums) {
    if (rows <= tile_rows) return sum_low(tiled, numbers, sums);
    sum_high<fetch, false>(tiled, numbers, 0, sums, panel_width);
    sum_high<fetch, false>(tiled, numbers, half_width, sums + half_width, panel_width);
}

// sums [rows][64] for up to 32 rows and a quantised panel, whose rows are tiles on the left: one tile of rows of x by four
// of W, or two by two. The numbers never leave the L1 cache: they are expanded just before they are needed, to two places
// in turn, so that one is read while the next is written.
template <int x_tiles>
void sum_quantised(const LinearCall<bf16>& call, const Columns& x, const char* packed, float* sums) {
    constexpr int64_t together = panel_width / x_tiles, tile = tile_rows * tile_depth;
    alignas(64) bf16 places[2][together * tile_depth];
    for (int64_t column = 0; column < panel_width; column += together, sums += together) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t index = 0; index < call.depth() / tile_depth; index++) {
            bf16* w = places[index % 2];
            expand_rows(call.linear.kind, packed, index, w, column, together);
            _tile_loadd(4, x.at(index, 0), x.stride);
            if constexpr (x_tiles == 1) {
                _tile_loadd(5, w, tile_bytes);
                _tile_dpbf16ps(0, 5, 4);
                _tile_loadd(6, w + tile, tile_bytes);
                _tile_dpbf16ps(1, 6, 4);
                _tile_loadd(7, w + 2 * tile, tile_bytes);
                _tile_dpbf16ps(2, 7, 4);
                _tile_loadd(5, w + 3 * tile, tile_bytes);
                _tile_dpbf16ps(3, 5, 4);
            } else {
                _tile_loadd(5, x.at(index, 1), x.stride);
                _tile_loadd(6, w, tile_bytes);
                _tile_dpbf16ps(0, 6, 4);
                _tile_dpbf16ps(1, 6, 5);
                _tile_loadd(7, w + tile, tile_bytes);
                _tile_dpbf16ps(2, 7, 4);
                _tile_dpbf16ps(3, 7, 5);
            }
        }
        alignas(64) __m512i transposed[4][tile_rows];
        _tile_stored(0, transposed[0], x.stride);
        _tile_stored(1, transposed[1], x.stride);
        _tile_stored(2, transposed[2], x.stride);
        _tile_stored(3, transposed[3], x.stride);
        for (int i = 0; i < 4; i++) {
            const int64_t top = i % x_tiles * tile_rows;
            float* target = sums + top * panel_width + i / x_tiles * tile_rows;
            if (call.rows > 1) transpose(transposed[i]);  // a single row is one already
            for (int64_t r = 0; r < tile_rows && top + r < call.rows; r++)
                _mm512_storeu_si512(target + r * panel_width, transposed[i][r]);
        }
    }
}

// One panel of the result for up to 32 rows.
void compute_few(const LinearCall<bf16>& call, int64_t panel) {
    alignas(64) float sums[2 * tile_rows * panel_width];
    {
        const TiledRows tiled(call, 0, call.rows);
        const TileConfiguration configuration(call.rows);
        sum_rows<true>(tiled, call.rows, Numbers(call.panel(panel)), sums);
    }
    store(call, 0, call.rows, panel * panel_width, sums);
}

// The same for a quantised one.
void compute_few(const LinearCall<bf16>& call, const Columns& x, int64_t panel) {
    alignas(64) float sums[2 * tile_rows * panel_width];
    {
        const TileConfiguration configuration(call.rows, true);
        const auto sum = call.rows <= tile_rows ? sum_quantised<1> : sum_quantised<2>;
        sum(call, x, call.quantised_panel(panel), sums);
    }
    store(call, 0, call.rows, panel * panel_width, sums);
}

// A quantised panel as numbers, half after half.
Numbers expand_halves(const LinearCall<bf16>& call, int64_t panel) {
    bf16* numbers = call.expanded();
    const char* packed = call.quantised_panel(panel);
    for (int64_t column = 0; column < panel_width; column += half_width) {
        bf16* half = numbers + column * call.depth() - column * 2;
        for (int64_t block = 0; block < call.depth() / block_depth; block++)
            expand_block<half_width>(call.linear.kind, packed, block, half + block * block_depth * half_width, column,
                                     column + half_width);
    }
    return {numbers, call.depth()};
}

// One panel of the result for many rows. Where half a panel that was just expanded fits the L1 cache, all rows pass by
// one half and then by the other; else 32 rows after another pass by the whole.
void compute_many(const LinearCall<bf16>& call, int64_t first_row, int64_t rows, int64_t panel) {
    alignas(64) float sums[2 * tile_rows * panel_width];
    const bool quantised = call.linear.kind != Kind::numbers;
    const bool by_halves = quantised && call.depth() * half_width * int64_t(sizeof(bf16)) <= l1_bytes;
    const Numbers numbers =
        by_halves ? expand_halves(call, panel) : Numbers(quantised ? call.expand(panel) : call.panel(panel));
    const auto compute = [&](int64_t row, int64_t count) {
        const TiledRows tiled(call, first_row + row, count);
        if (row == 0 && !quantised)
            sum_rows<true>(tiled, count, numbers, sums);
        else
            sum_rows<false>(tiled, count, numbers, sums);
        store(call, first_row + row, count, panel * panel_width, sums);
    };
    // To configure the tiles takes as long as some dozen products, so that is done once for all groups of 32 rows.
    const int64_t left = rows % (2 * tile_rows), whole = rows - left;
    if (whole > 0) {
        const TileConfiguration configuration(2 * tile_rows);
        for (int64_t column = 0; column < panel_width && by_halves; column += half_width) {
            for (int64_t row = first_row; row < first_row + whole; row += 2 * tile_rows) {
                sum_high<false, true>(TiledRows(call, row, 2 * tile_rows), numbers, column, sums, half_width);
                store<half_width>(call, row, 2 * tile_rows, panel * panel_width + column, sums);
            }
        }
        for (int64_t row = 0; row < whole && !by_halves; row += 2 * tile_rows) compute(row, 2 * tile_rows);
    }
    if (left > 0) {
        const TileConfiguration configuration(left);
        compute(whole, left);
    }
}

}  // namespace

OCTAVO_KERNEL(linear_bf16)
(const Linear* linear, const bf16* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int out_is_float) {
    const LinearCall<bf16> call{*linear, x, x_stride, rows, out, out_stride, out_is_float != 0};
    const bool few = rows <= 2 * tile_rows;
    if (few && linear->kind != Kind::numbers) {
        static int64_t calls = 0;
        const int64_t number = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
        for_each_part(call, true, [&](int64_t, int64_t, int64_t panel) { compute_few(call, Columns(call, number), panel); });
        return;
    }
    for_each_part(call, true, [&](int64_t first_row, int64_t count, int64_t panel) {
        if (few)
            compute_few(call, panel);
        else
            compute_many(call, first_row, count, panel);
    });
}
