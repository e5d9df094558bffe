// Weights in groups times digits in vector instructions: a group's sums are exact, and are folded into
// the rows' values. Compiled for each level.
#pragma once

#include "matmul_integers.h"
#include "matmul_quads.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// A weight's integers are multiplied by as many rows at once as have room for their sums in registers:
// few rows read the packed bytes directly, for many rows these are unpacked first. Sums of digits are
// separate up to the end of a group, since additions to one sum would wait for each other.
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
    static constexpr int lines_of_row = lines_of_digits(digits, true);
    // Of groups that stay in the L1 cache while all parts are multiplied.
    static constexpr int64_t resident_bytes = 16384;
    // Rows and panels whose sums fit into the registers together with the operands: each number of x
    // is loaded once for all of these panels.
#if defined(__AVX2__)
    static constexpr bool may_unpack = takes_words || storage != Storage::g8;
#else
    static constexpr bool may_unpack = false;  // writing would take longer than it saves
#endif
#if defined(__AVX512F__)
    static constexpr int most_rows = 6;
    static constexpr int panels_of(int rows) {
        return rows * digits <= 4 ? 4 : rows * digits <= 12 ? 2 : 1;
    }
#else
    static constexpr int most_rows = takes_words ? 6 / lines_of_row : digits == 3 ? 1 : 2;
    static constexpr int panels_of(int) { return 1; }
#endif

    // ---- unpacked groups: [tile][4 panels][part of a quad][16][4], then scales of the panels -----

    static constexpr int unpacked_panel = shape.columns * panel_rows * int{sizeof(Digit)};
    int64_t unpacked_tiles() const { return block_.tiles * block_panels * unpacked_panel; }
    int64_t unpacked_bytes() const {
        return unpacked_tiles() + block_panels * int64_t{sizeof(GroupScales)};
    }

    static char* store_parts(Quads quads, char* to) {
        store_quads(to, part_of<0>(quads));
        if (quad_parts == 2) store_quads(to + 64, part_of<1>(quads));
        return to + quad_parts * 64;
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
            for (int pair = 0; pair < shape.columns / 8; ++pair) {
                const auto [first, second] = pair_at<storage>(from, pair);
                to = store_parts(first, to);
                to = store_parts(second, to);
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
                I16 sums[R][lines_of_row][panels];
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
                                                    const I16 (&sums)[R][lines_of_row][panels], int p,
                                                    float* values) const {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float* value = values + r * block_rows;
            I16 joined = sums[r][0][p];
            if constexpr (lines_of_row == digits) joined = shift_left<7>(joined) + sums[r][1][p];
            store(value, add_group<storage, digits, zeros>(load(value), joined,
                                                           sums[r][lines_of_row - 1][p], by, x, r));
        }
    }

    // Sums of a group: loops are unrolled to their ends, for only so all of them stay in registers.
    template <int R, int panels, bool unpacked>
    inline __attribute__((always_inline)) void add_tiles(
        const char* from, const Digit* x, I16 (&sums)[R][lines_of_row][panels]) const {
        constexpr int lines = R * lines_of_row;
        constexpr int panel_bytes = unpacked ? unpacked_panel : shape.panel_bytes();
        I16 sum[lines][panels];
#pragma GCC unroll 32
        for (int line = 0; line < lines; ++line)
#pragma GCC unroll 4
            for (int p = 0; p < panels; ++p) sum[line][p] = integers(0);
        for (int64_t tile = 0; tile < block_.tiles; ++tile) {
            if (!unpacked) look_ahead<panels * panel_bytes>(from);
#pragma GCC unroll 4
            for (int pair = 0; pair < shape.columns / 8; ++pair)
                add_pair<lines, panels, unpacked>(from, pair, x + pair * 8, sum);
            x += rows_.lines.count * shape.columns;
            from += block_panels * panel_bytes;
        }
#pragma GCC unroll 32
        for (int line = 0; line < lines; ++line)
#pragma GCC unroll 4
            for (int p = 0; p < panels; ++p)
                sums[line / lines_of_row][line % lines_of_row][p] = sum[line][p];
    }

    // Eight columns.
    template <int lines, int panels, bool unpacked>
    static inline __attribute__((always_inline)) void add_pair(const char* from, int pair,
                                                               const Digit* x,
                                                               I16 (&sum)[lines][panels]) {
        constexpr Storage source = unpacked ? Storage::g8 : storage;
        constexpr int panel_bytes = unpacked ? unpacked_panel : shape.panel_bytes();
        if constexpr (takes_words && unpacked) {
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part)
                add_words<lines>(load_quads(from + pair * 256 + part * 64), x + part * 2, sum);
            return;
        }
        QuadPair quads[panels];
#pragma GCC unroll 4
        for (int p = 0; p < panels; ++p) quads[p] = pair_at<source>(from + p * panel_bytes, pair);
        if constexpr (takes_words) {
            add_words<lines>(part_of<0>(quads[0].first), x, sum);
            add_words<lines>(part_of<1>(quads[0].first), x + 2, sum);
            add_words<lines>(part_of<0>(quads[0].second), x + 4, sum);
            add_words<lines>(part_of<1>(quads[0].second), x + 6, sum);
            return;
        }
#pragma GCC unroll 32
        for (int line = 0; line < lines; ++line, x += shape.columns) {
#pragma GCC unroll 4
            for (int p = 0; p < panels; ++p)
                sum[line][p] = add_part(sum[line][p], quads[p].first, digits_at(x));
#pragma GCC unroll 4
            for (int p = 0; p < panels; ++p)
                sum[line][p] = add_part(sum[line][p], quads[p].second, digits_at(x + 4));
        }
    }

    // Two columns, times all lines: the sums leave no room for more words.
    template <int lines, int panels>
    static inline __attribute__((always_inline)) void add_words(Quads words, const Digit* x,
                                                                I16 (&sum)[lines][panels]) {
#pragma GCC unroll 32
        for (int line = 0; line < lines; ++line)
            sum[line][0] = add_part(sum[line][0], words, digits_at(x + line * shape.columns));
    }

    // The digits of a row in a group's first tile, one after the other; the next row's follow.
    const Digit* digits_of(int64_t group, int64_t row) const {
        const int64_t line = group * block_.tiles * rows_.lines.count + row * lines_of_row;
        return rows_.lines.values + line * shape.columns;
    }

    const GroupedBlock<storage>& block_;
    const RoundedRows& rows_;
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
