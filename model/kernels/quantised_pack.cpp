// Packing the blocks of a GGUF file into panels, and reading rows of W back as numbers. See quantised.h for the order.
// variants: plain
#include "linear.h"

namespace {

// Copy `count` items of `size` bytes that follow each other in a row of W to where 64 rows take turns.
void spread(const uint8_t* source, int64_t count, int64_t size, uint8_t* target, int64_t row) {
    for (int64_t i = 0; i < count; i++) std::memcpy(target + (i * panel_width + row) * size, source + i * size, size);
}

// The nibbles of 64 numbers of Q4_K: the lower halves of 32 bytes are the first block, the upper halves the second.
void separate(const uint8_t* pair, uint8_t* first, uint8_t* second) {
    for (int64_t i = 0; i < block_depth / 2; i++) {
        first[i] = static_cast<uint8_t>((pair[i] & 15) | pair[i + 16] << 4);
        second[i] = static_cast<uint8_t>(pair[i] >> 4 | (pair[i + 16] & 0xf0));
    }
}

void pack_superblock(const uint8_t* source, uint8_t* unit, int64_t row) {
    constexpr int64_t header = 2 * 2 + 12, pair_bytes = block_depth;
    spread(source, 2, 2, unit, row);
    spread(source + 4, 12, 1, unit + 4 * panel_width, row);
    uint8_t* words = unit + header * panel_width;
    for (int64_t pair = 0; pair < superblock_depth / block_depth / 2; pair++, words += 8 * row_bytes) {
        uint8_t blocks[2][block_depth / 2];
        separate(source + header + pair * pair_bytes, blocks[0], blocks[1]);
        spread(blocks[0], 4, 4, words, row);
        spread(blocks[1], 4, 4, words + 4 * row_bytes, row);
    }
}

void pack_unit(Kind kind, const uint8_t* source, uint8_t* unit, int64_t row) {
    if (kind == Kind::q4_k) return pack_superblock(source, unit, row);
    const int64_t scales = kind == Kind::q4_1 ? 2 : 1;
    spread(source, scales, 2, unit, row);
    spread(source + 2 * scales, words_of(kind), 4, unit + 2 * scales * panel_width, row);
}

struct Packed {
    Kind kind;
    uint8_t* weight;
    int64_t units;  // of a row

    Packed(void* memory, int64_t in_features, Kind type)
        : kind(type), weight(static_cast<uint8_t*>(memory)), units(in_features / unit_depth(type)) {}

    uint8_t* panel(int64_t row) const { return weight + row / panel_width * units * unit_bytes(kind); }
};

template <class T>
void read_row(const Packed& packed, int64_t row, T* out) {
    const char* panel = reinterpret_cast<const char*>(packed.panel(row));
    const int64_t n = row % panel_width, blocks = packed.units * unit_depth(packed.kind) / block_depth;
    const bool wide = packed.kind == Kind::q8_0;
    for (int64_t index = 0; index < blocks; index++, out += block_depth) {
        Block block;
        read_block(packed.kind, panel, index, block);
        for (int64_t k = 0; k < block_depth; k++) {
            const uint8_t byte = static_cast<uint8_t>(block.words[(wide ? k / 4 : k % 16 / 4) * row_bytes + n * 4 + k % 4]);
            const int integer = wide ? static_cast<int8_t>(byte) : (k < 16 ? byte & 15 : byte >> 4) - block.zero;
            out[k] = from_float<T>(static_cast<float>(integer) * block.scale[n] + block.offset[n]);
        }
    }
}

}  // namespace

// Store source [rows, bytes of a row], whose rows are `stride` bytes apart, at rows first_row .. of W.
OCTAVO_API void quantised_pack(void* weight, int64_t in_features, Kind kind, int64_t first_row, int64_t rows,
                               const uint8_t* source, int64_t stride) {
    const Packed packed(weight, in_features, kind);
    const int64_t source_bytes = unit_bytes(kind) / panel_width, end_row = first_row + rows;
    const int64_t first_panel = first_row / panel_width, panels = (end_row - 1) / panel_width + 1 - first_panel;
    parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = first_panel + begin; panel < first_panel + end; panel++) {
            const int64_t top = panel * panel_width < first_row ? first_row : panel * panel_width;
            const int64_t bottom = (panel + 1) * panel_width < end_row ? (panel + 1) * panel_width : end_row;
            for (int64_t unit = 0; unit < packed.units; unit++)
                for (int64_t row = top; row < bottom; row++)
                    pack_unit(kind, source + (row - first_row) * stride + unit * source_bytes,
                              packed.panel(row) + unit * unit_bytes(kind), row % panel_width);
        }
    });
}

// Write rows ids[0 .. count-1] of W to out, whose rows are `stride` bytes apart, as float32 (element_bytes 4) or
// bfloat16 (2). Returns 0; or 1, and nothing is written, if an id is no row of W.
OCTAVO_API int quantised_gather(const Linear* linear, int64_t element_bytes, const int32_t* ids, int64_t count, char* out,
                                int64_t stride) {
    const Packed packed(const_cast<void*>(linear->weight), linear->in_features, linear->kind);
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= linear->out_features) return 1;
    parallel_for(count, 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            if (element_bytes == 4)
                read_row(packed, ids[i], reinterpret_cast<float*>(out + i * stride));
            else
                read_row(packed, ids[i], reinterpret_cast<bf16*>(out + i * stride));
        }
    });
    return 0;
}
