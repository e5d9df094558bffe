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
    matrix->values = Buffer(matrix->num_blocks() * matrix->block_bytes());
    if (storage == Storage::i8 || storage == Storage::i8_rounded || storage == Storage::i4)
        matrix->scales = Buffer(padded(rows) * sizeof(float));
    if (storage == Storage::i8_rounded) matrix->row_sums = Buffer(padded(rows) * sizeof(int32_t));
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
            char* lane = matrix->values.data() + matrix->lane_offset(row, tile);
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
                                  int64_t columns, bool rounds_input) {
    auto matrix = empty(rounds_input ? Storage::i8_rounded : Storage::i8, rows, columns);
    const TileShape shape = tile_shape(matrix->storage);
    std::memcpy(matrix->scales.data(), scales, rows * sizeof(float));
    for_rows(*matrix, [&](int64_t row) {
        const int8_t* from = values + row * columns;
        int32_t sum = 0;
        for (int64_t tile = 0; tile < matrix->num_tiles(); ++tile) {
            char* lane = matrix->values.data() + matrix->lane_offset(row, tile);
            for (int column = 0; column < shape.columns; ++column) {
                const int64_t k = tile * shape.columns + column;
                if (k >= columns) break;
                lane[column / shape.lane_bytes * panel_rows * shape.lane_bytes +
                     column % shape.lane_bytes] = from[k];
                sum += from[k];
            }
        }
        if (rounds_input) reinterpret_cast<int32_t*>(matrix->row_sums.data())[row] = sum;
    });
    return matrix;
}

std::unique_ptr<Matrix> pack_int4(const uint8_t* values, const float* scales, const uint8_t* zeros,
                                  int64_t rows, int64_t columns, int64_t group) {
    auto matrix = empty(Storage::i4, rows, columns, group, zeros != nullptr);
    const int64_t num_groups = matrix->num_groups(), tiles = matrix->tiles_per_group();
    const int64_t tail = tiles * tile_shape(Storage::i4).block_bytes();
    auto* powers = reinterpret_cast<float*>(matrix->scales.data());
    for_rows(*matrix, [&](int64_t row) {
        const uint8_t* from = values + row * (columns / 2);
        // The row's largest scale becomes 1 to 2, where float16 has all its bits.
        float most = 0.0f;
        for (int64_t g = 0; g < num_groups; ++g)
            most = std::max(most, std::fabs(scales[row * num_groups + g]));
        powers[row] = most > 0.0f && std::isfinite(most) ? std::ldexp(1.0f, std::ilogb(most)) : 1.0f;
        for (int64_t g = 0; g < num_groups; ++g) {
            char* end = matrix->values.data() + row / block_rows * matrix->block_bytes() +
                        g * matrix->group_bytes() + tail;
            const uint16_t scale = to_float16(scales[row * num_groups + g] / powers[row]);
            std::memcpy(end + row % block_rows * 2, &scale, 2);
            if (zeros) end[block_rows * 2 + row % block_rows] =
                static_cast<char>(zeros[row * num_groups + g]);
        }
        for (int64_t tile = 0; tile < matrix->num_tiles(); ++tile) {
            char* lane = matrix->values.data() + matrix->lane_offset(row, tile);
            for (int step = 0; step < 4; ++step) {
                uint16_t words[2] = {0, 0};
                for (int pair = 0; pair < 4; ++pair) {
                    const int64_t k = tile * 32 + step * 8 + pair * 2;
                    const uint8_t both = from[k / 2];
                    words[0] = static_cast<uint16_t>(words[0] | (both & 15) << 4 * pair);
                    words[1] = static_cast<uint16_t>(words[1] | (both >> 4) << 4 * pair);
                }
                std::memcpy(lane + step * panel_rows * 4, words, 4);
            }
        }
    });
    return matrix;
}

std::unique_ptr<Matrix> select_rows(const Matrix& weight, const int64_t* ids, int64_t count) {
    auto matrix = empty(weight.storage, count, weight.columns, weight.group, weight.has_zeros);
    const TileShape shape = tile_shape(weight.storage);
    const int64_t tail = weight.group_bytes() - weight.group_tail_bytes();
    const auto group_tail = [&](const Matrix& of, int64_t row, int64_t group) {
        return of.values.data() + row / block_rows * of.block_bytes() + group * of.group_bytes() +
               tail;
    };
    for_rows(*matrix, [&](int64_t row) {
        const int64_t source = ids[row], place = source % block_rows, goal = row % block_rows;
        for (int64_t tile = 0; tile < weight.num_tiles(); ++tile) {
            const char* from = weight.values.data() + weight.lane_offset(source, tile);
            char* to = matrix->values.data() + matrix->lane_offset(row, tile);
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
        const auto copy_number = [&](const Buffer& from, const Buffer& to) {
            if (from.size()) std::memcpy(to.data() + row * 4, from.data() + source * 4, 4);
        };
        copy_number(weight.scales, matrix->scales);
        copy_number(weight.row_sums, matrix->row_sums);
    });
    return matrix;
}

}  // namespace slipstream
