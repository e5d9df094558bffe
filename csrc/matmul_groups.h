// Weights in groups times digits in vector instructions: a group's sums are exact, and are folded into
// the rows' values. Compiled for each level.
#pragma once

#include "matmul_integers.h"
#include "matmul_quads.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Rows take a weight's integers straight from their bytes, as many rows at once as have room for
// their sums in registers. Sums of digits stay apart to the end of a group: in one chain they would
// wait for each other.
template <Storage storage, int digits>
class GroupedRows {
  public:
    GroupedRows(const GroupedBlock<storage>& block, const RoundedRows& rows)
        : block_(block), rows_(rows) {}

    // values [count][64] = rows first .. first + count times the block, but for the rows' scales.
    void multiply(int64_t first, int64_t count, float* values) const {
        std::memset(values, 0, count * block_rows * sizeof(float));
        // In parts of nearly one size: one row takes half as long as six. Some groups stay in the first
        // cache while all parts pass.
        const int64_t parts = (count + most_rows - 1) / most_rows;
        const int64_t some = parts > 1 ? 1 + resident_bytes / block_.group_bytes : block_.groups;
        for (int64_t group = 0; group < block_.groups; group += some) {
            const int64_t left = block_.groups - group, end = group + (left < some ? left : some);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t row = count * part / parts, next = count * (part + 1) / parts;
                some_rows(first + row, next - row, group, end, values + row * block_rows);
            }
        }
    }

  private:
    static constexpr TileShape shape = tile_shape(storage);
    static constexpr bool are_small = storage != Storage::g8;  // below 64
    static constexpr int64_t resident_bytes = 16384;
    // Rows whose sums fit into the registers beside what they meet, and panels that they are taken
    // with: each number of x is loaded once for all of these.
#if defined(__AVX512F__)
    static constexpr int most_rows = 6;
    static constexpr int panels_of(int rows) {
        return rows * digits <= 4 ? 4 : rows * digits <= 12 ? 2 : 1;
    }
#else
    static constexpr int most_rows = digits == 3 ? 1 : 2;
    static constexpr int panels_of(int) { return 1; }
#endif

    void some_rows(int64_t row, int64_t count, int64_t group, int64_t end, float* values) const {
        switch (count) {
            case 1: add<1>(row, group, end, values); break;
            case 2: add<most_rows < 2 ? 1 : 2>(row, group, end, values); break;
            case 3: add<most_rows < 3 ? 1 : 3>(row, group, end, values); break;
            case 4: add<most_rows < 4 ? 1 : 4>(row, group, end, values); break;
            case 5: add<most_rows < 5 ? 1 : 5>(row, group, end, values); break;
            case 6: add<most_rows < 6 ? 1 : 6>(row, group, end, values); break;
        }
    }

    // values [R][64] += groups from `group` to `end` of rows row .. row + R.
    template <int R>
    void add(int64_t row, int64_t group, int64_t end, float* values) const {
        constexpr int panels = panels_of(R);
        for (; group < end; ++group) {
            const auto at = block_.at(group);
            const RowGroup x(rows_, row, group);
            look_ahead<block_rows * 2>(at.tail);
            for (int panel = 0; panel < block_panels; panel += panels) {
                I16 sums[R][digits][panels];
                add_tiles<R, panels>(at.tiles + panel * shape.panel_bytes(), digits_of(group, row), sums);
                with_zeros<storage>(block_.zeros, [&](auto zeros) __attribute__((always_inline)) {
#pragma GCC unroll 4
                    for (int p = 0; p < panels; ++p)
                        fold<R, panels, zeros.value>(at, x, sums, panel, p, values);
                });
            }
        }
    }

    template <int R, int panels, Zeros zeros>
    inline __attribute__((always_inline)) void fold(const GroupPlace& at, const RowGroup& x,
                                                    const I16 (&sums)[R][digits][panels], int panel,
                                                    int p, float* values) const {
        const int n = (panel + p) * panel_rows;
        const GroupScales by = block_.template scales<zeros>(at, n);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float* value = values + r * block_rows + n;
            const I16 joined = shift_left<7>(sums[r][0][p]) + sums[r][1][p];
            store(value, add_group<storage, digits, zeros>(load(value), joined,
                                                           sums[r][digits - 1][p], by, x, r));
        }
    }

    // Sums of a group: loops are unrolled to their ends, for only so all of them stay in registers.
    template <int R, int panels>
    inline __attribute__((always_inline)) void add_tiles(const char* from, const int8_t* x,
                                                         I16 (&sums)[R][digits][panels]) const {
        constexpr int lines = R * digits;
        I16 sum[lines][panels];
#pragma GCC unroll 32
        for (int line = 0; line < lines; ++line)
#pragma GCC unroll 4
            for (int p = 0; p < panels; ++p) sum[line][p] = integers(0);
        for (int64_t tile = 0; tile < block_.tiles; ++tile) {
            look_ahead<panels * shape.panel_bytes()>(from);
#pragma GCC unroll 4
            for (int pair = 0; pair < shape.columns / 8; ++pair) {
                QuadPair quads[panels];
#pragma GCC unroll 4
                for (int p = 0; p < panels; ++p)
                    quads[p] = pair_at<storage>(from + p * shape.panel_bytes(), pair);
#pragma GCC unroll 32
                for (int line = 0; line < lines; ++line) {
                    const int8_t* const quad = x + line * shape.columns + pair * 8;
#pragma GCC unroll 4
                    for (int p = 0; p < panels; ++p)
                        sum[line][p] = add_quads<are_small>(sum[line][p], quads[p].first, quad_at(quad));
#pragma GCC unroll 4
                    for (int p = 0; p < panels; ++p)
                        sum[line][p] = add_quads<are_small>(sum[line][p], quads[p].second, quad_at(quad + 4));
                }
            }
            x += rows_.lines.count * shape.columns;
            from += shape.block_bytes();
        }
#pragma GCC unroll 32
        for (int line = 0; line < lines; ++line)
#pragma GCC unroll 4
            for (int p = 0; p < panels; ++p) sums[line / digits][line % digits][p] = sum[line][p];
    }

    // The digits of a row in a group's first tile, one behind the other, and before those of the next
    // row.
    const int8_t* digits_of(int64_t group, int64_t row) const {
        const int64_t line = group * block_.tiles * rows_.lines.count + row * digits;
        return rows_.lines.values + line * shape.columns;
    }

    const GroupedBlock<storage>& block_;
    const RoundedRows& rows_;
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
