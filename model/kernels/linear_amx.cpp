// The linear kernel for CPUs with AMX (Intel Sapphire Rapids and later): a tile product adds x [16, 32] times
// w [32, 16] to sums [16, 16] in one instruction. It serves every number of rows, down to one, by configuring lower
// tiles: the sum of one output does not depend on how many rows its tile has.
// variants: amx_bf16
#include "linear_amx.h"

namespace {

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
    alignas(64) bf16 last[most_rows * tile_depth];

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

// Few rows of x as columns of tiles, for products with W on the left: for each 32 k one tile of up to 16 rows or two,
// [k / 2][16][2]. A single row has this order by itself. Every thread makes its own copy, once a call: what another core has
// just written is slow to read. `number` tells calls apart, for x may be another one at the same address. The copy lies in
// the memory for an expanded panel, which is twice as large and not needed here.
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
template <class Weights>
void sum_low(const TiledRows& rows, const Weights& weights, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    auto add = [&](const bf16* x, int64_t stride, int64_t index) {
        const char *left = weights.at(index, 0), *right = weights.at(index, half_width);
        _tile_loadd(4, x, stride * 2);
        _tile_loadd(5, left, weights.stride);
        _tile_dpbf16ps(0, 4, 5);
        weights.prepare(index + 1, 0);
        _tile_loadd(6, left + 64, weights.stride);
        _tile_dpbf16ps(1, 4, 6);
        weights.prepare(index + 1, tile_rows);
        _tile_loadd(7, right, weights.stride);
        _tile_dpbf16ps(2, 4, 7);
        weights.prepare(index + 1, half_width);
        _tile_loadd(5, right + 64, weights.stride);
        _tile_dpbf16ps(3, 4, 5);
        weights.prepare(index + 1, half_width + tile_rows);
    };
    for (int64_t tile = 0; tile < rows.whole_tiles; tile++) add(rows.x + tile * tile_depth, rows.stride, tile);
    if (rows.tiles > rows.whole_tiles) add(rows.last, tile_depth, rows.whole_tiles);
    _tile_stored(0, sums, panel_row_bytes);
    _tile_stored(1, sums + 16, panel_row_bytes);
    _tile_stored(2, sums + 32, panel_row_bytes);
    _tile_stored(3, sums + 48, panel_row_bytes);
}

// sums [rows][sums_width] of half a panel (32 columns) for 17 to 32 rows: two tiles of rows by two tiles of columns.
// There are enough products here to fetch the next panel from memory meanwhile. With `stream`, x should not drive the
// weights from the L1 cache.
template <bool fetch, bool stream, class Weights>
void sum_high(const TiledRows& rows, const Weights& weights, int64_t column, float* sums, int64_t sums_width) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    auto add = [&](const bf16* x, int64_t stride, int64_t index) {
        if constexpr (fetch) weights.fetch_next(index, column);
        const char* w = weights.at(index, column);
        const bf16* x_below = x + tile_rows * stride;
        if constexpr (stream) {
            _tile_stream_loadd(4, x, stride * 2);
            _tile_stream_loadd(5, x_below, stride * 2);
        } else {
            _tile_loadd(4, x, stride * 2);
        }
        _tile_loadd(6, w, weights.stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (!stream) _tile_loadd(5, x_below, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        weights.prepare(index + 1, column);
        _tile_loadd(7, w + 64, weights.stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
        weights.prepare(index + 1, column + tile_rows);
    };
    for (int64_t tile = 0; tile < rows.whole_tiles; tile++) add(rows.x + tile * tile_depth, rows.stride, tile);
    if (rows.tiles > rows.whole_tiles) add(rows.last, tile_depth, rows.whole_tiles);
    const int64_t sums_stride = sums_width * 4;
    _tile_stored(0, sums, sums_stride);
    _tile_stored(1, sums + 16, sums_stride);
    _tile_stored(2, sums + tile_rows * sums_width, sums_stride);
    _tile_stored(3, sums + tile_rows * sums_width + 16, sums_stride);
}

// sums [rows][64] for up to 32 rows.
template <bool fetch, class Weights>
void sum_rows(const TiledRows& tiled, int64_t rows, const Weights& weights, float* sums) {
    if (rows <= tile_rows) return sum_low(tiled, weights, sums);
    sum_high<fetch, false>(tiled, weights, 0, sums, panel_width);
    sum_high<fetch, false>(tiled, weights, half_width, sums + half_width, panel_width);
}

// sums [rows][64] for up to 32 rows and a panel of nibbles, whose rows are tiles on the left: one tile of rows of x by four
// of W, or two by two. The numbers never leave the L1 cache: while one tile is multiplied the same rows of the next
// block are looked up, to two places in turn.
template <int x_tiles>
void sum_nibbles(const LinearCall<bf16>& call, const Columns& x, const char* packed, float* sums) {
    constexpr int64_t w_tiles = 4 / x_tiles, together = tile_rows * w_tiles;
    const int64_t blocks = call.depth() / block_depth;
    alignas(64) BitLanes places[2][w_tiles][1][tile_rows];
    for (int64_t column = 0; column < panel_width; column += together, sums += together) {
        Block block;
        const auto prepare = [&](int64_t index, int64_t tile) __attribute__((always_inline)) {
            if (index == blocks) return;
            if (tile == 0) read_block(call.linear.kind, packed, index, block, column, column + together);
            for (int64_t i = 0; i < tile_rows; i += 4)
                look_up(block, column + tile * tile_rows + i, places[index % 2][tile], i);
        };
        for (int64_t tile = 0; tile < w_tiles; tile++) prepare(0, tile);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t index = 0; index < blocks; index++) {
            const auto& w = places[index % 2];
            _tile_loadd(4, x.at(index, 0), x.stride);
            if constexpr (x_tiles == 1) {
                _tile_loadd(5, w[0], tile_bytes);
                _tile_dpbf16ps(0, 5, 4);
                prepare(index + 1, 0);
                _tile_loadd(6, w[1], tile_bytes);
                _tile_dpbf16ps(1, 6, 4);
                prepare(index + 1, 1);
                _tile_loadd(7, w[2], tile_bytes);
                _tile_dpbf16ps(2, 7, 4);
                prepare(index + 1, 2);
                _tile_loadd(5, w[3], tile_bytes);
                _tile_dpbf16ps(3, 5, 4);
                prepare(index + 1, 3);
            } else {
                _tile_loadd(5, x.at(index, 1), x.stride);
                _tile_loadd(6, w[0], tile_bytes);
                _tile_dpbf16ps(0, 6, 4);
                _tile_dpbf16ps(1, 6, 5);
                prepare(index + 1, 0);
                _tile_loadd(7, w[1], tile_bytes);
                _tile_dpbf16ps(2, 7, 4);
                _tile_dpbf16ps(3, 7, 5);
                prepare(index + 1, 1);
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
template <bool fetch, class Weights>
void compute_few(const LinearCall<bf16>& call, int64_t first_row, int64_t rows, int64_t panel, const Weights& weights) {
    alignas(64) float sums[most_rows * panel_width];
    {
        const TiledRows tiled(call, first_row, rows);
        const TileConfiguration configuration(rows);
        sum_rows<fetch>(tiled, rows, weights, sums);
    }
    store(call, first_row, rows, panel * panel_width, sums);
}

// The same for a panel of nibbles and all rows of the call.
void compute_few(const LinearCall<bf16>& call, const Columns& x, int64_t panel) {
    alignas(64) float sums[most_rows * panel_width];
    {
        const TileConfiguration configuration(call.rows, true);
        const auto sum = call.rows <= tile_rows ? sum_nibbles<1> : sum_nibbles<2>;
        sum(call, x, call.quantised_panel(panel), sums);
    }
    store(call, 0, call.rows, panel * panel_width, sums);
}

// One panel of the result for many rows, for the first 32 of which its weights are `first`, and `rest` for the others.
// Either 32 rows after another pass by the whole, or all rows by one half and then by the other.
template <class First, class Rest>
void compute_many(const LinearCall<bf16>& call, int64_t first_row, int64_t rows, int64_t panel, bool by_halves,
                  const First& first, const Rest& rest) {
    alignas(64) float sums[most_rows * panel_width];
    const int64_t left = rows % most_rows, end_row = first_row + rows - left;
    const auto compute = [&](int64_t row, const auto& weights, auto fetch) {
        sum_rows<decltype(fetch)::number>(TiledRows(call, row, most_rows), most_rows, weights, sums);
        store(call, row, most_rows, panel * panel_width, sums);
    };
    const auto compute_half = [&](int64_t row, int64_t column, const auto& weights, auto fetch) {
        const TiledRows tiled(call, row, most_rows);
        sum_high<decltype(fetch)::number, true>(tiled, weights, column, sums, half_width);
        store<half_width>(call, row, most_rows, panel * panel_width + column, sums);
    };
    // To configure the tiles takes as long as some dozen products, so that is done once for all groups of 32 rows.
    {
        const TileConfiguration configuration(most_rows);
        for (int64_t column = 0; column < panel_width && by_halves; column += half_width) {
            compute_half(first_row, column, first, Constant<true>());
            for (int64_t row = first_row + most_rows; row < end_row; row += most_rows)
                compute_half(row, column, rest, Constant<false>());
        }
        if (!by_halves) {
            compute(first_row, first, Constant<true>());
            for (int64_t row = first_row + most_rows; row < end_row; row += most_rows)
                compute(row, rest, Constant<false>());
        }
    }
    if (left > 0) compute_few<false>(call, end_row, left, panel, rest);
}

}  // namespace

OCTAVO_KERNEL(linear_bf16)
(const Linear* linear, const bf16* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, Form form) {
    const LinearCall<bf16> call{*linear, x, x_stride, rows, out, out_stride, form};
    const bool quantised = linear->kind != Kind::numbers;
    if (rows <= most_rows && quantised && linear->kind != Kind::q8_0) {
        static int64_t calls = 0;
        const int64_t number = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
        for_each_part(call, true, [&](int64_t, int64_t, int64_t panel) { compute_few(call, Columns(call, number), panel); });
        return;
    }
    // Half a panel that was just expanded should stay in the L1 cache while all rows pass by, if it can.
    const bool by_halves = call.depth() * Halves::stride / 2 <= l1_bytes;
    for_each_part(call, true, [&](int64_t first_row, int64_t count, int64_t panel) {
        if (count <= most_rows && quantised) {
            compute_few<false>(call, first_row, count, panel, Passing(call, panel));
        } else if (quantised) {
            compute_many(call, first_row, count, panel, by_halves, Expanding(call, panel), Halves(call));
        } else {
            const Numbers numbers(call, panel);
            if (count <= most_rows)
                compute_few<true>(call, first_row, count, panel, numbers);
            else
                compute_many(call, first_row, count, panel, false, numbers, numbers);
        }
    });
}
