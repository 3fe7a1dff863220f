// y = x W^T + b for any number of rows: what the kernels for the various instruction sets share.
//
// W [out_features, in_features] is packed in panels of 64 output columns, so that one panel is read front to back:
//   bfloat16: [panel][k / 2][64][2], k padded with zeros to a multiple of 32. Two consecutive k of one column lie
//             together, as vdpbf16ps and AMX tiles want them (a tile is 16 k-pairs x 16 columns, 256 bytes apart).
//   float32:  [panel][k][64].
// Either way it is a transposed matrix of 32-bit words.
//
// Every output is summed in one float32 accumulator (an AMX tile element is one too) over ascending k, whatever the
// number of rows and threads. That makes the kernels batch-invariant: a row's bits do not depend on its neighbours.
#pragma once
#include "numbers.h"
#include "parallel.h"

constexpr int64_t panel_width = 64;
constexpr int64_t tile_depth = 32;  // bfloat16 values in a row of an AMX tile

// Mirrors _Weights in native.py.
struct Linear {
    const void* weight;
    const void* bias;  // [out_features] of the weight's type, or null
    int64_t out_features, in_features;
};

template <class T>
struct LinearCall {
    const Linear& linear;
    const T* x;  // [rows, in_features]
    int64_t x_stride, rows;
    void* out;  // [rows, out_features], float32 or T
    int64_t out_stride;
    bool out_is_float;

    const T* row(int64_t index) const { return x + index * x_stride; }

    const T* panel(int64_t index) const {
        const int64_t depth =
            sizeof(T) == 4 ? linear.in_features : (linear.in_features + tile_depth - 1) / tile_depth * tile_depth;
        return static_cast<const T*>(linear.weight) + index * panel_width * depth;
    }
};

// Add the bias to sums [rows][64] of one panel, round, and write them to out.
template <class T>
static void store(const LinearCall<T>& call, int64_t first_row, int64_t rows, int64_t panel, float* sums) {
    const int64_t column = panel * panel_width, left = call.linear.out_features - column;
    const int64_t columns = left < panel_width ? left : panel_width;
    for (int64_t r = 0; r < rows; r++, sums += panel_width) {
        if (call.linear.bias != nullptr) {
            const T* bias = static_cast<const T*>(call.linear.bias) + column;
            for (int64_t n = 0; n < columns; n++) sums[n] += to_float(bias[n]);
        }
        const int64_t offset = (first_row + r) * call.out_stride + column;
        if (call.out_is_float) {
            std::memcpy(static_cast<float*>(call.out) + offset, sums, columns * sizeof(float));
        } else {
            T rounded[panel_width];
            for (int64_t n = 0; n < panel_width; n++) rounded[n] = from_float<T>(sums[n]);
            std::memcpy(static_cast<T*>(call.out) + offset, rounded, columns * sizeof(T));
        }
    }
}

// Call body(first_row, rows, panel) for all pieces of the result, in parallel. A piece is a panel and up to 64 rows.
// Rows are taken 512 at a time, panels within them: these rows of x, and one panel, then stay in the L2 cache.
template <class T, class Body>
static void for_each_piece(const LinearCall<T>& call, const Body& body) {
    constexpr int64_t most_rows = 512, piece_rows = 64;
    const int64_t panels = (call.linear.out_features + panel_width - 1) / panel_width;
    for (int64_t first = 0; first < call.rows; first += most_rows) {
        const int64_t rows = call.rows - first < most_rows ? call.rows - first : most_rows;
        const int64_t pieces = (rows + piece_rows - 1) / piece_rows;
        const int64_t grain = 1 + panels * pieces / 128;
        parallel_for(panels * pieces, grain, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) {
                const int64_t row = i % pieces * piece_rows;
                body(first + row, rows - row < piece_rows ? rows - row : piece_rows, i / pieces);
            }
        });
    }
}

template <int value>
struct Constant {
    static constexpr int number = value;
};

// Call body(Constant<count>) for a count known only at run time, 1 .. most.
template <int most, class Body>
static inline void with_constant(int64_t count, const Body& body) {
    if (count == most) return body(Constant<most>());
    if constexpr (most > 1) with_constant<most - 1>(count, body);
}

// Split `rows` into evenly sized groups of at most `most` and call body(first, Constant<count>) for each.
template <int most, class Body>
static inline void for_each_group(int64_t rows, const Body& body) {
    int64_t groups = (rows + most - 1) / most;
    for (int64_t first = 0; groups > 0; groups--) {
        const int64_t count = (rows - first + groups - 1) / groups;
        with_constant<most>(count, [&](auto constant) { body(first, constant); });
        first += count;
    }
}
