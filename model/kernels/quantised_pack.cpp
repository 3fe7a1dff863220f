// Packing the blocks of a GGUF file into panels, and reading rows of W back as numbers. See quantised.h for the order.
#include "linear.h"

namespace {

// Copy `count` items of `size` bytes that follow each other in a row of W to where 64 rows take turns.
void spread(const uint8_t* source, int64_t count, int64_t size, uint8_t* target, int64_t n) {
    for (int64_t i = 0; i < count; i++) std::memcpy(target + (i * panel_width + n) * size, source + i * size, size);
}

// Put 32 nibbles of row n into their places. The first 16 are at `lower_shift` in the bytes at `lower`, the others at
// `upper_shift` in those at `upper`.
void put_nibbles(const uint8_t* lower, int lower_shift, const uint8_t* upper, int upper_shift, uint8_t* target, int64_t n) {
    uint8_t* place = target + nibble_place(n - n % 4, 0) / 2;
    const int shift = n % 4 * 4;
    uint16_t words[block_depth];
    std::memcpy(words, place, sizeof words);
    const auto put = [&](uint16_t& word, int nibble) {
        word = static_cast<uint16_t>((word & ~(15 << shift)) | (nibble & 15) << shift);
    };
    for (int64_t k = 0; k < 16; k++) put(words[k], lower[k] >> lower_shift);
    for (int64_t k = 0; k < 16; k++) put(words[16 + k], upper[k] >> upper_shift);
    std::memcpy(place, words, sizeof words);
}

void pack_superblock(const uint8_t* source, uint8_t* unit, int64_t n) {
    constexpr int64_t header = 2 * 2 + 12;
    spread(source, 2, 2, unit, n);
    spread(source + 4, 12, 1, unit + 4 * panel_width, n);
    for (int64_t group = 0; group < superblock_depth / block_depth; group++) {
        const uint8_t* bytes = source + header + group / 2 * block_depth;
        const int shift = group % 2 * 4;
        put_nibbles(bytes, shift, bytes + 16, shift, unit + header * panel_width + group * nibbles_bytes, n);
    }
}

// Store one block of a row, or superblock, as it lies in the file, as row n of a unit of a panel.
void pack_unit(Kind kind, const uint8_t* source, uint8_t* unit, int64_t n) {
    if (kind == Kind::q4_k) return pack_superblock(source, unit, n);
    const int64_t scales = kind == Kind::q4_1 ? 2 : 1;
    spread(source, scales, 2, unit, n);
    const uint8_t* integers = source + 2 * scales;
    uint8_t* target = unit + 2 * scales * panel_width;
    if (kind != Kind::q8_0) return put_nibbles(integers, 0, integers, 4, target, n);
    for (int64_t k = 0; k < block_depth; k++) target[byte_place(n, k)] = static_cast<uint8_t>(integers[k] + byte_bias);
}

struct Packed {
    Kind kind;
    uint8_t* weight;
    int64_t units;  // of a row

    Packed(void* memory, int64_t in_features, Kind type)
        : kind(type), weight(static_cast<uint8_t*>(memory)), units(in_features / unit_depth(type)) {}

    uint8_t* panel(int64_t row) const { return weight + row / panel_width * units * unit_bytes(kind); }
};

int integer(Kind kind, const Block& block, int64_t n, int64_t k) {
    const uint8_t* stored = reinterpret_cast<const uint8_t*>(block.integers);
    if (kind == Kind::q8_0) return stored[byte_place(n, k)] - block.zero;
    const int64_t place = nibble_place(n, k);
    return (stored[place / 2] >> place % 2 * 4 & 15) - block.zero;
}

template <class T>
void read_row(const Packed& packed, int64_t row, T* out) {
    const char* panel = reinterpret_cast<const char*>(packed.panel(row));
    const int64_t n = row % panel_width, blocks = packed.units * unit_depth(packed.kind) / block_depth;
    for (int64_t index = 0; index < blocks; index++, out += block_depth) {
        Block block;
        read_block(packed.kind, panel, index, block, n / 16 * 16, n / 16 * 16 + 16);
        for (int64_t k = 0; k < block_depth; k++) {
            out[k] = from_float<T>(static_cast<float>(integer(packed.kind, block, n, k)) * block.scale[n] + block.offset[n]);
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
