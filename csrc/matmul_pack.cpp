#include "matmul_pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "float16.h"

namespace slipstream {
namespace {

constexpr int64_t padded(int64_t rows) { return (rows + block_rows - 1) / block_rows * block_rows; }

// Calls put(index, tile, lane) for each of the rows and tiles, one tile after the other, so that
// writing stays in it.
template <typename Put>
void for_tiles(const Matrix& matrix, const PanelRows& rows, Put&& put) {
    const int64_t tiles = matrix.num_tiles();
    for (int64_t tile = 0; tile < tiles; ++tile) {
        char* lane = matrix.lane(rows.first, tile);
        for (int64_t index = 0; index < rows.count; ++index, lane += 4) put(index, tile, lane);
    }
}

// A row's part of a tile: 64 bytes in steps of four. After the row's end x is zero, whatever
// stands there.
void put_lanes(char* lane, const char* row, int64_t row_bytes, int64_t tile, uint32_t flipped) {
    const char* from = row + tile * 64;
    const int64_t left = row_bytes - tile * 64;
    char whole[64] = {};
    if (left < 64) from = static_cast<const char*>(std::memcpy(whole, from, left));
    for (int step = 0; step < 16; ++step) {
        uint32_t word;
        std::memcpy(&word, from + step * 4, 4);
        word ^= flipped;
        std::memcpy(lane + step * panel_rows * 4, &word, 4);
    }
}

// The low halves of bytes: the four numbers of 16 bits.
uint32_t spread(uint32_t bits) {
    bits = (bits | bits << 8) & 0x00ff00ff;
    return (bits | bits << 4) & 0x0f0f0f0f;
}

// A row's scales as float16 times a power of two, after the tiles of their groups. The largest becomes
// 2^15 to 2^16: float16 numbers from files stay what they are.
void put_scales(const Matrix& matrix, int64_t row, const float* scales, const uint8_t* zeros) {
    const int64_t num_groups = matrix.num_groups(), group_bytes = matrix.group_bytes();
    float most = 0.0f;
    for (int64_t group = 0; group < num_groups; ++group)
        most = std::max(most, std::fabs(scales[group]));
    const bool usable = most > 0.0f && std::isfinite(most);
    const float power = usable ? std::ldexp(1.0f, std::ilogb(most) - 15) : 1.0f;
    matrix.row_scales()[row] = power;
    const int64_t place = row % block_rows;
    char* end = group_tail(matrix, row, 0);
    for (int64_t group = 0; group < num_groups; ++group, end += group_bytes) {
        const uint16_t scale = to_float16(scales[group] / power);
        std::memcpy(end + place * 2, &scale, 2);
        if (zeros) end[block_rows * 2 + place] = static_cast<char>(zeros[group]);
    }
}

// A panel's numbers of four bits: values [rows, columns / 2], the even column in the low half.
void put_halves(const Matrix& matrix, const PanelRows& rows, const uint8_t* values) {
    const TileShape shape = tile_shape(matrix.storage);
    for_tiles(matrix, rows, [&](int64_t index, int64_t tile, char* lane) {
        const uint8_t* from = values + index * (matrix.columns / 2) + tile * (shape.columns / 2);
        for (int step = 0; step < shape.steps; ++step) {
            uint32_t eight;  // columns, four bits each
            std::memcpy(&eight, from + step * 4, 4);
            const uint32_t word = spread(eight & 0xffff) | spread(eight >> 16) << 4;
            std::memcpy(lane + step * panel_rows * 4, &word, 4);
        }
    });
}

// Of a weight to one of the same form.
void copy_row(const Matrix& from, int64_t source, const Matrix& to, int64_t goal) {
    const TileShape shape = tile_shape(from.storage);
    for (int64_t tile = 0; tile < from.num_tiles(); ++tile) {
        const char* old = from.lane(source, tile);
        char* copy = to.lane(goal, tile);
        for (int step = 0; step < shape.steps; ++step) {
            const int64_t place = step * panel_rows * shape.lane_bytes;
            std::memcpy(copy + place, old + place, shape.lane_bytes);
        }
    }
    for (int64_t group = 0; from.group && group < from.num_groups(); ++group) {
        const char* old = group_tail(from, source, group);
        char* copy = group_tail(to, goal, group);
        const int64_t old_place = source % block_rows, place = goal % block_rows;
        const int64_t size = from.scale_bytes();
        for (int part = 0; part <= from.has_minima; ++part)
            std::memcpy(copy + (part * block_rows + place) * size,
                        old + (part * block_rows + old_place) * size, size);
        if (from.has_zeros) copy[block_rows * size + place] = old[block_rows * size + old_place];
    }
    for (int64_t at = 0; at < from.factor_count(); at += block_rows)
        to.block_factors(goal / block_rows)[at + goal % block_rows] =
            from.block_factors(source / block_rows)[at + source % block_rows];
    if (from.scales) to.row_scales()[goal] = from.row_scales()[source];
}

}  // namespace

std::unique_ptr<Matrix> empty_matrix(Storage storage, int64_t rows, int64_t columns, int64_t group,
                                     bool has_zeros) {
    Matrix form{};
    form.storage = storage;
    form.rows = rows;
    form.columns = columns;
    form.group = group;
    form.has_zeros = has_zeros;
    return empty_matrix(form);
}

std::unique_ptr<Matrix> empty_matrix(const Matrix& form) {
    auto matrix = std::make_unique<Matrix>(form);
    const Storage storage = form.storage;
    matrix->first_block = 0;
    matrix->values = std::make_shared<Buffer>(matrix->num_blocks() * matrix->block_bytes());
    matrix->scales = nullptr;
    if (storage != Storage::f32 && storage != Storage::bf16 && storage != Storage::mxfp4)
        matrix->scales = std::make_shared<Buffer>(padded(form.rows) * sizeof(float));
    matrix->factors = nullptr;
    if (form.factor_groups)
        matrix->factors = std::make_shared<Buffer>(matrix->num_blocks() * matrix->factor_count() *
                                                   int64_t{sizeof(uint16_t)});
    return matrix;
}

void put_floats(const Matrix& matrix, const PanelRows& rows, const void* values) {
    const int64_t row_bytes = matrix.columns * (matrix.storage == Storage::f32 ? 4 : 2);
    for_tiles(matrix, rows, [&](int64_t index, int64_t tile, char* lane) {
        const char* row = static_cast<const char*>(values) + index * row_bytes;
        put_lanes(lane, row, row_bytes, tile, 0);
    });
}

void put_int8(const Matrix& matrix, const PanelRows& rows, const int8_t* values, int64_t stride) {
    for_tiles(matrix, rows, [&](int64_t index, int64_t tile, char* lane) {
        const char* row = reinterpret_cast<const char*>(values) + index * stride;
        put_lanes(lane, row, matrix.columns, tile, 0x80808080);  // adds 128 to each
    });
}

void put_int4(const Matrix& matrix, const PanelRows& rows, const uint8_t* values,
              const float* scales, const uint8_t* zeros) {
    const int64_t num_groups = matrix.num_groups();
    for (int64_t index = 0; index < rows.count; ++index)
        put_scales(matrix, rows.first + index, scales + index * num_groups,
                   zeros ? zeros + index * num_groups : nullptr);
    put_halves(matrix, rows, values);
}

std::unique_ptr<Matrix> pack_floats(Storage storage, const void* values, int64_t rows,
                                    int64_t columns) {
    auto matrix = empty_matrix(storage, rows, columns);
    const int64_t row_bytes = columns * (storage == Storage::f32 ? 4 : 2);
    for_panels(*matrix, [&](const PanelRows& panel) {
        put_floats(*matrix, panel, static_cast<const char*>(values) + panel.first * row_bytes);
    });
    return matrix;
}

std::unique_ptr<Matrix> pack_int8(const int8_t* values, const float* scales, int64_t rows,
                                  int64_t columns, bool one_digit) {
    auto matrix = empty_matrix(Storage::i8, rows, columns);
    matrix->one_digit = one_digit;
    std::memcpy(matrix->row_scales(), scales, rows * sizeof(float));
    for_panels(*matrix, [&](const PanelRows& panel) {
        put_int8(*matrix, panel, values + panel.first * columns, columns);
    });
    return matrix;
}

std::unique_ptr<Matrix> pack_int4(const uint8_t* values, const float* scales, const uint8_t* zeros,
                                  int64_t rows, int64_t columns, int64_t group) {
    auto matrix = empty_matrix(Storage::i4, rows, columns, group, zeros != nullptr);
    const int64_t num_groups = matrix->num_groups();
    for_panels(*matrix, [&](const PanelRows& panel) {
        const int64_t first = panel.first * num_groups;
        put_int4(*matrix, panel, values + panel.first * (columns / 2), scales + first,
                 zeros ? zeros + first : nullptr);
    });
    return matrix;
}

std::unique_ptr<Matrix> pack_mxfp4(const uint8_t* values, const uint8_t* scales, int64_t rows,
                                   int64_t columns) {
    auto matrix = empty_matrix(Storage::mxfp4, rows, columns, 32);
    const int64_t num_groups = matrix->num_groups();
    for_panels(*matrix, [&](const PanelRows& panel) {
        put_halves(*matrix, panel, values + panel.first * (columns / 2));
        for (int64_t row = panel.first; row < panel.first + panel.count; ++row)
            for (int64_t group = 0; group < num_groups; ++group)
                group_tail(*matrix, row, group)[row % block_rows] =
                    static_cast<char>(scales[row * num_groups + group]);
    });
    return matrix;
}

std::unique_ptr<Matrix> pack_nvfp4(const uint8_t* values, const float* scales, const float* factors,
                                   int64_t rows, int64_t columns) {
    auto matrix = empty_matrix(Storage::nvfp4, rows, columns, 16);
    const int64_t num_groups = matrix->num_groups();
    for_panels(*matrix, [&](const PanelRows& panel) {
        put_halves(*matrix, panel, values + panel.first * (columns / 2));
        for (int64_t row = panel.first; row < panel.first + panel.count; ++row) {
            put_scales(*matrix, row, scales + row * num_groups, nullptr);
            matrix->row_scales()[row] *= factors[row];
        }
    });
    return matrix;
}

std::unique_ptr<Matrix> select_rows(const Matrix& weight, const int64_t* ids, int64_t count) {
    Matrix form = weight;
    form.rows = count;
    auto matrix = empty_matrix(form);
    for_panels(*matrix, [&](const PanelRows& panel) {
        for (int64_t row = panel.first; row < panel.first + panel.count; ++row)
            copy_row(weight, ids[row], *matrix, row);
    });
    return matrix;
}

}  // namespace slipstream
