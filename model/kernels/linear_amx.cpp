// The linear kernel for CPUs with AMX (Intel Sapphire Rapids and later): a tile product adds x [16, 32] times
// w [32, 16] to sums [16, 16] in one instruction. It serves every number of rows, down to one, by configuring lower
// tiles: the sum of one output does not depend on how many rows its tile has.
// variants: amx_bf16
#include <immintrin.h>

#include "linear.h"

namespace {

constexpr int tile_rows = 16, tile_bytes = 64;
constexpr int64_t panel_row_bytes = panel_width * 4;  // one k-pair of all columns

// The operand of ldtilecfg: Intel 64 manual, volume 1, section 18.2 "tile configuration".
struct alignas(64) TileConfiguration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Sums are tiles 0-3. Up to 16 rows: x is tile 4, w is 5-7. Up to 32 rows: x is 4 and 5, w is 6 and 7.
    explicit TileConfiguration(int64_t x_rows) {
        for (int tile = 0; tile < 8; tile++) {
            row_bytes[tile] = tile_bytes;
            rows[tile] = tile_rows;
        }
        if (x_rows <= tile_rows)
            rows[0] = rows[1] = rows[2] = rows[3] = rows[4] = static_cast<uint8_t>(x_rows);
        else
            rows[2] = rows[3] = rows[5] = static_cast<uint8_t>(x_rows - tile_rows);
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

// sums [rows][64] for up to 16 rows: one tile of rows by four tiles of columns.
void sum_low(const TiledRows& rows, const bf16* panel, float* sums) {
    const char* w = reinterpret_cast<const char*>(panel);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    auto add = [&](const bf16* x, int64_t stride) {
        _tile_loadd(4, x, stride * 2);
        _tile_loadd(5, w, panel_row_bytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w + 64, panel_row_bytes);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, w + 128, panel_row_bytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w + 192, panel_row_bytes);
        _tile_dpbf16ps(3, 4, 5);
        w += tile_rows * panel_row_bytes;
    };
    for (int64_t tile = 0; tile < rows.whole_tiles; tile++) add(rows.x + tile * tile_depth, rows.stride);
    if (rows.tiles > rows.whole_tiles) add(rows.last, tile_depth);
    _tile_stored(0, sums, panel_row_bytes);
    _tile_stored(1, sums + 16, panel_row_bytes);
    _tile_stored(2, sums + 32, panel_row_bytes);
    _tile_stored(3, sums + 48, panel_row_bytes);
}

// sums [rows][64] of half a panel (32 columns) for 17 to 32 rows: two tiles of rows by two tiles of columns. There are
// enough products here to fetch the same place of the next panel from memory meanwhile.
void sum_high(const TiledRows& rows, const bf16* half_panel, float* sums) {
    const char* w = reinterpret_cast<const char*>(half_panel);
    const int64_t panel_bytes = rows.tiles * tile_rows * panel_row_bytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    auto add = [&](const bf16* x, int64_t stride) {
        for (int64_t row = 0; row < tile_rows; row++) {
            _mm_prefetch(w + panel_bytes + row * panel_row_bytes, _MM_HINT_T1);
            _mm_prefetch(w + panel_bytes + row * panel_row_bytes + 64, _MM_HINT_T1);
        }
        _tile_loadd(4, x, stride * 2);
        _tile_loadd(6, w, panel_row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, panel_row_bytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + tile_rows * stride, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        w += tile_rows * panel_row_bytes;
    };
    for (int64_t tile = 0; tile < rows.whole_tiles; tile++) add(rows.x + tile * tile_depth, rows.stride);
    if (rows.tiles > rows.whole_tiles) add(rows.last, tile_depth);
    _tile_stored(0, sums, panel_row_bytes);
    _tile_stored(1, sums + 16, panel_row_bytes);
    _tile_stored(2, sums + tile_rows * panel_width, panel_row_bytes);
    _tile_stored(3, sums + tile_rows * panel_width + 16, panel_row_bytes);
}

void compute(const LinearCall<bf16>& call, int64_t first_row, int64_t rows, int64_t panel, const bf16* w) {
    alignas(64) float sums[2 * tile_rows * panel_width];
    {
        const TiledRows tiled(call, first_row, rows);
        const TileConfiguration configuration(rows);
        if (rows <= tile_rows) {
            sum_low(tiled, w, sums);
        } else {
            sum_high(tiled, w, sums);
            sum_high(tiled, w + panel_width, sums + panel_width / 2);
        }
    }
    store(call, first_row, rows, panel, sums);
}

}  // namespace

OCTAVO_KERNEL(linear_bf16)
(const Linear* linear, const bf16* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int out_is_float) {
    const LinearCall<bf16> call{*linear, x, x_stride, rows, out, out_stride, out_is_float != 0};
    for_each_piece(call, [&](int64_t first_row, int64_t count, int64_t panel, const bf16* w) {
        for (int64_t first = 0; first < count; first += 2 * tile_rows) {
            const int64_t left = count - first;
            compute(call, first_row + first, left < 2 * tile_rows ? left : 2 * tile_rows, panel, w);
        }
    });
}
