// Packing weights, once, as they are loaded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "matmul.h"
#include "threads.h"

namespace slipstream {

// A weight of zeros, to be filled panel by panel.
std::unique_ptr<Matrix> empty_matrix(Storage storage, int64_t rows, int64_t columns,
                                     int64_t group = 0, bool has_zeros = false);
std::unique_ptr<Matrix> empty_matrix(const Matrix& form);  // of this form and size

// What follows the tiles of a group in the block of a row: scales, and minima or zeros.
inline char* group_tail(const Matrix& matrix, int64_t row, int64_t group) {
    return matrix.block(row / block_rows) + (group + 1) * matrix.group_bytes() -
           matrix.group_tail_bytes();
}

// The rows of a panel: 16, or what is left.
struct PanelRows {
    int64_t first, count;
};

// Calls fill(rows) for all panels, blocks in parallel: the pages of a block come to lie near the
// thread that first touches them.
template <typename Fill>
void for_panels(const Matrix& matrix, Fill&& fill) {
    parallel_for(matrix.num_blocks(), [&](int64_t block) {
        const int64_t end = std::min(matrix.rows, (block + 1) * block_rows);
        for (int64_t row = block * block_rows; row < end; row += panel_rows)
            fill(PanelRows{row, std::min<int64_t>(panel_rows, end - row)});
    });
}

// Rows of a panel into a weight, from the first one's numbers on; of integers as below.
void put_floats(const Matrix& matrix, const PanelRows& rows, const void* values);
void put_int8(const Matrix& matrix, const PanelRows& rows, const int8_t* values, int64_t stride);
void put_int4(const Matrix& matrix, const PanelRows& rows, const uint8_t* values,
              const float* scales, const uint8_t* zeros);

// values [rows, columns], row by row: float32 or bfloat16 as `storage` says.
std::unique_ptr<Matrix> pack_floats(Storage storage, const void* values, int64_t rows,
                                    int64_t columns);

// values [rows, columns] int8 with scales [rows]; `one_digit`: what they meet is rounded to int8.
std::unique_ptr<Matrix> pack_int8(const int8_t* values, const float* scales, int64_t rows,
                                  int64_t columns, bool one_digit);

// values [rows, columns / 2], the even column in the low half; scales [rows, columns / group] and
// zeros of the same shape (null: 8 everywhere): (value - zero) * scale.
std::unique_ptr<Matrix> pack_int4(const uint8_t* values, const float* scales, const uint8_t* zeros,
                                  int64_t rows, int64_t columns, int64_t group);

// values as above; scales [rows, columns / 32], each the exponent of a power of two plus 127.
std::unique_ptr<Matrix> pack_mxfp4(const uint8_t* values, const uint8_t* scales, int64_t rows,
                                   int64_t columns);

// values as above; scales [rows, columns / 16], numbers of e4m3, and a factor of each row.
std::unique_ptr<Matrix> pack_nvfp4(const uint8_t* values, const float* scales, const float* factors,
                                   int64_t rows, int64_t columns);

// The rows ids[0..count) of a packed weight, packed.
std::unique_ptr<Matrix> select_rows(const Matrix& weight, const int64_t* ids, int64_t count);

}  // namespace slipstream
