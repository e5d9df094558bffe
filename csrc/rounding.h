// Rounding rows of a weight to integers: the numbers of slipstream/kernels/formats,
// bit for bit, at every level.
#pragma once

#include <cstdint>
#include <memory>

#include "levels.h"
#include "matmul.h"

namespace slipstream {

// Groups of columns that share a scale of four bits.
struct Int4Groups {
    int64_t count;   // in a row
    int64_t size;    // 32 or 128 columns
    bool has_zeros;  // of their own; else 8 stands for 0
};

struct RoundingKernels {
    // A row as float32. `out` has room for whole sixteens, and zeros fill the last one.
    void (*widen)(const void* row, bool is_bf16, int64_t columns, float* out);
    // Whole sixteens -> integers from -127 to 127; returns their scale.
    float (*to_int8)(const float* row, int64_t columns, int8_t* values);
    // Of each group the better of two scales, and its zero (0 where groups have none).
    void (*choose)(const float* row, const Int4Groups& groups, float* scales, uint8_t* zeros);
    // -> [columns / 2], the even column in the low half.
    void (*to_int4)(const float* row, const Int4Groups& groups, const float* scales,
                    const uint8_t* zeros, uint8_t* values);
};

extern ByLevel<RoundingKernels> rounding_kernels;

// A matrix [rows, columns] of float32 or bfloat16, row by row.
struct Floats {
    const void* values;
    bool is_bf16;
    int64_t rows, columns;

    const void* row(int64_t index) const {
        return static_cast<const char*>(values) + index * columns * (is_bf16 ? 2 : 4);
    }
};

// Rounded and packed in one go: nothing of the matrix is ever in memory in a third form.
std::unique_ptr<Matrix> round_to_int8(const Floats& from, bool one_digit);
std::unique_ptr<Matrix> round_to_int4(const Floats& from, int64_t group, bool has_zeros);

}  // namespace slipstream
