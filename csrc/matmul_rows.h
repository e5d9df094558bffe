// The rows that a weight is multiplied by: laid out for the kernels, and what comes of them.
// Compiled for each level.
#pragma once

#include "matmul.h"
#include "simd.h"
#include "threads.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Rows that are multiplied at once: few, while weights stream by, and many.
constexpr int narrow_rows = 16, wide_rows = 32;

// bf16 rows, K filled up with zeros to whole tiles. For tiles of matrices 16 rows (less at the end)
// lie together, [tile][row][32]; otherwise row by row.
struct PackedRows {
    const bf16* values;
    int64_t columns;  // padded
    int64_t num_rows;
    const float* sums;  // [rows, groups], or null
    int64_t groups;

    float group_sum(int64_t row, int64_t group) const {
        return sums ? sums[row * groups + group] : 0.0f;
    }
    const bf16* at(int64_t row) const { return values + row * columns; }
    // How many of the 16 rows from `row` on there are.
    int together(int64_t row) const {
        return static_cast<int>(num_rows - row < 16 ? num_rows - row : 16);
    }
};

struct RoundedRows {
    const int8_t* values;  // as PackedRows, tiles of 64 columns
    int64_t columns, num_rows;
    const float* scales;  // [rows]
};

#if defined(__AMX_BF16__)
constexpr bool in_tiles = true;
#else
constexpr bool in_tiles = false;
#endif

// Where columns tile * width .. of a row go.
template <typename Number>
inline Number* place(Number* values, int64_t num_rows, int64_t columns, int64_t row, int64_t tile,
                     int width) {
    if (!in_tiles) return values + row * columns + tile * width;
    const int64_t first = row / 16 * 16;
    const int64_t together = num_rows - first < 16 ? num_rows - first : 16;
    return values + first * columns + (tile * together + row - first) * width;
}

template <typename Fill>
inline void for_rows(int64_t count, Fill&& fill) {
    // A few rows are done sooner than other threads are told of them.
    if (count <= 4) {
        for (int64_t row = 0; row < count; ++row) fill(row);
    } else {
        parallel_for(count, fill);
    }
}

inline PackedRows pack_rows(const MatmulCall& call) {
    const Matrix& weight = *call.weight;
    const int64_t columns = weight.padded_columns(), tiles = columns / 32;
    const int64_t groups = weight.has_zeros ? weight.num_groups() : 0;
    const int64_t value_bytes = (call.num_rows * columns * 2 + 63) / 64 * 64;
    char* memory = static_cast<char*>(
        scratch(Scratch::input, value_bytes + call.num_rows * groups * sizeof(float)));
    auto* values = reinterpret_cast<bf16*>(memory);
    auto* sums = reinterpret_cast<float*>(memory + value_bytes);
    const auto* x = static_cast<const bf16*>(call.x);
    for_rows(call.num_rows, [&](int64_t row) {
        const bf16* from = x + row * call.x_stride;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            bf16* to = place(values, call.num_rows, columns, row, tile, 32);
            const int64_t left = weight.columns - tile * 32;
            if (left < 32) std::memset(to, 0, 64);
            if (left > 0) std::memcpy(to, from + tile * 32, (left < 32 ? left : 32) * 2);
        }
        for (int64_t group = 0; group < groups; ++group) {
            F16 sum_of = zero();
            for (int64_t k = 0; k < weight.group; k += lanes)
                sum_of = sum_of + load(from + group * weight.group + k);
            sums[row * groups + group] = sum(sum_of);
        }
    });
    return {values, columns, call.num_rows, groups ? sums : nullptr, groups};
}

// Each row divided by a scale of its own, so that its largest number becomes 127.
inline RoundedRows round_rows(const MatmulCall& call) {
    const Matrix& weight = *call.weight;
    const int64_t columns = weight.padded_columns(), tiles = columns / 64, width = weight.columns;
    const int64_t value_bytes = (call.num_rows * columns + 63) / 64 * 64;
    char* memory = static_cast<char*>(
        scratch(Scratch::input, value_bytes + call.num_rows * sizeof(float)));
    auto* values = reinterpret_cast<int8_t*>(memory);
    auto* scales = reinterpret_cast<float*>(memory + value_bytes);
    for_rows(call.num_rows, [&](int64_t row) {
        const auto at = [&](int64_t k) {
            const int count = static_cast<int>(width - k < lanes ? width - k : lanes);
            if (call.x_is_bf16)
                return load_first(static_cast<const bf16*>(call.x) + row * call.x_stride + k, count);
            return load_first(static_cast<const float*>(call.x) + row * call.x_stride + k, count);
        };
        F16 most = zero();
        for (int64_t k = 0; k < width; k += lanes) {
            const F16 x = at(k);
            most = maximum(most, maximum(x, zero() - x));
        }
        const float bound = largest(most), scale = (bound > 1e-30f ? bound : 1e-30f) / 127.0f;
        scales[row] = scale;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            int8_t* to = place(values, call.num_rows, columns, row, tile, 64);
            for (int part = 0; part < 64; part += lanes) {
                const int64_t k = tile * 64 + part;
                float rounded[lanes] = {};
                if (k < width) store(rounded, round(at(k) / broadcast(scale)));
                for (int i = 0; i < lanes; ++i) to[part + i] = static_cast<int8_t>(rounded[i]);
            }
        }
    });
    return {values, columns, call.num_rows, scales};
}

// sums = scales * part - products * x_sum, added to what earlier groups gave.
inline void fold_group(float* sums, const float* part, const float* scales, const float* products,
                       float x_sum, bool is_first) {
    for (int n = 0; n < block_rows; n += lanes) {
        F16 sum = is_first ? zero() : load(sums + n);
        sum = fma(load(scales + n), load(part + n), sum);
        if (products) sum = fma(load(products + n), broadcast(-x_sum), sum);
        store(sums + n, sum);
    }
}

// sums [64] of a block, times `scales` where there are any, and bias, to the row's place.
inline void finish_row(const MatmulCall& call, int64_t block, int64_t row, const float* sums,
                       const float* scales) {
    const int64_t first = block * block_rows;
    for (int n = 0; n < block_rows && first + n < call.weight->rows; n += lanes) {
        const int64_t left = call.weight->rows - first - n;
        const int count = static_cast<int>(left < lanes ? left : lanes);
        F16 value = load(sums + n);
        if (scales) value = value * load(scales + n);
        if (call.bias) {
            const F16 bias =
                call.x_is_bf16
                    ? load_first(static_cast<const bf16*>(call.bias) + first + n, count)
                    : load_first(static_cast<const float*>(call.bias) + first + n, count);
            value = value + bias;
        }
        const int64_t to = row * call.out_stride + first + n;
        if (count == lanes) {
            if (call.out_is_bf16) store(static_cast<bf16*>(call.out) + to, value);
            else store(static_cast<float*>(call.out) + to, value);
        } else if (call.out_is_bf16) {
            store_first(static_cast<bf16*>(call.out) + to, value, count);
        } else {
            store_first(static_cast<float*>(call.out) + to, value, count);
        }
    }
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
