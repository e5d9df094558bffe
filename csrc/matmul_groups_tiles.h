// Weights in groups in the matrix unit, which takes bytes: groups are unpacked one by one.
#pragma once

#include "matmul_integers.h"
#include "matmul_tiles.h"

namespace slipstream::SLIPSTREAM_LEVEL {

template <Storage storage, int digits>
class GroupedTiles {
  public:
    GroupedTiles(const GroupedBlock<storage>& block, const RoundedRows& rows, ProductUnit& unit)
        : block_(block), rows_(rows), unit_(unit) {}

    // values [count][64] = rows first .. first + count times the block, but for the rows' scales.
    // A group is unpacked while the one before it is multiplied, and what comes of some lines is
    // folded into the values while the next are multiplied: what was just stored cannot be loaded as
    // a tile, or from one, before it is in the cache.
    void multiply(int64_t first, int64_t count, float* values) const {
        const int64_t tiles = block_.tiles * shape.columns / rows_.lines.depth;
        const int64_t bytes = block_.tiles * shape.columns * block_rows;
        auto* unpacked = static_cast<uint8_t*>(scratch(Scratch::weights, 2 * bytes));
        constexpr int64_t part_size = (rows_at_once * digits + spare_lines) * block_rows;
        auto* sums = sums_of<int32_t>(2 * part_size / block_rows);
        Part last = {};
        unpack(0, unpacked);
        for (int64_t group = 0, turn = 0; group < block_.groups; ++group) {
            if (group + 1 < block_.groups) unpack(group + 1, unpacked + (group + 1) % 2 * bytes);
            for (int64_t row = 0; row < count; row += rows_at_once, ++turn) {
                const int64_t left = count - row, some = left < rows_at_once ? left : rows_at_once;
                const Part part = {group, first + row, some, sums + turn % 2 * part_size,
                                   values + row * block_rows};
                unit_.multiply(rows_.lines, part.first * digits, some * digits, group * tiles,
                               unpacked + group % 2 * bytes, tiles, part.sums);
                if (turn) fold(last);
                last = part;
            }
        }
        fold(last);
    }

  private:
    static constexpr TileShape shape = tile_shape(storage);

    // Of whole tiles of lines, whose sums stay in the first cache.
    static constexpr int64_t rows_at_once = digits == 2 ? 16 : 32;

    // Rows first .. first + count times a group: sums [count][digits][64], to be added to `values`.
    struct Part {
        int64_t group, first, count;
        int32_t* sums;
        float* values;
    };

    // A group as bytes: [tile of the lines' depth][4 panels][steps of 4 columns][16][4].
    void unpack(int64_t group, uint8_t* to) const {
        const int halves = rows_.lines.depth / shape.columns;
        const GroupPlace at = block_.at(group);
        look_ahead<block_rows * 4>(at.tail);
        block_.for_tiles(at, halves, [&](const char* from) __attribute__((always_inline)) {
            look_ahead<shape.panel_bytes()>(from);
            for (int pair = 0; pair < shape.columns / 8; ++pair, to += 128) {
                const auto [first, second] = pair_at<storage>(from, pair);
                _mm512_storeu_si512(to, first.v);
                _mm512_storeu_si512(to + 64, second.v);
            }
        });
    }

    // values += scale * (sums - zero * sum of x), or + minimum * sum of x.
    void fold(const Part& part) const {
        const GroupPlace at = block_.at(part.group);
        const RowGroup x(rows_, part.first, part.group);
        with_zeros<storage>(block_.zeros, [&](auto zeros) {
            for (int n = 0; n < block_rows; n += lanes) {
                const GroupScales by = block_.template scales<zeros.value>(at, n);
                for (int64_t row = 0; row < part.count; ++row) {
                    const int32_t* of = part.sums + row * digits * block_rows + n;
                    float* value = part.values + row * block_rows + n;
                    const I16 joined = shift_left<7>(load(of)) + load(of + block_rows);
                    store(value, add_group<storage, digits, zeros.value>(
                                     part.group ? load(value) : zero(), joined,
                                     load(of + (digits - 1) * block_rows), by, x, row));
                }
            }
        });
    }

    const GroupedBlock<storage>& block_;
    const RoundedRows& rows_;
    ProductUnit& unit_;
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
