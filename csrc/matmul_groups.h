// Weights in groups times digits in vector instructions: a group's sums are exact, and are folded into
// the rows' values. Compiled for each level.
#pragma once

#include "matmul_integers.h"
#include "matmul_quads.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// As many rows at once as have room for their sums in registers take a weight's integers: few rows
// straight from their bytes, many once these are unpacked. Sums of digits stay apart to the end of a
// group: in one chain they would wait for each other.
template <Storage storage, int digits>
class GroupedRows {
  public:
    GroupedRows(const GroupedBlock<storage>& block, const RoundedRows& rows)
        : block_(block), rows_(rows) {}

    // values [count][64] = rows first .. first + count times the block, but for the rows' scales.
    void multiply(int64_t first, int64_t count, float* values) const {
        std::memset(values, 0, count * block_rows * sizeof(float));
        // In parts of nearly one size: one row takes half as long as six.
        const int64_t parts = (count + most_rows - 1) / most_rows;
        const bool unpacks = parts > 2 && may_unpack;
        const int64_t bytes = unpacks ? unpacked_bytes() : block_.group_bytes;
        const int64_t some = parts > 1 ? 1 + resident_bytes / bytes : block_.groups;
        char* memory = nullptr;
        if (unpacks) memory = static_cast<char*>(scratch(Scratch::weights, some * bytes));
        for (int64_t group = 0; group < block_.groups; group += some) {
            const int64_t left = block_.groups - group, end = group + (left < some ? left : some);
            for (int64_t one = group; unpacks && one < end; ++one)
                unpack(one, memory + (one - group) * bytes);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t row = count * part / parts, next = count * (part + 1) / parts;
                float* to = values + row * block_rows;
                if (unpacks) some_rows<true>(first + row, next - row, group, end, memory, to);
                else some_rows<false>(first + row, next - row, group, end, nullptr, to);
            }
        }
    }

  private:
    static constexpr TileShape shape = tile_shape(storage);
    static constexpr bool are_small = storage != Storage::g8;  // below 64
    // Of groups that stay in the first cache while all parts pass.
    static constexpr int64_t resident_bytes = 16384;
    // Rows whose sums fit into the registers beside what they meet, and panels that they are taken
    // with: each number of x is loaded once for all of these.
#if defined(__AVX2__)
    static constexpr bool may_unpack = storage != Storage::g8;
#else
    static constexpr bool may_unpack = false;  // what is written takes longer than what it saves
#endif
#if defined(__AVX512F__)
    static constexpr int most_rows = 6;
    static constexpr int panels_of(int rows) {
        return rows * digits <= 4 ? 4 : rows * digits <= 12 ? 2 : 1;
    }
#else
    static constexpr int most_rows = digits == 3 ? 1 : 2;
    static constexpr int panels_of(int) { return 1; }
#endif

    // ---- unpacked groups: [tile][4 panels][columns / 4][16][4], then scales of the panels -------

    static constexpr int unpacked_panel = shape.columns * panel_rows;
    int64_t unpacked_tiles() const { return block_.tiles * block_panels * unpacked_panel; }
    int64_t unpacked_bytes() const {
        return unpacked_tiles() + block_panels * int64_t{sizeof(GroupScales)};
    }

    void unpack(int64_t group, char* to) const {
        const auto at = block_.at(group);
        look_ahead<block_rows * 4>(at.tail);
        auto* scales = reinterpret_cast<GroupScales*>(to + unpacked_tiles());
        with_zeros<storage>(block_.zeros, [&](auto zeros) {
            for (int panel = 0; panel < block_panels; ++panel)
                scales[panel] = block_.template scales<zeros.value>(at, panel * panel_rows);
        });
        for (int64_t panel = 0; panel < block_.tiles * block_panels; ++panel) {
            const char* from = at.tiles + panel * shape.panel_bytes();
            look_ahead<shape.panel_bytes()>(from);
            for (int pair = 0; pair < shape.columns / 8; ++pair, to += 128) {
                const auto [first, second] = pair_at<storage>(from, pair);
                store_quads(to, first);
                store_quads(to + 64, second);
            }
        }
    }

    // ---- products -------------------------------------------------------------------------------

    template <bool unpacked>
    void some_rows(int64_t row, int64_t count, int64_t group, int64_t end, const char* memory,
                   float* values) const {
        const auto add = [&](auto rows) {
            this->add<rows.value, unpacked>(row, group, end, memory, values);
        };
        switch (count) {
            case 1: add(Rows<1>{}); break;
            case 2: add(Rows<2>{}); break;
            case 3: add(Rows<3>{}); break;
            case 4: add(Rows<4>{}); break;
            case 5: add(Rows<5>{}); break;
            case 6: add(Rows<6>{}); break;
        }
    }

    // So many rows, or the most that there may be.
    template <int count>
    struct Rows {
        static constexpr int value = count < most_rows ? count : most_rows;
    };

    // values [R][64] += groups from `group` to `end` of rows row .. row + R; `memory` has these groups
    // if they are unpacked.
    template <int R, bool unpacked>
    void add(int64_t row, int64_t group, int64_t end, const char* memory, float* values) const {
        constexpr int panels = panels_of(R);
        constexpr int panel_bytes = unpacked ? unpacked_panel : shape.panel_bytes();
        for (; group < end; ++group) {
            const auto at = block_.at(group);
            const RowGroup x(rows_, row, group);
            const char* tiles = unpacked ? memory : at.tiles;
            const auto* scales =
                reinterpret_cast<const GroupScales*>(memory + (unpacked ? unpacked_tiles() : 0));
            if (unpacked) memory += unpacked_bytes();
            else look_ahead<block_rows * 4>(at.tail);
            for (int panel = 0; panel < block_panels; panel += panels) {
                I16 sums[R][digits][panels];
                add_tiles<R, panels, unpacked>(tiles + panel * panel_bytes, digits_of(group, row),
                                               sums);
                with_zeros<storage>(block_.zeros, [&](auto zeros) __attribute__((always_inline)) {
#pragma GCC unroll 4
                    for (int p = 0; p < panels; ++p) {
                        const int n = (panel + p) * panel_rows;
                        fold<R, panels, zeros.value>(
                            unpacked ? scales[panel + p] : block_.template scales<zeros.value>(at, n),
                            x, sums, p, values + n);
                    }
                });
            }
        }
    }

    template <int R, int panels, Zeros zeros>
    inline __attribute__((always_inline)) void fold(const GroupScales& by, const RowGroup& x,
                                                    const I16 (&sums)[R][digits][panels], int p,
                                                    float* values) const {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float* value = values + r * block_rows;
            const I16 joined = shift_left<7>(sums[r][0][p]) + sums[r][1][p];
            store(value, add_group<storage, digits, zeros>(load(value), joined,
                                                           sums[r][digits - 1][p], by, x, r));
        }
    }

    // Sums of a group: loops are unrolled to their ends, for only so all of them stay in registers.
    template <int R, int panels, bool unpacked>
    inline __attribute__((always_inline)) void add_tiles(const char* from, const int8_t* x,
                                                         I16 (&sums)[R][digits][panels]) const {
        constexpr int lines = R * digits;
        constexpr Storage source = unpacked ? Storage::g8 : storage;
        constexpr int panel_bytes = unpacked ? unpacked_panel : shape.panel_bytes();
        I16 sum[lines][panels];
#pragma GCC unroll 32
        for (int line = 0; line < lines; ++line)
#pragma GCC unroll 4
            for (int p = 0; p < panels; ++p) sum[line][p] = integers(0);
        for (int64_t tile = 0; tile < block_.tiles; ++tile) {
            if (!unpacked) look_ahead<panels * panel_bytes>(from);
#pragma GCC unroll 4
            for (int pair = 0; pair < shape.columns / 8; ++pair) {
                QuadPair quads[panels];
#pragma GCC unroll 4
                for (int p = 0; p < panels; ++p)
                    quads[p] = pair_at<source>(from + p * panel_bytes, pair);
#pragma GCC unroll 32
                for (int line = 0; line < lines; ++line) {
                    const int8_t* const quad = x + line * shape.columns + pair * 8;
#pragma GCC unroll 4
                    for (int p = 0; p < panels; ++p)
                        sum[line][p] =
                            add_quads<are_small>(sum[line][p], quads[p].first, quad_at(quad));
#pragma GCC unroll 4
                    for (int p = 0; p < panels; ++p)
                        sum[line][p] =
                            add_quads<are_small>(sum[line][p], quads[p].second, quad_at(quad + 4));
                }
            }
            x += rows_.lines.count * shape.columns;
            from += block_panels * panel_bytes;
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
