// Packing weights, once, as they are loaded.
#pragma once

#include <cstdint>
#include <memory>

#include "matmul.h"

namespace slipstream {

// values [rows, columns], row by row: float32 or bfloat16 as `storage` says.
std::unique_ptr<Matrix> pack_floats(Storage storage, const void* values, int64_t rows,
                                    int64_t columns);

// values [rows, columns] int8 with scales [rows].
std::unique_ptr<Matrix> pack_int8(const int8_t* values, const float* scales, int64_t rows,
                                  int64_t columns, bool rounds_input);

// values [rows, columns / 2], the even column in the low half; scales [rows, columns / group] and
// zeros of the same shape (null: 8 everywhere): (value - zero) * scale.
std::unique_ptr<Matrix> pack_int4(const uint8_t* values, const float* scales, const uint8_t* zeros,
                                  int64_t rows, int64_t columns, int64_t group);

// The rows ids[0..count) of a packed weight, packed.
std::unique_ptr<Matrix> select_rows(const Matrix& weight, const int64_t* ids, int64_t count);

}  // namespace slipstream
