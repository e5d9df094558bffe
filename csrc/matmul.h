// Products of a few or many rows with a weight that was packed once.
//
// The arithmetic of a row of the result is a function of the weight's storage, its shape and the
// level of instructions, never of the other rows: one order along K, one set of sums. So a token
// that is verified with others gets the same bits as alone.
#pragma once

#include <cstdint>
#include <memory>

#include "buffer.h"
#include "levels.h"

namespace slipstream {

// How a weight's numbers are stored. Integers are unsigned, and stand for (q - zero) * scale: of i8
// zero is 128 and each row has a scale; of i4 groups of columns of a row have a scale and a zero.
//
// mxfp4 and nvfp4 are e2m1 floats, whose sixteen values are halves of integers from -12 to 12: a
// table makes integers with a zero of 12 of them. Groups of 32 columns have a power of two (e8m0),
// groups of 16 a float16, as scale.
//
// i6 and g8 are integers of six and eight bits in groups, as blocks of GGUF files have them, with
// zeros of 32 and 128. Their groups, and those of i4 in such blocks, have a float16 as scale, or a
// signed byte times a float16 that several groups share; and where q has no zero, but a group a
// number that is added to each, a minimum of the kind of its scale: q * scale + minimum.
//
// Rows that are multiplied by integers are converted to integers: divided by a scale, rounded, and
// written in one to three digits of base 128, each a row of signed bytes. All sums of a group are then
// exact. Each row has a scale; if the weight is e2m1, each group has a power of two as scale, so that
// numbers that are not much smaller than the group's largest are represented exactly.
enum class Storage { f32, bf16, i8, i4, i6, g8, mxfp4, nvfp4 };

constexpr bool is_e2m1(Storage storage) {
    return storage == Storage::mxfp4 || storage == Storage::nvfp4;
}

// Rows of the weight are taken 64 at a time (a block: 4 panels of 16), and K in tiles. A block is
// contiguous: for each tile, 4 panels; a panel's tile is steps of 16 lanes, one a row, so that
// kernels read a weight as one stream.
constexpr int panel_rows = 16, block_panels = 4, block_rows = panel_rows * block_panels;

struct TileShape {
    int columns;     // of the weight in a tile
    int steps;       // of 16 lanes
    int lane_bytes;  // of one row in a step
    constexpr int panel_bytes() const { return steps * panel_rows * lane_bytes; }
    constexpr int block_bytes() const { return panel_bytes() * block_panels; }
};

// A step is one column of f32, two of bf16, four of i8, and eight of four bits: four in the low
// halves of a lane's bytes, the next four in the high halves. Of six bits, two steps have the lower
// four of 16 columns, and the third the upper two: of columns 4 n + i at the bits 2 n of byte i.
constexpr TileShape tile_shape(Storage storage) {
    switch (storage) {
        case Storage::f32: return {16, 16, 4};
        case Storage::bf16: return {32, 16, 4};
        case Storage::i8: return {64, 16, 4};
        case Storage::i4:
        case Storage::mxfp4: return {32, 4, 4};
        case Storage::nvfp4: return {16, 2, 4};
        case Storage::i6: return {16, 3, 4};
        case Storage::g8: return {32, 8, 4};
    }
    return {};
}

// The integer that stands for 0 where no group has a zero of its own.
constexpr int zero_of(Storage storage) {
    switch (storage) {
        case Storage::i8:
        case Storage::g8: return 128;
        case Storage::i6: return 32;
        case Storage::i4: return 8;
        default: return 12;
    }
}

struct Matrix {
    Storage storage;
    int64_t rows, columns;      // N and K
    int64_t group = 0;          // columns that share a scale; 0 where a row has one
    bool has_zeros = false;     // groups have zeros of their own
    bool of_blocks = false;     // from a GGUF file: rows can be looked up
    bool has_minima = false;    // groups have numbers that are added to each
    int64_t factor_groups = 0;  // groups whose scales and minima are bytes times shared float16s
    bool one_digit = false;     // rows that it meets are rounded to int8
    std::shared_ptr<Buffer> values;  // shared with parts of the weight
    std::shared_ptr<Buffer> scales;  // float32 [rows, padded]: of i8; of i4 powers of two; of nvfp4
                                     // another factor of a row; or null
    std::shared_ptr<Buffer> factors;  // float16 [blocks, groups / factor_groups, scales then minima
                                      // if there are some, 64]; or null
    int64_t first_block = 0;          // of `values`

    // Whether it meets rows of this type: floats meet their own, integers both.
    bool takes(bool x_is_bf16) const {
        return storage != (x_is_bf16 ? Storage::f32 : Storage::bf16);
    }
    int64_t num_blocks() const { return (rows + block_rows - 1) / block_rows; }
    int64_t num_tiles() const {
        const int64_t unit = group ? group : tile_shape(storage).columns;
        return (columns + unit - 1) / unit * unit / tile_shape(storage).columns;
    }
    int64_t padded_columns() const { return num_tiles() * tile_shape(storage).columns; }
    int64_t tiles_per_group() const {
        return group ? group / tile_shape(storage).columns : num_tiles();
    }
    int64_t num_groups() const { return num_tiles() / tiles_per_group(); }
    // Of a group's scale, and of its minimum: float16, e8m0, or a byte plus 128.
    int64_t scale_bytes() const { return storage == Storage::mxfp4 || factor_groups ? 1 : 2; }
    // After the tiles of each group of a block: 64 scales, then 64 minima or zeros (bytes), or none.
    int64_t group_tail_bytes() const {
        return group ? block_rows * (scale_bytes() * (1 + has_minima) + has_zeros) : 0;
    }
    // Of a block.
    int64_t factor_count() const {
        return factor_groups ? num_groups() / factor_groups * (1 + has_minima) * block_rows : 0;
    }
    uint16_t* block_factors(int64_t index) const {
        if (!factors) return nullptr;
        return reinterpret_cast<uint16_t*>(factors->data()) + (first_block + index) * factor_count();
    }
    int64_t group_bytes() const {
        return tiles_per_group() * tile_shape(storage).block_bytes() + group_tail_bytes();
    }
    int64_t block_bytes() const { return num_groups() * group_bytes(); }
    char* block(int64_t index) const {
        return values->data() + (first_block + index) * block_bytes();
    }
    float* row_scales() const {
        return scales ? reinterpret_cast<float*>(scales->data()) + first_block * block_rows : nullptr;
    }
    // Where the lane of a row begins, in a tile.
    char* lane(int64_t row, int64_t tile) const {
        const TileShape shape = tile_shape(storage);
        const int64_t in_block = row % block_rows;
        return block(row / block_rows) + tile / tiles_per_group() * group_bytes() +
               tile % tiles_per_group() * shape.block_bytes() +
               in_block / panel_rows * shape.panel_bytes() +
               in_block % panel_rows * shape.lane_bytes;
    }
};

// Rows of x [.., columns of the weight] -> out [num_rows, rows of the weight].
struct MatmulCall {
    const Matrix* weight;
    const void* x;
    bool x_is_bf16;
    int64_t num_rows, x_stride;
    const int32_t* row_ids;  // [num_rows], the rows of x that count; null: the first ones
    const void* bias;  // [rows of the weight] in x's type, or null
    void* out;
    bool out_is_bf16;
    int64_t out_stride;
};

// Rows start .. stop of a weight without a copy; start is the first of a block.
inline Matrix part_of(const Matrix& weight, int64_t start, int64_t stop) {
    Matrix rows = weight;
    rows.first_block += start / block_rows;
    rows.rows = stop - start;
    return rows;
}

struct MatmulKernels {
    // The weights of several calls are of one form with as many columns, x and out of one type.
    void (*run)(const MatmulCall* calls, int64_t count);
    // Rows of a weight in bf16 or f32 as a table: row ids[i] to out + i * stride.
    void (*look_up)(const Matrix& table, const int64_t* ids, int64_t count, void* out,
                    int64_t stride);
};

extern ByLevel<MatmulKernels> matmul_kernels;

inline void matmul(const MatmulCall& call) {
    if (call.num_rows) matmul_kernels.active().run(&call, 1);
}
// Calls that run as one, so that all threads read weights from the first to the last. Each has rows.
inline void matmul(const MatmulCall* calls, int64_t count) {
    if (count) matmul_kernels.active().run(calls, count);
}

}  // namespace slipstream
