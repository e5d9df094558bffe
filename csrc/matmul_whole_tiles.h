// Weights in small groups times whole numbers in the matrix unit. Compiled for the level that has one.
#pragma once

#include "matmul_integers.h"
#include "matmul_tiles.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Sixteen rows' sums of a group and a panel are one tile: integers of up to 24 bits, which a float32
// holds, so they have the bits that `GroupedRows` and `GroupedTiles` get with digits. A tile is folded
// into the rows' values, which stay in registers over four groups.
template <Storage storage>
class WholeTiles {
  public:
    WholeTiles(const GroupedBlock<storage>& block, const WholeRows& rows, ProductUnit& unit)
        : block_(block), rows_(rows), unit_(unit), depth_(rows.lines.depth),
          panel_numbers_(depth_ * panel_rows) {
        const int64_t bytes = 2 * chunk_numbers() * int64_t{sizeof(bf16)};
        char* memory = static_cast<char*>(
            scratch(Scratch::weights, bytes + 3 * chunk_groups * block_panels * sizeof(Numbers)));
        integers_ = reinterpret_cast<bf16*>(memory);
        numbers_ = reinterpret_cast<Numbers*>(memory + bytes);
        fill_table();
    }

    // values [count][64] = rows first .. first + count times the block, but for the rows' scales; whole
    // tiles are written. What was just stored cannot be loaded as a tile, or from one, before it is in
    // the cache: so groups are unpacked while those before them are multiplied, and sums are folded
    // while the next are added up.
    void multiply(int64_t first, int64_t count, float* values) {
        float* sums = sums_of<float>(2 * part_numbers / block_rows);
        const int64_t chunks = (block_.groups + chunk_groups - 1) / chunk_groups;
        Part last = {};
        int64_t turn = 0;
        unpack(0);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            if (chunk + 1 < chunks) unpack(chunk + 1);
            for (int64_t row = 0; row < count; row += 16)
                for (int panel = 0; panel < block_panels; ++panel, ++turn) {
                    const int64_t some = rows_.lines.together(first + row);
                    const Part part = {chunk, first + row, static_cast<int>(some), panel,
                                       sums + turn % 2 * part_numbers,
                                       values + row * block_rows + panel * panel_rows};
                    sum(part);
                    if (turn) fold(last);
                    last = part;
                }
        }
        fold(last);
    }

  private:
    static constexpr TileShape shape = tile_shape(storage);
    static constexpr bool has_four_bits = storage == Storage::i4 || is_e2m1(storage);
    // Groups that are unpacked together: one for each tile that sums have.
    static constexpr int chunk_groups = 4;
    int64_t chunk_numbers() const { return chunk_groups * block_panels * panel_numbers_; }

    // What groups have for 16 rows of the weight.
    struct alignas(64) Numbers {
        float scales[panel_rows], zeros[panel_rows], minima[panel_rows];
    };

    // Four groups or fewer of sixteen rows times a panel: sums [group][16][16], to be added to `values`.
    struct Part {
        int64_t chunk, row;
        int count, panel;
        float *sums, *values;
    };
    static constexpr int tile_numbers = 16 * panel_rows, part_numbers = chunk_groups * tile_numbers;

    int64_t first_group(int64_t chunk) const { return chunk * chunk_groups; }
    int groups_of(int64_t chunk) const {
        const int64_t left = block_.groups - first_group(chunk);
        return static_cast<int>(left < chunk_groups ? left : chunk_groups);
    }
    const bf16* integers_of(int64_t chunk) const { return integers_ + chunk % 2 * chunk_numbers(); }
    // Of the chunk's first group and panel; these outlive the integers by a chunk.
    Numbers* numbers_of(int64_t chunk) const { return numbers_ + chunk % 3 * (chunk_groups * block_panels); }

    // ---- from packed bytes to bf16: [group][4 panels][depth / 2][16][2] ----

    int zero_integer() const { return block_.zeros == Zeros::minima ? 0 : zero_of(storage); }

    void fill_table() {
        alignas(64) bf16 words[32];
        for (int i = 0; has_four_bits && i < 32; ++i) {
            const int whole = is_e2m1(storage) ? e2m1_integers[i & 15] : i & 15;
            const auto number = static_cast<float>(whole - zero_integer());
            uint32_t bits;
            std::memcpy(&bits, &number, 4);
            words[i] = static_cast<bf16>(bits >> 16);
        }
        if (has_four_bits) table_ = _mm512_load_si512(words);
    }

    void unpack(int64_t chunk) {
        bf16* to = integers_ + chunk % 2 * chunk_numbers();
        Numbers* numbers = numbers_of(chunk);
        const int halves = depth_ / shape.columns;
        for (int group = 0; group < groups_of(chunk); ++group, numbers += block_panels) {
            const GroupPlace at = block_.at(first_group(chunk) + group);
            look_ahead<block_rows * 4>(at.tail);
            with_zeros<storage>(block_.zeros, [&](auto zeros) {
                for (int panel = 0; panel < block_panels; ++panel)
                    copy_numbers<zeros.value>(at, panel, numbers + panel);
            });
            block_.for_tiles(at, halves, [&](const char* from) __attribute__((always_inline)) {
                look_ahead<shape.panel_bytes()>(from);
                for (int pair = 0; pair < shape.columns / 8; ++pair, to += 128)
                    put_pairs(from, pair, to);
            });
        }
    }

    template <Zeros zeros>
    void copy_numbers(const GroupPlace& at, int panel, Numbers* to) const {
        const GroupScales by = block_.template scales<zeros>(at, panel * panel_rows);
        store(to->scales, by.scales);
        if constexpr (zeros == Zeros::own)
            store(to->zeros, floats(by.zero - integers(zero_of(storage))));
        if constexpr (zeros == Zeros::minima) store(to->minima, by.minimum);
    }

    // Eight columns: pairs of columns 0 and 2, 1 and 3, 4 and 6, 5 and 7.
    void put_pairs(const char* panel, int pair, bf16* to) const {
        if constexpr (has_four_bits) {
            // Five bits of an index count, and the table is there twice.
            const __m512i both = _mm512_loadu_si512(panel + pair * 64);
            put(to, _mm512_permutexvar_epi16(both, table_));
            put(to + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 8), table_));
            put(to + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table_));
            put(to + 96, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 12), table_));
        } else {
            const QuadPair quads = pair_at<storage>(panel, pair);
            put(to, numbers_at_even(quads.first.v));
            put(to + 32, numbers_at_even(_mm512_srli_epi32(quads.first.v, 8)));
            put(to + 64, numbers_at_even(quads.second.v));
            put(to + 96, numbers_at_even(_mm512_srli_epi32(quads.second.v, 8)));
        }
    }
    static void put(bf16* to, __m512i numbers) { _mm512_store_si512(to, numbers); }

    // Bytes 0 and 2 of each lane, less their zero, as pairs of bf16: integers of eight bits are exact.
    __m512i numbers_at_even(__m512i bytes) const {
        const __m512i byte = _mm512_set1_epi32(255), zero = _mm512_set1_epi32(zero_integer());
        const auto bits = [&](__m512i whole) {
            return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(whole, zero)));
        };
        const __m512i low = bits(_mm512_and_si512(bytes, byte));
        const __m512i high = bits(_mm512_and_si512(_mm512_srli_epi32(bytes, 16), byte));
        // low >> 16, or the upper half of high
        return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
    }

    // ---- products ---------------------------------------------------------------------------------

    void sum(const Part& part) {
        unit_.configure(part.count, part.count, depth_ * int{sizeof(bf16)});
        const int groups = groups_of(part.chunk);
        sum_group<0>(part, groups);
        sum_group<1>(part, groups);
        sum_group<2>(part, groups);
        sum_group<3>(part, groups);
    }

// Numbers that the instruction holds, so no function's arguments.
#define SLIPSTREAM_SUM(to, line, weight)                                               \
    if constexpr (tile == to) {                                                        \
        _tile_zero(to);                                                                \
        _tile_loadd(line, x, depth_ * sizeof(bf16));                                   \
        _tile_loadd(weight, w, 64);                                                    \
        _tile_dpbf16ps(to, line, weight);                                              \
        _tile_stored(to, part.sums + to * tile_numbers, panel_rows * sizeof(float));   \
    }

    // Of a group, in a tile of its own.
    template <int tile>
    inline __attribute__((always_inline)) void sum_group(const Part& part, int groups) const {
        if (tile >= groups) return;
        const bf16* x = rows_.lines.at(part.row, first_group(part.chunk) + tile);
        const bf16* w =
            integers_of(part.chunk) + (tile * block_panels + part.panel) * panel_numbers_;
        SLIPSTREAM_SUM(0, 4, 6)
        SLIPSTREAM_SUM(1, 5, 7)
        SLIPSTREAM_SUM(2, 4, 6)
        SLIPSTREAM_SUM(3, 5, 7)
    }
#undef SLIPSTREAM_SUM

    void fold(const Part& part) const {
        with_zeros<storage>(block_.zeros, [&](auto zeros) {
            if (part.count <= 8) fold_rows<8, zeros.value>(part);
            else fold_rows<16, zeros.value>(part);
        });
    }

    // values += scale * (sums - zero * sum of x), or + minimum * sum of x.
    template <int R, Zeros zeros>
    void fold_rows(const Part& part) const {
        F16 values[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            values[r] = part.chunk ? load(part.values + r * block_rows) : zero();
        const Numbers* numbers = numbers_of(part.chunk) + part.panel;
        const float* sums = part.sums;
        for (int i = 0; i < groups_of(part.chunk); ++i, numbers += block_panels) {
            const int64_t group = first_group(part.chunk) + i;
            const F16 scales = load(numbers->scales);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                F16 number = load(sums + r * panel_rows);
                // Rounded once: the product is exact.
                if constexpr (zeros == Zeros::own)
                    number = fma(load(numbers->zeros),
                                 broadcast(*rows_.sum_of(group, part.row + r)), number);
                if constexpr (is_e2m1(storage))
                    number = number * broadcast(*rows_.scale(group, part.row + r));
                values[r] = fma(scales, number, values[r]);
                if constexpr (zeros == Zeros::minima)
                    values[r] = fma(load(numbers->minima),
                                    broadcast(*rows_.sum_of(group, part.row + r)), values[r]);
            }
            sums += tile_numbers;
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) store(part.values + r * block_rows, values[r]);
    }

    const GroupedBlock<storage>& block_;
    const WholeRows& rows_;
    ProductUnit& unit_;
    const int depth_;
    const int64_t panel_numbers_;
    bf16* integers_;
    Numbers* numbers_;
    __m512i table_;
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
