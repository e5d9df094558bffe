#include "rounding.h"

#include <cmath>
#include <vector>

#include "float16.h"
#include "matmul_pack.h"

namespace slipstream {

ByLevel<RoundingKernels> rounding_kernels;

namespace {

constexpr int64_t whole_sixteens(int64_t columns) { return (columns + 15) / 16 * 16; }

// A row's scales, each rounded so that all are float16 numbers times one power of two.
void halve(float* scales, int64_t count) {
    float largest = 0.0f;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(scales[i]));
    int exponent;
    std::frexp(largest, &exponent);
    const float power = std::ldexp(1.0f, std::clamp(16 - exponent, -126, 126));
    for (int64_t i = 0; i < count; ++i)
        scales[i] = from_float16(to_float16(scales[i] * power)) / power;
}

}  // namespace

std::unique_ptr<Matrix> round_to_int8(const Floats& from, bool one_digit) {
    auto matrix = empty_matrix(Storage::i8, from.rows, from.columns);
    matrix->one_digit = one_digit;
    const RoundingKernels& kernels = rounding_kernels.active();
    const int64_t stride = whole_sixteens(from.columns);
    for_panels(*matrix, [&](const PanelRows& rows) {
        std::vector<float> row(stride);
        std::vector<int8_t> values(rows.count * stride);
        for (int64_t index = 0; index < rows.count; ++index) {
            kernels.widen(from.row(rows.first + index), from.is_bf16, from.columns, row.data());
            matrix->row_scales()[rows.first + index] =
                kernels.to_int8(row.data(), stride, values.data() + index * stride);
        }
        put_int8(*matrix, rows, values.data(), stride);
    });
    return matrix;
}

std::unique_ptr<Matrix> round_to_int4(const Floats& from, int64_t group, bool has_zeros) {
    auto matrix = empty_matrix(Storage::i4, from.rows, from.columns, group, has_zeros);
    const RoundingKernels& kernels = rounding_kernels.active();
    const Int4Groups groups{from.columns / group, group, has_zeros};
    for_panels(*matrix, [&](const PanelRows& rows) {
        std::vector<float> row(from.columns), scales(rows.count * groups.count);
        std::vector<uint8_t> values(rows.count * from.columns / 2), zeros(scales.size());
        for (int64_t index = 0; index < rows.count; ++index) {
            float* own = scales.data() + index * groups.count;
            uint8_t* own_zeros = zeros.data() + index * groups.count;
            kernels.widen(from.row(rows.first + index), from.is_bf16, from.columns, row.data());
            kernels.choose(row.data(), groups, own, own_zeros);
            halve(own, groups.count);
            kernels.to_int4(row.data(), groups, own, own_zeros,
                            values.data() + index * (from.columns / 2));
        }
        put_int4(*matrix, rows, values.data(), scales.data(), has_zeros ? zeros.data() : nullptr);
    });
    return matrix;
}

}  // namespace slipstream
