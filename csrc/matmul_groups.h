// Weights in groups times digits in vector instructions: a group's sums are exact, and are folded into
// the rows' values. Compiled for each level.
#pragma once

#include "matmul_integers.h"
#include "matmul_quads.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Few rows wait for the weights, and take them straight from their bytes. Many wait for the products:
// a group is unpacked once for all of them, and as many sums as there is room for stay in registers.
template <Storage storage, int digits>
class GroupedRows {
  public:
    GroupedRows(const GroupedBlock<storage>& block, const RoundedRows& rows)
        : block_(block), rows_(rows) {}

    // values [count][64] = rows first .. first + count times the block, but for the rows' scales.
    void multiply(int64_t first, int64_t count, float* values) const {
        if (count <= most_direct || !unpacks) {
            for (int64_t group = 0; group < block_.groups; ++group)
                for (int64_t row = 0; row < count; row += most_direct)
                    direct(group, first + row, count - row, values + row * block_rows);
            return;
        }
        auto* memory = static_cast<uint8_t*>(
            scratch(Scratch::weights, block_.tiles * tile_bytes));
        for (int64_t row = 0; row < count; row += resident_rows) {
            const int64_t left = count - row, some = left < resident_rows ? left : resident_rows;
            for (int64_t group = 0; group < block_.groups; ++group) {
                const Unpacked unpacked(block_, group, memory);
                for (int64_t done = 0; done < some; done += most_rows)
                    some_rows(unpacked, first + row + done, some - done,
                              values + (row + done) * block_rows);
            }
        }
    }

  private:
    static constexpr TileShape shape = tile_shape(storage);
    static constexpr int quad_bytes = panel_rows * 4, tile_bytes = shape.columns * block_rows;
    static constexpr bool are_small = storage != Storage::g8;  // below 64

#if defined(__AVX2__)
    static constexpr bool unpacks = true;
#else
    static constexpr bool unpacks = false;  // what is written takes longer than what it saves
#endif
    // Rows whose values stay in the first cache while groups pass.
    static constexpr int64_t resident_rows = 64;
    // Rows whose sums fit into the registers beside what they meet, and panels that they are taken
    // with: each number of x is loaded once for all of these.
#if defined(__AVX512F__)
    static constexpr int most_rows = digits == 3 ? 4 : 8;
    static constexpr int most_direct = digits == 3 ? 1 : 3;
    static constexpr int direct_panels(int rows) { return rows * digits <= 4 ? 4 : 2; }
    static constexpr int panels_of(int rows) { return rows * (digits == 3 ? 2 : 1) <= 4 ? 4 : 2; }
#else
    static constexpr int most_rows = digits == 3 ? 2 : 4;
    static constexpr int most_direct = 4 - digits;
    static constexpr int direct_panels(int) { return 1; }
    static constexpr int panels_of(int) { return 1; }
#endif

    // ---- few rows -----------------------------------------------------------------------------

    void direct(int64_t group, int64_t row, int64_t count, float* values) const {
        look_ahead<block_rows * 2>(block_.group(group) + block_.tail);
        switch (count < most_direct ? count : most_direct) {
            case 1: add_direct<1>(group, row, values); break;
            case 2: add_direct<most_direct < 2 ? 1 : 2>(group, row, values); break;
            case 3: add_direct<most_direct < 3 ? 1 : 3>(group, row, values); break;
        }
    }

    // values [R][64] += a group of rows row .. row + R.
    template <int R>
    void add_direct(int64_t group, int64_t row, float* values) const {
        for (int panel = 0; panel < block_panels; panel += direct_panels(R))
            add_direct_panels<R>(group, row, panel, values + panel * panel_rows);
    }

    template <int R>
    void add_direct_panels(int64_t group, int64_t row, int panel, float* values) const {
        constexpr int num_lines = R * digits, panels = direct_panels(R);
        I16 sums[num_lines][panels];
        for (int line = 0; line < num_lines; ++line)
            for (int p = 0; p < panels; ++p) sums[line][p] = integers(0);
        for (int64_t tile = 0; tile < block_.tiles; ++tile) {
            const int8_t* x = tile_of(group * block_.tiles + tile, row);
            const char* from = block_.tile(group, tile, panel);
            look_ahead<panels * shape.panel_bytes()>(from);
#if !defined(__AVX512F__)
#pragma GCC unroll 1  // registers are too few for more
#endif
            for (int pair = 0; pair < shape.columns / 8; ++pair)
                for (int p = 0; p < panels; ++p) {
                    const auto [first, second] =
                        pair_at<storage>(from + p * shape.panel_bytes(), pair);
                    for (int line = 0; line < num_lines; ++line) {
                        const int8_t* quads = x + line * shape.columns + pair * 8;
                        sums[line][p] = add_quads<are_small>(sums[line][p], first, quad_at(quads));
                        sums[line][p] =
                            add_quads<are_small>(sums[line][p], second, quad_at(quads + 4));
                    }
                }
        }
        for (int p = 0; p < panels; ++p) {
            const int n = p * panel_rows;
            const GroupScales scales = block_.scales(group, panel * panel_rows + n);
            for (int r = 0; r < R; ++r) {
                const int line = r * digits;
                I16 joined = sums[line][p];
                if constexpr (digits > 1) joined = shift_left<7>(joined) + sums[line + 1][p];
                fold(group, row + r, joined, sums[line + digits - 1][p], scales,
                     values + r * block_rows + n);
            }
        }
    }

    // ---- many rows ----------------------------------------------------------------------------

    // Bytes are multiplied where they are. Others are unpacked: [tile][columns / 4][4 panels][16][4].
    static constexpr bool stay = storage == Storage::g8;
    static constexpr int panel_step = stay ? shape.panel_bytes() : quad_bytes;
    static constexpr int quad_step = stay ? quad_bytes : block_panels * quad_bytes;

    struct Unpacked {
        int64_t group;
        const uint8_t* weights;
        GroupScales scales[block_panels];

        Unpacked(const GroupedBlock<storage>& block, int64_t index, uint8_t* memory)
            : group(index), weights(memory),
              scales{block.scales(index, 0), block.scales(index, 16), block.scales(index, 32),
                     block.scales(index, 48)} {
            look_ahead<block_rows * 2>(block.group(group) + block.tail);
            if constexpr (stay) weights = reinterpret_cast<const uint8_t*>(block.group(group));
            for (int64_t tile = 0; tile < block.tiles; ++tile)
                for (int panel = 0; panel < block_panels; ++panel) {
                    const char* from = block.tile(group, tile, panel);
                    look_ahead<shape.panel_bytes()>(from);
                    uint8_t* to = memory + tile * tile_bytes + panel * panel_step;
                    for (int pair = 0; !stay && pair < shape.columns / 8; ++pair) {
                        const auto [first, second] = pair_at<storage>(from, pair);
                        store_quads(to + pair * 2 * quad_step, first);
                        store_quads(to + (pair * 2 + 1) * quad_step, second);
                    }
                }
        }
    };

    void some_rows(const Unpacked& group, int64_t row, int64_t count, float* values) const {
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
    void add(const Unpacked& group, int64_t row, float* values) const {
        for (int panel = 0; panel < block_panels; panel += panels_of(R)) {
            float* to = values + panel * panel_rows;
            if (block_.tiles == 1) add_panels<R, true>(group, row, panel, to);
            else add_panels<R, false>(group, row, panel, to);
        }
    }

    // With `is_tile` a group is one tile: without a loop the compiler keeps all sums where they are.
    template <int R, bool is_tile>
    void add_panels(const Unpacked& group, int64_t row, int panel, float* values) const {
        constexpr int panels = panels_of(R);
        const int64_t tiles = is_tile ? 1 : block_.tiles;
        I16 sums[R][panels], joined[R][panels];
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < panels; ++p) sums[r][p] = integers(0);
        // Sums go on from those of the digit before, a place higher, so that two need one register.
#pragma GCC unroll 3
        for (int digit = 0; digit < digits; ++digit) {
            for (int r = 0; digit && r < R; ++r)
                for (int p = 0; p < panels; ++p) {
                    joined[r][p] = sums[r][p];
                    sums[r][p] = digit == 1 ? shift_left<7>(sums[r][p]) : integers(0);
                }
            for (int64_t tile = 0; tile < tiles; ++tile) {
                const int8_t* x = tile_of(group.group * tiles + tile, row) + digit * shape.columns;
                const uint8_t* w = group.weights + tile * tile_bytes + panel * panel_step;
#pragma GCC unroll 8
                for (int k = 0; k < shape.columns; k += 4) {
                    Quads quads[panels];
                    for (int p = 0; p < panels; ++p)
                        quads[p] = load_quads(w + k / 4 * quad_step + p * panel_step);
                    for (int r = 0; r < R; ++r) {
                        const int32_t quad = quad_at(x + r * digits * shape.columns + k);
                        for (int p = 0; p < panels; ++p)
                            sums[r][p] = add_quads<are_small>(sums[r][p], quads[p], quad);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < panels; ++p)
            for (int r = 0; r < R; ++r)
                fold(group.group, row + r, digits < 3 ? sums[r][p] : joined[r][p], sums[r][p],
                     group.scales[panel + p], values + r * block_rows + p * panel_rows);
    }

    // ---- both ---------------------------------------------------------------------------------

    // The digits of a row in a tile, one behind the other, and before those of the next row.
    const int8_t* tile_of(int64_t tile, int64_t row) const {
        return rows_.lines.values + (tile * rows_.lines.count + row * digits) * shape.columns;
    }

    void fold(int64_t group, int64_t row, I16 joined, I16 last, const GroupScales& scales,
              float* values) const {
        store(values, add_group<storage, digits>(group ? load(values) : zero(), joined, last, scales,
                                                 rows_, row, group));
    }

    const GroupedBlock<storage>& block_;
    const RoundedRows& rows_;
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
