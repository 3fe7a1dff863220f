// Packing W for the linear kernels, and reading rows of it back. See linear.h for the order; here it is a transposed
// matrix of 32-bit words, [panel][word][64], a word being one float32 or two consecutive bfloat16.
// variants: plain
#include "linear.h"

namespace {

struct Packed {
    uint32_t* words;
    int64_t row_bytes, row_words, panel_words;

    Packed(void* weight, int64_t in_features, int64_t element_bytes)
        : words(static_cast<uint32_t*>(weight)), row_bytes(in_features * element_bytes), row_words((row_bytes + 3) / 4) {
        const int64_t tile_words = tile_depth / 2;
        const int64_t padded = (row_words + tile_words - 1) / tile_words * tile_words;
        panel_words = (element_bytes == 4 ? row_words : padded) * panel_width;
    }

    uint32_t* word(int64_t row, int64_t index) const {
        return words + row / panel_width * panel_words + index * panel_width + row % panel_width;
    }
    // An odd number of bfloat16 leaves half a word at the end of a row.
    int64_t bytes_of_word(int64_t index) const { return row_bytes - index * 4 < 4 ? row_bytes - index * 4 : 4; }
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Store rows [begin, end) of W, all of one panel: 16 words of each row at a time, so that both sides stay in the cache.
void pack_panel(const Packed& packed, int64_t begin, int64_t end, const char* source, int64_t stride) {
    constexpr int64_t block = 16;
    for (int64_t first = 0; first < packed.row_words; first += block) {
        const int64_t last = smaller(first + block, packed.row_words);
        for (int64_t row = begin; row < end; row++) {
            const char* from = source + (row - begin) * stride;
            for (int64_t index = first; index < last; index++) {
                uint32_t word = 0;
                if (index + 1 < packed.row_words)
                    std::memcpy(&word, from + index * 4, 4);
                else
                    std::memcpy(&word, from + index * 4, packed.bytes_of_word(index));
                *packed.word(row, index) = word;
            }
        }
    }
}

}  // namespace

// Store source [rows, in_features], whose rows are `stride` bytes apart, at rows first_row .. of W.
OCTAVO_API void linear_pack(void* weight, int64_t in_features, int64_t element_bytes, int64_t first_row, int64_t rows,
                            const char* source, int64_t stride) {
    const Packed packed(weight, in_features, element_bytes);
    const int64_t first_panel = first_row / panel_width, end_row = first_row + rows;
    const int64_t panels = (end_row + panel_width - 1) / panel_width - first_panel;
    parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = first_panel + begin; panel < first_panel + end; panel++) {
            const int64_t top = panel * panel_width < first_row ? first_row : panel * panel_width;
            const int64_t bottom = smaller((panel + 1) * panel_width, end_row);
            pack_panel(packed, top, bottom, source + (top - first_row) * stride, stride);
        }
    });
}

// Copy rows ids[0 .. count-1] of W to out, whose rows are `stride` bytes apart. Returns 0; or 1, and nothing is
// written, if an id is no row of W.
OCTAVO_API int linear_gather(const Linear* linear, int64_t element_bytes, const int32_t* ids, int64_t count, char* out,
                             int64_t stride) {
    const Packed packed(const_cast<void*>(linear->weight), linear->in_features, element_bytes);
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= linear->out_features) return 1;
    parallel_for(count, 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            char* row = out + i * stride;
            const uint32_t* word = packed.word(ids[i], 0);
            for (int64_t index = 0; index < packed.row_words; index++, word += panel_width)
                std::memcpy(row + index * 4, word, packed.bytes_of_word(index));
        }
    });
    return 0;
}
