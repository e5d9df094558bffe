#include "matmul_blocks.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "float16.h"
#include "matmul_pack.h"
#include "threads.h"

namespace slipstream {
namespace {

// ---- the types: https://github.com/ggml-org/llama.cpp, the structs of ggml/src/ggml-common.h --------

uint16_t half_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    return half;
}

// Thirty-two integers of four bits: the lower halves of 16 bytes, then the upper ones.
void read_halves(const uint8_t* from, int count, uint8_t* to) {
    for (int i = 0; i < count; ++i) {
        to[i] = from[i] & 15;
        to[count + i] = from[i] >> 4;
    }
}

void read_q4_0(const uint8_t* block, BlockNumbers* to) {
    to->scales[0][0] = half_at(block);
    read_halves(block + 2, 16, to->integers);
}

void read_q4_1(const uint8_t* block, BlockNumbers* to) {
    to->scales[0][0] = half_at(block);
    to->scales[1][0] = half_at(block + 2);
    read_halves(block + 4, 16, to->integers);
}

// Fifth bits: those of a word.
void read_fifth(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < 32; ++i) to[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

// Zeros of 32 in place of 16.
void read_q5_0(const uint8_t* block, BlockNumbers* to) {
    to->scales[0][0] = half_at(block);
    read_halves(block + 6, 16, to->integers);
    read_fifth(block + 2, to->integers);
    for (int i = 0; i < 32; ++i) to->integers[i] += 16;
}

void read_q5_1(const uint8_t* block, BlockNumbers* to) {
    to->scales[0][0] = half_at(block);
    to->scales[1][0] = half_at(block + 2);
    read_halves(block + 8, 16, to->integers);
    read_fifth(block + 4, to->integers);
}

void read_q8_0(const uint8_t* block, BlockNumbers* to) {
    to->scales[0][0] = half_at(block);
    for (int i = 0; i < 32; ++i) to->integers[i] = block[2 + i] ^ 0x80;
}

// Scales and minima of eight groups, six bits each; minima are subtracted.
void read_k_scales(const uint8_t* block, BlockNumbers* to) {
    to->factors[0] = half_at(block);
    to->factors[1] = half_at(block + 2) ^ 0x8000;
    const uint8_t* bits = block + 4;
    for (int i = 0; i < 4; ++i) {
        to->scales[0][i] = bits[i] & 63;
        to->scales[1][i] = bits[4 + i] & 63;
        to->scales[0][4 + i] = static_cast<uint16_t>((bits[8 + i] & 15) | bits[i] >> 6 << 4);
        to->scales[1][4 + i] = static_cast<uint16_t>(bits[8 + i] >> 4 | bits[4 + i] >> 6 << 4);
    }
}

void read_q4_k(const uint8_t* block, BlockNumbers* to) {
    read_k_scales(block, to);
    for (int i = 0; i < 4; ++i) read_halves(block + 16 + i * 32, 32, to->integers + i * 64);
}

void read_q5_k(const uint8_t* block, BlockNumbers* to) {
    read_k_scales(block, to);
    for (int i = 0; i < 4; ++i) read_halves(block + 48 + i * 32, 32, to->integers + i * 64);
    for (int group = 0; group < 8; ++group)
        for (int i = 0; i < 32; ++i)
            to->integers[group * 32 + i] |= (block[16 + i] >> group & 1) << 4;
}

void read_q6_k(const uint8_t* block, BlockNumbers* to) {
    for (int half = 0; half < 2; ++half) {
        uint8_t* integers = to->integers + half * 128;
        read_halves(block + half * 64, 64, integers);
        const uint8_t* upper = block + 128 + half * 32;
        for (int part = 0; part < 4; ++part)
            for (int i = 0; i < 32; ++i)
                integers[part * 32 + i] |= (upper[i] >> 2 * part & 3) << 4;
    }
    for (int i = 0; i < 16; ++i)
        to->scales[0][i] = static_cast<uint16_t>(static_cast<int8_t>(block[192 + i]));
    to->factors[0] = half_at(block + 208);
}

constexpr BlockType block_types[] = {
    {"Q4_0", 32, 18, Storage::i4, 32, 8, false, false, read_q4_0},
    {"Q4_1", 32, 20, Storage::i4, 32, 0, true, false, read_q4_1},
    {"Q5_0", 32, 22, Storage::i6, 32, 32, false, false, read_q5_0},
    {"Q5_1", 32, 24, Storage::i6, 32, 0, true, false, read_q5_1},
    {"Q8_0", 32, 34, Storage::g8, 32, 128, false, false, read_q8_0},
    {"Q4_K", 256, 144, Storage::i4, 32, 0, true, true, read_q4_k},
    {"Q5_K", 256, 176, Storage::i6, 32, 0, true, true, read_q5_k},
    {"Q6_K", 256, 210, Storage::i6, 16, 32, false, true, read_q6_k},
};

// ---- into a weight ----------------------------------------------------------------------------

int bits_of(Storage storage) {
    return storage == Storage::i4 ? 4 : storage == Storage::i6 ? 6 : 8;
}

// The form that holds the numbers of all parts; of no rows where there is none.
Matrix common_form(const std::vector<BlockRows>& parts) {
    const BlockType& first = *parts[0].type;
    Matrix form{};
    form.storage = first.storage;
    form.group = first.group;
    form.columns = parts[0].columns();
    form.of_blocks = true;
    for (const BlockRows& part : parts) {
        const BlockType& type = *part.type;
        if (type.has_factors != first.has_factors) return Matrix{};
        if (bits_of(type.storage) > bits_of(form.storage)) form.storage = type.storage;
        form.group = std::min<int64_t>(form.group, type.group);
        form.has_minima = form.has_minima || type.has_minima;
        form.rows += part.rows;
    }
    if (first.has_factors) form.factor_groups = first.columns / form.group;
    return form;
}

// A float16 times a power of two; false where a float16 cannot hold it.
bool scale(uint16_t half, float by, uint16_t* out) {
    const float number = from_float16(half) * by;
    *out = to_float16(number);
    return from_float16(*out) == number;
}

// Numbers of a block as the weight's form has them: the same numbers in other words. False where
// the form has no room for them.
bool fit(const BlockType& type, const Matrix& form, BlockNumbers* numbers) {
    if (form.has_minima && !type.has_minima) {
        // (q - zero) * scale = q * scale - zero * scale, where zeros are powers of two.
        const auto by = static_cast<float>(-type.zero);
        const uint16_t* scales = numbers->scales[0];
        bool fits = true;
        for (int i = 0; i < type.columns / type.group; ++i)
            if (type.has_factors) numbers->scales[1][i] = scales[i];
            else fits = scale(scales[i], by, &numbers->scales[1][i]) && fits;
        if (type.has_factors) fits = scale(numbers->factors[0], by, &numbers->factors[1]);
        return fits;
    } else if (!form.has_minima) {
        const int more = zero_of(form.storage) - type.zero;
        for (int i = 0; more && i < type.columns; ++i)
            numbers->integers[i] = static_cast<uint8_t>(numbers->integers[i] + more);
    }
    return true;
}

// Integers of a tile's columns in a row's lane.
void put_integers(Storage storage, const uint8_t* from, char* lane) {
    constexpr int step = panel_rows * 4;
    const TileShape shape = tile_shape(storage);
    if (storage == Storage::g8) {
        for (int i = 0; i < shape.steps; ++i) std::memcpy(lane + i * step, from + i * 4, 4);
        return;
    }
    uint32_t upper = 0;
    for (int i = 0; i < shape.columns / 8; ++i) {
        uint32_t low, high;
        std::memcpy(&low, from + i * 8, 4);
        std::memcpy(&high, from + i * 8 + 4, 4);
        upper |= (low >> 4 & 0x03030303) << 4 * i | (high >> 4 & 0x03030303) << (4 * i + 2);
        const uint32_t word = (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4;
        std::memcpy(lane + i * step, &word, 4);
    }
    if (storage == Storage::i6) std::memcpy(lane + 2 * step, &upper, 4);
}

void get_integers(Storage storage, const char* lane, uint8_t* to) {
    constexpr int step = panel_rows * 4;
    const TileShape shape = tile_shape(storage);
    if (storage == Storage::g8) {
        for (int i = 0; i < shape.steps; ++i) std::memcpy(to + i * 4, lane + i * step, 4);
        return;
    }
    uint32_t upper = 0;
    if (storage == Storage::i6) std::memcpy(&upper, lane + 2 * step, 4);
    for (int i = 0; i < shape.columns / 8; ++i) {
        uint32_t word;
        std::memcpy(&word, lane + i * step, 4);
        const uint32_t low = (word & 0x0f0f0f0f) | (upper >> 4 * i & 0x03030303) << 4;
        const uint32_t high = (word >> 4 & 0x0f0f0f0f) | (upper >> (4 * i + 2) & 0x03030303) << 4;
        std::memcpy(to + i * 8, &low, 4);
        std::memcpy(to + i * 8 + 4, &high, 4);
    }
}

// A row's blocks into the weight; false where it has no room for their numbers.
bool put_row(const BlockRows& part, int64_t source, const Matrix& matrix, int64_t row) {
    const BlockType& type = *part.type;
    const int64_t place = row % block_rows, tile_columns = tile_shape(matrix.storage).columns;
    const int64_t groups = type.columns / matrix.group, repeats = type.group / matrix.group;
    const int parts = 1 + matrix.has_minima;
    const uint8_t* block = part.blocks + source * part.row_blocks * type.bytes;
    BlockNumbers numbers;
    bool fits = true;
    for (int64_t index = 0; index < part.row_blocks; ++index, block += type.bytes) {
        type.read(block, &numbers);
        fits = fit(type, matrix, &numbers) && fits;
        const int64_t first_tile = index * type.columns / tile_columns;
        for (int64_t tile = 0; tile < type.columns / tile_columns; ++tile)
            put_integers(matrix.storage, numbers.integers + tile * tile_columns,
                         matrix.lane(row, first_tile + tile));
        for (int64_t group = 0; group < groups; ++group) {
            char* tail = group_tail(matrix, row, index * groups + group);
            for (int i = 0; i < parts; ++i) {
                const uint16_t number = numbers.scales[i][group / repeats];
                if (type.has_factors) tail[i * block_rows + place] = static_cast<char>(number ^ 0x80);
                else std::memcpy(tail + (i * block_rows + place) * 2, &number, 2);
            }
        }
        for (int i = 0; type.has_factors && i < parts; ++i)
            matrix.block_factors(row / block_rows)[(index * parts + i) * block_rows + place] =
                numbers.factors[i];
    }
    matrix.row_scales()[row] = 1.0f;
    return fits;
}

// The scale (part 0) or the minimum (1) of a row's group.
float group_number(const Matrix& matrix, int64_t row, int64_t group, int part) {
    const int64_t place = row % block_rows;
    const char* tail = group_tail(matrix, row, group);
    if (!matrix.factor_groups) {
        uint16_t half;
        std::memcpy(&half, tail + (part * block_rows + place) * 2, 2);
        return from_float16(half);
    }
    const int whole = static_cast<uint8_t>(tail[part * block_rows + place]) - 128;
    const int64_t index = group / matrix.factor_groups * (1 + matrix.has_minima) + part;
    return static_cast<float>(whole) *
           from_float16(matrix.block_factors(row / block_rows)[index * block_rows + place]);
}

// Numbers as the types' definition rounds them: this file is compiled without fused additions.
void get_row(const Matrix& matrix, int64_t row, float* to) {
    const int64_t tiles = matrix.tiles_per_group();
    const int columns = tile_shape(matrix.storage).columns, zero = zero_of(matrix.storage);
    uint8_t integers[64];
    for (int64_t tile = 0; tile < matrix.num_tiles(); ++tile, to += columns) {
        get_integers(matrix.storage, matrix.lane(row, tile), integers);
        const float scale = group_number(matrix, row, tile / tiles, 0);
        if (matrix.has_minima) {
            const float minimum = group_number(matrix, row, tile / tiles, 1);
            for (int i = 0; i < columns; ++i)
                to[i] = static_cast<float>(integers[i]) * scale + minimum;
        } else {
            for (int i = 0; i < columns; ++i) to[i] = static_cast<float>(integers[i] - zero) * scale;
        }
    }
}

// To the nearest bfloat16 of a finite number, ties to even.
uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

const BlockType* block_type(const char* name) {
    for (const BlockType& type : block_types)
        if (!std::strcmp(type.name, name)) return &type;
    return nullptr;
}

std::unique_ptr<Matrix> pack_blocks(const std::vector<BlockRows>& parts) {
    const Matrix form = common_form(parts);
    if (!form.rows) return nullptr;
    auto matrix = empty_matrix(form);
    std::atomic<bool> fits = true;
    for_panels(*matrix, [&](const PanelRows& panel) {
        size_t index = 0;
        int64_t start = 0;
        for (int64_t row = panel.first; row < panel.first + panel.count; ++row) {
            while (row >= start + parts[index].rows) start += parts[index++].rows;
            if (!put_row(parts[index], row - start, *matrix, row)) fits = false;
        }
    });
    return fits ? std::move(matrix) : nullptr;
}

void look_up_blocks(const Matrix& table, const int64_t* ids, int64_t count, void* out,
                    bool is_bf16) {
    const int64_t columns = table.columns;
    parallel_for(count, [&](int64_t index) {
        if (!is_bf16) {
            get_row(table, ids[index], static_cast<float*>(out) + index * columns);
            return;
        }
        auto* row = static_cast<float*>(scratch(Scratch::values, columns * sizeof(float)));
        get_row(table, ids[index], row);
        uint16_t* to = static_cast<uint16_t*>(out) + index * columns;
        for (int64_t i = 0; i < columns; ++i) to[i] = to_bf16(row[i]);
    });
}

}  // namespace slipstream
