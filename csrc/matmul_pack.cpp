#include "matmul_pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "threads.h"

namespace slipstream {
namespace {

constexpr int64_t padded(int64_t rows) { return (rows + block_rows - 1) / block_rows * block_rows; }

std::unique_ptr<Matrix> empty(Storage storage, int64_t rows, int64_t columns, int64_t group = 0,
                              bool has_zeros = false) {
    auto matrix = std::make_unique<Matrix>();
    matrix->storage = storage;
    matrix->rows = rows;
    matrix->columns = columns;
    matrix->group = group;
    matrix->has_zeros = has_zeros;
    matrix->values = std::make_shared<Buffer>(matrix->num_blocks() * matrix->block_bytes());
    if (storage == Storage::i8 || storage == Storage::i4)
        matrix->scales = std::make_shared<Buffer>(padded(rows) * sizeof(float));
    return matrix;
}

// Calls fill(row) for all rows of the weight, blocks in parallel: the pages of a block come to lie
// near the thread that first touches them.
template <typename Fill>
void for_rows(const Matrix& matrix, Fill&& fill) {
    parallel_for(matrix.num_blocks(), [&](int64_t block) {
        const int64_t end = std::min(matrix.rows, (block + 1) * block_rows);
        for (int64_t row = block * block_rows; row < end; ++row) fill(row);
    });
}

// To the nearest float16, ties to even; what is too large or too small is the caller's business.
uint16_t to_float16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    const int exponent = static_cast<int>(bits >> 23 & 0xff) - 127 + 15;
    const uint32_t mantissa = bits & 0x7fffff;
    if (exponent >= 31) return static_cast<uint16_t>(sign | 0x7bff);
    if (exponent <= 0) {
        if (exponent < -10) return static_cast<uint16_t>(sign);
        const uint32_t full = mantissa | 0x800000;
        const int shift = 14 - exponent;
        const uint32_t half = 1u << (shift - 1), kept = full >> shift, rest = full & ((1u << shift) - 1);
        return static_cast<uint16_t>(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
    }
    const uint32_t kept = static_cast<uint32_t>(exponent) << 10 | mantissa >> 13;
    const uint32_t rest = mantissa & 0x1fff;
    return static_cast<uint16_t>(sign | (kept + (rest > 0x1000 || (rest == 0x1000 && (kept & 1)))));
}

}  // namespace

std::unique_ptr<Matrix> pack_floats(Storage storage, const void* values, int64_t rows,
                                    int64_t columns) {
    auto matrix = empty(storage, rows, columns);
    const TileShape shape = tile_shape(storage);
    const int64_t number = storage == Storage::f32 ? 4 : 2, row_bytes = columns * number;
    const int64_t tile_bytes = shape.columns * number;
    for_rows(*matrix, [&](int64_t row) {
        const char* from = static_cast<const char*>(values) + row * row_bytes;
        for (int64_t tile = 0; tile < matrix->num_tiles(); ++tile) {
            char* lane = matrix->lane(row, tile);
            const int64_t bytes = std::min(tile_bytes, row_bytes - tile * tile_bytes);
            char whole[64] = {};
            std::memcpy(whole, from + tile * tile_bytes, bytes);
            for (int step = 0; step < shape.steps; ++step)
                std::memcpy(lane + step * panel_rows * 4, whole + step * 4, 4);
        }
    });
    return matrix;
}

std::unique_ptr<Matrix> pack_int8(const int8_t* values, const float* scales, int64_t rows,
                                  int64_t columns, bool one_digit) {
    auto matrix = empty(Storage::i8, rows, columns);
    matrix->one_digit = one_digit;
    std::memcpy(matrix->row_scales(), scales, rows * sizeof(float));
    for_rows(*matrix, [&](int64_t row) {
        const int8_t* from = values + row * columns;
        for (int64_t tile = 0; tile < matrix->num_tiles(); ++tile) {
            char* lane = matrix->lane(row, tile);
            // Behind the last column x is zero, whatever stands here.
            char whole[64] = {};
            std::memcpy(whole, from + tile * 64, std::min<int64_t>(64, columns - tile * 64));
            for (int step = 0; step < 16; ++step) {
                uint32_t quad;
                std::memcpy(&quad, whole + step * 4, 4);
                quad ^= 0x80808080;  // adds 128 to each
                std::memcpy(lane + step * panel_rows * 4, &quad, 4);
            }
        }
    });
    return matrix;
}

std::unique_ptr<Matrix> pack_int4(const uint8_t* values, const float* scales, const uint8_t* zeros,
                                  int64_t rows, int64_t columns, int64_t group) {
    auto matrix = empty(Storage::i4, rows, columns, group, zeros != nullptr);
    const int64_t num_groups = matrix->num_groups(), tiles = matrix->tiles_per_group();
    const int64_t tail = tiles * tile_shape(Storage::i4).block_bytes();
    float* powers = matrix->row_scales();
    for_rows(*matrix, [&](int64_t row) {
        const uint8_t* from = values + row * (columns / 2);
        // The row's largest scale becomes 2^15 to 2^16: float16 numbers from files stay what they
        // are.
        float most = 0.0f;
        for (int64_t g = 0; g < num_groups; ++g)
            most = std::max(most, std::fabs(scales[row * num_groups + g]));
        powers[row] = most > 0.0f && std::isfinite(most) ? std::ldexp(1.0f, std::ilogb(most) - 15) : 1.0f;
        for (int64_t g = 0; g < num_groups; ++g) {
            char* end = matrix->block(row / block_rows) + g * matrix->group_bytes() + tail;
            const uint16_t scale = to_float16(scales[row * num_groups + g] / powers[row]);
            std::memcpy(end + row % block_rows * 2, &scale, 2);
            if (zeros) end[block_rows * 2 + row % block_rows] =
                static_cast<char>(zeros[row * num_groups + g]);
        }
        for (int64_t tile = 0; tile < matrix->num_tiles(); ++tile) {
            char* lane = matrix->lane(row, tile);
            for (int step = 0; step < 4; ++step) {
                char bytes[4];
                for (int column = 0; column < 4; ++column) {
                    const int64_t k = tile * 32 + step * 8 + column;
                    const int low = from[k / 2] >> k % 2 * 4 & 15;
                    const int high = from[k / 2 + 2] >> k % 2 * 4 & 15;
                    bytes[column] = static_cast<char>(low | high << 4);
                }
                std::memcpy(lane + step * panel_rows * 4, bytes, 4);
            }
        }
    });
    return matrix;
}

std::unique_ptr<Matrix> select_rows(const Matrix& weight, const int64_t* ids, int64_t count) {
    auto matrix = empty(weight.storage, count, weight.columns, weight.group, weight.has_zeros);
    matrix->one_digit = weight.one_digit;
    const TileShape shape = tile_shape(weight.storage);
    const int64_t tail = weight.group_bytes() - weight.group_tail_bytes();
    const auto group_tail = [&](const Matrix& of, int64_t row, int64_t group) {
        return of.block(row / block_rows) + group * of.group_bytes() + tail;
    };
    for_rows(*matrix, [&](int64_t row) {
        const int64_t source = ids[row], place = source % block_rows, goal = row % block_rows;
        for (int64_t tile = 0; tile < weight.num_tiles(); ++tile) {
            const char* from = weight.lane(source, tile);
            char* to = matrix->lane(row, tile);
            for (int step = 0; step < shape.steps; ++step)
                std::memcpy(to + step * panel_rows * shape.lane_bytes,
                            from + step * panel_rows * shape.lane_bytes, shape.lane_bytes);
        }
        for (int64_t group = 0; weight.group && group < weight.num_groups(); ++group) {
            const char* from = group_tail(weight, source, group);
            char* to = group_tail(*matrix, row, group);
            std::memcpy(to + goal * 2, from + place * 2, 2);
            if (weight.has_zeros) to[block_rows * 2 + goal] = from[block_rows * 2 + place];
        }
        if (weight.scales) matrix->row_scales()[row] = weight.row_scales()[source];
    });
    return matrix;
}

}  // namespace slipstream
