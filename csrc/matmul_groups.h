// Weights in groups times digits in vector instructions, straight from their bytes: a group's sums are
// folded into the rows' values in registers. Compiled for each level.
#pragma once

#include "matmul_integers.h"
#include "matmul_quads.h"

namespace slipstream::SLIPSTREAM_LEVEL {

template <Storage storage, int digits>
class GroupedRows {
  public:
    GroupedRows(const GroupedBlock<storage>& block, const RoundedRows& rows)
        : block_(block), rows_(rows), is_deep_(rows.lines.depth == 64),
          line_step_(in_tiles ? rows.lines.depth : rows.lines.columns),
          tile_step_(in_tiles ? rows.lines.count * rows.lines.depth : rows.lines.depth) {}

    // values [count][64] = rows first .. first + count times the block, but for the rows' scales.
    void multiply(int64_t first, int64_t count, float* values) const {
        for (int64_t group = 0; group < block_.groups; ++group) {
            look_ahead<block_rows * 2>(block_.group(group) + block_.tail);
            for (int64_t row = 0; row < count; row += most_rows)
                some_rows(group, first + row, count - row, values + row * block_rows);
        }
    }

  private:
    static constexpr TileShape shape = tile_shape(storage);
    static constexpr bool are_small = storage != Storage::g8;  // below 64

    // Rows whose sums, of each digit, fit into the registers beside what they meet, and panels that
    // they are taken with. Each number of x is loaded once for all of these panels, and many rows
    // wait for that rather than for weights, which are taken apart once more for the next rows.
#if defined(__AVX512F__)
    static constexpr int most_rows = digits == 1 ? 8 : digits == 2 ? 3 : 4;
    static constexpr int panels_of(int rows) { return rows * digits <= 4 ? 4 : rows * digits <= 6 ? 2 : 1; }
#else
    static constexpr int most_rows = digits == 1 ? 4 : digits == 2 ? 2 : 1;
    static constexpr int panels_of(int) { return 1; }
#endif

    void some_rows(int64_t group, int64_t row, int64_t count, float* values) const {
        switch (count < most_rows ? count : most_rows) {
            case 1: add<1>(group, row, values); break;
            case 2: add<2>(group, row, values); break;
            case 3: add<most_rows < 3 ? 1 : 3>(group, row, values); break;
            case 4: add<most_rows < 4 ? 1 : 4>(group, row, values); break;
            case 5: add<most_rows < 5 ? 1 : 5>(group, row, values); break;
            case 6: add<most_rows < 6 ? 1 : 6>(group, row, values); break;
            case 7: add<most_rows < 7 ? 1 : 7>(group, row, values); break;
            case 8: add<most_rows < 8 ? 1 : 8>(group, row, values); break;
        }
    }

    // values [R][64] += a group of rows row .. row + R.
    template <int R>
    void add(int64_t group, int64_t row, float* values) const {
        for (int panel = 0; panel < block_panels; panel += panels_of(R))
            add_panels<R>(group, row, panel, values + panel * panel_rows);
    }

    template <int R>
    void add_panels(int64_t group, int64_t row, int panel, float* values) const {
        constexpr int num_lines = R * digits, panels = panels_of(R);
        I16 sums[num_lines][panels];
        for (int line = 0; line < num_lines; ++line)
            for (int p = 0; p < panels; ++p) sums[line][p] = integers(0);
        for (int64_t tile = 0; tile < block_.tiles; ++tile) {
            const int8_t* x = line_at(row * digits, group * block_.tiles + tile);
            const char* from = block_.tile(group, tile, panel);
            // What the first rows asked for is there for the others.
            look_ahead<panels * shape.panel_bytes()>(from);
            for (int pair = 0; pair < shape.columns / 8; ++pair)
                for (int p = 0; p < panels; ++p) {
                    const auto [first, second] =
                        pair_at<storage>(from + p * shape.panel_bytes(), pair);
                    for (int line = 0; line < num_lines; ++line) {
                        const int8_t* quads = x + line * line_step_ + pair * 8;
                        sums[line][p] = add_quads<are_small>(sums[line][p], first, quad_at(quads));
                        sums[line][p] =
                            add_quads<are_small>(sums[line][p], second, quad_at(quads + 4));
                    }
                }
        }
        for (int p = 0; p < panels; ++p) {
            const int n = p * panel_rows, in_block = panel * panel_rows + n;
            const GroupScales scales = block_.scales(group, in_block);
            for (int r = 0; r < R; ++r) {
                const int line = r * digits;
                float* value = values + r * block_rows + n;
                store(value, add_group<storage, digits>(
                                 group ? load(value) : zero(), sums[line][p],
                                 sums[line + (digits > 1)][p], sums[line + digits - 1][p], scales,
                                 rows_, row + r, group));
            }
        }
    }

    // Where a tile of a line begins; where tiles of the line have two of the weight, in tiles of the matrix unit, of the first 16 lines.
    const int8_t* line_at(int64_t line, int64_t tile) const {
        const int64_t column = is_deep_ ? (tile >> 1) * tile_step_ + (tile & 1) * 32
                                        : tile * tile_step_;
        return rows_.lines.values + line * line_step_ + column;
    }

    const GroupedBlock<storage>& block_;
    const RoundedRows& rows_;
    const bool is_deep_;
    const int64_t line_step_, tile_step_;
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
