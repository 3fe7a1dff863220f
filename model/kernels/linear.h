// y = x W^T + b for any number of rows: what the kernels for the various instruction sets share.
//
// W [out_features, in_features] is packed in panels of 64 output columns, so that one panel is read front to back:
//   bfloat16: [panel][k / 2][64][2], k padded with zeros to a multiple of 32. Two consecutive k of one column lie
//             together, as vdpbf16ps and AMX tiles want them (a tile is 16 k-pairs x 16 columns, 256 bytes apart).
//   float32:  [panel][k][64].
// Either way it is a transposed matrix of 32-bit words. Quantised weights lie in panels as well (quantised.h); the thread
// that multiplies with a panel expands it, in one of these two orders: whole in memory of its own, or a block at a time on
// the stack where few rows need it. On AMX few rows take 4-bit weights row by row instead, see sum_nibbles.
//
// Every output is summed in one float32 accumulator (an AMX tile element is one too) over ascending k, whatever the
// number of rows and threads. That makes the kernels batch-invariant: a row's bits do not depend on its neighbours.
#pragma once
#include "numbers.h"
#include "parallel.h"
#include "quantised_expand.h"
#include "silu.h"

constexpr int64_t tile_depth = 32;  // bfloat16 values in a row of an AMX tile

// Mirrors _Weights in native.py.
struct Linear {
    const void* weight;
    const void* bias;  // [out_features] of the type of the activations, or null
    int64_t out_features, in_features;
    Kind kind;
};

// What becomes of the sums. Mirrored in native.py.
enum class Form : int { rounded, in_float32, gated };

template <class T>
struct LinearCall {
    const Linear& linear;
    const T* x;  // [rows, in_features]
    int64_t x_stride, rows;
    void* out;  // [rows, out_features], T or float32; gated: its left half becomes SiLU(left) * right
    int64_t out_stride;
    Form form;

    const T* row(int64_t index) const { return x + index * x_stride; }

    // How many k a panel has, padding included; as many once it is expanded.
    int64_t depth() const {
        return sizeof(T) == 4 ? linear.in_features : (linear.in_features + tile_depth - 1) / tile_depth * tile_depth;
    }

    // Columns of one half where panels are gated at once, by the thread that has just computed what they are multiplied
    // with; else 0. With many rows that gains nothing, as those drive the weights from the L1 cache.
    int64_t gated_width() const {
        constexpr int64_t most_gated_rows = 32;
        const bool aligned = linear.out_features % (2 * panel_width) == 0;
        return form == Form::gated && aligned && rows <= most_gated_rows ? linear.out_features / 2 : 0;
    }

    const T* panel(int64_t index) const {
        return static_cast<const T*>(linear.weight) + index * panel_width * depth();
    }

    const char* quantised_panel(int64_t index) const {
        const int64_t units = linear.in_features / unit_depth(linear.kind);
        return static_cast<const char*>(linear.weight) + index * units * unit_bytes(linear.kind);
    }

    // This thread's memory for the numbers of one quantised panel.
    T* expanded() const { return static_cast<T*>(octavo_thread_memory(panel_width * depth() * sizeof(T))); }

    // A quantised panel as numbers, until this thread expands another.
    const T* expand(int64_t index) const {
        T* numbers = expanded();
        const char* packed = quantised_panel(index);
        for (int64_t block = 0; block < depth() / block_depth; block++)
            expand_block(linear.kind, packed, block, numbers + block * block_depth * panel_width);
        return numbers;
    }
};

// Add the bias to sums [rows][width] of the columns from `column` on, round, and write them to out.
template <int64_t width, class Out, class T>
static void store_as(const LinearCall<T>& call, int64_t first_row, int64_t rows, int64_t column, const float* sums) {
    const int64_t left = call.linear.out_features - column;
    const int64_t columns = left < width ? left : width;
    const T* bias = static_cast<const T*>(call.linear.bias);
    for (int64_t r = 0; r < rows; r++, sums += width) {
        Out* out = static_cast<Out*>(call.out) + (first_row + r) * call.out_stride + column;
        if (columns == width && bias == nullptr) {
            for (int64_t n = 0; n < width; n += lane_count) store_lanes(out + n, load_lanes(sums + n));
        } else {
            for (int64_t n = 0; n < columns; n++)
                out[n] = from_float<Out>(bias == nullptr ? sums[n] : sums[n] + to_float(bias[column + n]));
        }
        if (column < call.gated_width()) silu_mul_row(out, out + call.gated_width(), width);
    }
}

template <int64_t width = panel_width, class T>
static void store(const LinearCall<T>& call, int64_t first_row, int64_t rows, int64_t column, const float* sums) {
    if (call.form == Form::in_float32) return store_as<width, float>(call, first_row, rows, column, sums);
    store_as<width, T>(call, first_row, rows, column, sums);
}

constexpr int64_t piece_rows = 64;

// Into how many parts to divide the rows of every panel, so that the busiest thread is done soonest: with more parts the
// work divides more evenly, but a panel is fetched or expanded for each. That takes about a quarter of the time that 64
// rows take.
static inline int64_t parts_of(int64_t pieces, int64_t panels) {
    const int64_t threads = octavo_threads();
    int64_t best = 1, least = INT64_MAX;
    for (int64_t parts = 1; parts <= pieces; parts++) {
        const int64_t rounds = (panels * parts + threads - 1) / threads;
        const int64_t time = rounds * (1 + 4 * ((pieces + parts - 1) / parts));
        if (time < least) best = parts, least = time;
    }
    return best;
}

// Call body(first_row, rows, panel) for all parts of the result, in parallel: a panel and, of 512 rows at most, those
// that one thread takes together. These rows of x, and one panel, then stay in the L2 cache. With `few`, for panels that
// cost something to fetch or to expand, there are no more parts than parts_of wants; else one for each piece of rows. Of
// gated panels a thread takes those on the right before those on the left that they belong to.
template <class T, class Body>
static void for_each_part(const LinearCall<T>& call, bool few, const Body& body) {
    constexpr int64_t most_rows = 512;
    const int64_t right = call.gated_width() / panel_width;  // the first panel of the right half, or 0
    const int64_t panels = right > 0 ? right : (call.linear.out_features + panel_width - 1) / panel_width;
    for (int64_t first = 0; first < call.rows; first += most_rows) {
        const int64_t rows = call.rows - first < most_rows ? call.rows - first : most_rows;
        const int64_t pieces = (rows + piece_rows - 1) / piece_rows;
        const int64_t parts = few ? parts_of(pieces, panels) : pieces;
        const int64_t part_rows = (pieces + parts - 1) / parts * piece_rows;
        // Panels that follow each other go to one thread, as far as the work still divides evenly: what it fetches ahead
        // of one is part of the next.
        const int64_t grain = 1 + panels * parts / (8 * octavo_threads());
        parallel_for(panels * parts, grain, [&](int64_t begin, int64_t end) {
            const auto compute = [&](int64_t panel) {
                for (int64_t i = begin; i < end; i++) {
                    const int64_t top = i % parts * part_rows;
                    const int64_t bottom = top + part_rows < rows ? top + part_rows : rows;
                    if (top < bottom) body(first + top, bottom - top, panel + i / parts);
                }
            };
            if (right > 0) compute(right);
            compute(0);
        });
    }
    if (call.form == Form::gated && right == 0)
        silu_mul(static_cast<T*>(call.out), call.out_stride, call.rows, call.linear.out_features / 2);
}

// Call w = body(first_row, rows, panel, w) for all pieces of the result, in parallel. A piece is a panel and up to 64
// rows; w are the numbers of the panel. Those of a quantised one are null at first; body returns them for the next piece
// of the panel.
template <class T, class Body>
static void for_each_piece(const LinearCall<T>& call, const Body& body) {
    const bool quantised = call.linear.kind != Kind::numbers;
    for_each_part(call, quantised, [&](int64_t first_row, int64_t rows, int64_t panel) {
        const T* w = quantised ? nullptr : call.panel(panel);
        for (int64_t row = 0; row < rows; row += piece_rows)
            w = body(first_row + row, rows - row < piece_rows ? rows - row : piece_rows, panel, w);
    });
}

// Call body(k, depth, numbers) for stretches of k that cover a panel, of which w are the numbers. Where w is null, it is
// quantised and needed once: each block is expanded just before its use, to the same place, which stays in the L1 cache.
template <class T, class Body>
static inline void for_each_stretch(const LinearCall<T>& call, int64_t panel, const T* w, const Body& body) {
    if (w != nullptr) return body(0, call.linear.in_features, w);
    alignas(64) T numbers[block_depth * panel_width];
    for (int64_t k = 0; k < call.linear.in_features; k += block_depth) {
        expand_block(call.linear.kind, call.quantised_panel(panel), k / block_depth, numbers);
        body(k, block_depth, numbers);
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
