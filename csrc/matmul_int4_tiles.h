// Four-bit weights in the matrix unit, which takes bytes: groups are unpacked one by one.
#pragma once

#include "matmul_integers.h"
#include "matmul_tiles.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// So many lines are done sooner by `Int4Rows`.
constexpr int64_t most_direct_lines = 10;

template <int digits>
class Int4Tiles {
  public:
    Int4Tiles(const Int4Block& block, const Rounded& rows, ProductUnit& unit)
        : block_(block), rows_(rows), unit_(unit) {}

    // values [count][64] = rows first .. first + count times the block, but for the rows' scales.
    // A group is unpacked while the one before it is multiplied, and folded into the values a group
    // later: what was just stored cannot be loaded as a tile, or from one, before it is in the cache.
    void multiply(int64_t first, int64_t count, float* values) const {
        const int64_t lines = count * digits, part_size = (lines + spare_lines) * block_rows;
        const int64_t tiles = block_.tiles * 32 / rows_.lines.depth;
        const int64_t bytes = block_.tiles * 32 * block_rows;
        auto* unpacked = static_cast<uint8_t*>(scratch(Scratch::weights, 2 * bytes));
        auto* sums = sums_of<int32_t>(2 * part_size / block_rows);
        unpack(0, unpacked);
        for (int64_t group = 0; group < block_.groups; ++group) {
            const int64_t here = group % 2, other = 1 - here;
            if (group + 1 < block_.groups) unpack(group + 1, unpacked + other * bytes);
            unit_.multiply(rows_.lines, first * digits, lines, group * tiles,
                           unpacked + here * bytes, tiles, sums + here * part_size);
            if (group) fold(group - 1, sums + other * part_size, first, count, values);
        }
        fold(block_.groups - 1, sums + (block_.groups - 1) % 2 * part_size, first, count, values);
    }

  private:
    // A group as bytes: [tile of the lines' depth][4 panels][steps of 4 columns][16][4].
    void unpack(int64_t group, uint8_t* to) const {
        const int halves = rows_.lines.depth / 32;
        const __m512i low = _mm512_set1_epi8(15);
        look_ahead<block_rows * 2>(block_.group(group) + block_.tail);
        for (int64_t tile = 0; tile < block_.tiles; tile += halves)
            for (int panel = 0; panel < block_panels; ++panel)
                for (int half = 0; half < halves; ++half) {
                    const char* from = block_.tile(group, tile + half, panel);
                    look_ahead<256>(from);
                    for (int step = 0; step < 4; ++step, from += 64, to += 128) {
                        const __m512i both = _mm512_loadu_si512(from);
                        _mm512_storeu_si512(to, _mm512_and_si512(both, low));
                        _mm512_storeu_si512(to + 64,
                                            _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
                    }
                }
    }

    // values [count][64] += scale * (sums - zero * sum of x) of a group, whose sums are
    // [count][digits][64].
    void fold(int64_t group, const int32_t* sums, int64_t first, int64_t count,
              float* values) const {
        for (int n = 0; n < block_rows; n += lanes) {
            const F16 scales = block_.scales(group, n);
            const GroupZeros zeros = block_.zeros(group, n);
            for (int64_t row = 0; row < count; ++row) {
                const int32_t* of = sums + row * digits * block_rows + n;
                const F16 joined =
                    join_group<digits>(load(of), load(of + (digits > 1) * block_rows),
                                       load(of + (digits - 1) * block_rows), zeros, rows_,
                                       first + row, group);
                float* value = values + row * block_rows + n;
                store(value, fma(scales, joined, group ? load(value) : zero()));
            }
        }
    }

    const Int4Block& block_;
    const Rounded& rows_;
    ProductUnit& unit_;
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
