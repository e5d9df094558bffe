// Weights in the blocks of GGUF files: packed with the numbers that they have, and their rows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "matmul.h"

namespace slipstream {

// What a block has, at most: scales in [0], minima in [1].
struct BlockNumbers {
    uint8_t integers[256];
    uint16_t scales[2][16];  // of groups: float16, or a signed byte
    uint16_t factors[2];
};

// Blocks of some type: how its numbers are packed, and where the bytes of a block have them.
struct BlockType {
    const char* name;
    int columns, bytes;  // of a block
    Storage storage;     // of the fewest bits that hold its integers
    int group;           // columns that share a scale
    int zero;            // the integer that stands for 0, where groups have no minima
    bool has_minima;
    bool has_factors;  // of scales and minima, for each block: these are bytes
    void (*read)(const uint8_t* block, BlockNumbers* to);
};

// By its name in GGUF; null for one that is not packed.
const BlockType* block_type(const char* name);

// Rows of a weight.
struct BlockRows {
    const BlockType* type;
    const uint8_t* blocks;
    int64_t rows, row_blocks;
    int64_t columns() const { return row_blocks * type->columns; }
};

// One below the other, with the numbers that they have; null where no form holds those of all.
std::unique_ptr<Matrix> pack_blocks(const std::vector<BlockRows>& parts);

// Rows ids[i] of a weight that was packed so to out + i * columns, rounded to float32 as the file's type defines,
// then to bfloat16 if asked.
void look_up_blocks(const Matrix& table, const int64_t* ids, int64_t count, void* out,
                    bool is_bf16);

}  // namespace slipstream
