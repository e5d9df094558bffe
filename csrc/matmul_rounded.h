// Rows as integers, which weights of integers meet. Compiled for each level.
#pragma once

#include "matmul_rows.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Lines of a weight in groups that `GroupedRows` multiplies, as the matrix unit is slower with so few.
constexpr int64_t most_direct_lines = in_tiles ? 10 : int64_t{1} << 60;
// From so many rows on `WholeTiles` is faster with small groups than digits are.
constexpr int64_t least_whole_rows = in_tiles ? 13 : int64_t{1} << 60;

// In how many lines a row is written. A line has a digit, or in words the first two joined: where a
// group's sums of these fit into 32 bits, or where there are no others.
constexpr int lines_of_digits(int digits, bool in_groups) {
    return takes_words && (in_groups || digits == 2) ? digits - 1 : digits;
}

// Sixteen integers as digits, to memory.
inline void store_digits(Digit* to, I16 x) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x.v));
#elif defined(__AVX2__)
    // Words of four columns are those of columns 0 and 2, then 1 and 3: as `words_of` has them.
    const __m256i eights = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(eights, order));
#else
    for (int i = 0; i < lanes; ++i) to[i] = static_cast<Digit>(x.v[i]);
#endif
}

// Sixteen numbers, rounded, in lines of digits, the highest first: to memory, and added to totals.
template <int lines>
inline void write_digits(F16 x, Digit* const (&to)[lines], I16 (&totals)[lines]) {
    I16 whole = nearest(x);
#pragma GCC unroll 3
    for (int line = lines - 1; line >= 0; --line) {
        I16 low = whole;
        if (line) {
            low = ((whole + integers(64)) & integers(127)) - integers(64);
            whole = shift_right<7>(whole - low);
        }
        store_digits(to[line], low);
        totals[line] = totals[line] + low;
    }
}

// The least power of two in whose steps numbers up to `most` have so many digits. What is not finite
// stays so.
struct Power {
    float scale, inverse;
};
inline Power power_for(float most, int digits) {
    // Digits go to 127.5 steps of the first.
    const float bound = (most > 0x1p-100f ? most : 0x1p-100f) * (128.0f / 127.25f);
    uint32_t bits;
    std::memcpy(&bits, &bound, 4);
    const int power = static_cast<int>(bits >> 23) - 126 - 7 * digits;
    return {bits >> 23 == 255 ? bound : __builtin_ldexpf(1.0f, power),
            __builtin_ldexpf(1.0f, -power)};
}

// Rows as numbers of bf16, in place of digits: rows of bf16 that were divided by a power of two and
// rounded are such numbers.
struct WholeRows {
    Lines<bf16> lines;
    int64_t groups, padded;  // rows, up to whole tiles
    float* scales;           // [groups, padded], where the weight is e2m1
    float* sums;  // [groups, padded] of a group's numbers, where the weight has zeros (negative) or
                  // minima

    // Whether a weight of small groups meets many rows so: all sums must be integers of 24 bits, which
    // a float32 holds.
    static bool suit(const MatmulCall& call) {
        constexpr int64_t largest_number = 16288;  // of two digits: 127.25 * 128
        const Matrix& weight = *call.weight;
        return call.num_rows >= least_whole_rows && call.x_is_bf16 && weight.group &&
               weight.group <= 32 &&
               weight.group * largest_integer(weight) * largest_number < int64_t{1} << 24;
    }
    static int64_t bytes(const MatmulCall& call) {
        const WholeRows rows = lay_out(call, nullptr);
        const auto floats = reinterpret_cast<int64_t>(rows.sums + rows.groups * rows.padded);
        return (floats + 63) / 64 * 64;
    }
    static WholeRows lay_out(const MatmulCall& call, char* memory) {
        const Matrix& weight = *call.weight;
        WholeRows rows;
        rows.groups = weight.num_groups();
        rows.padded = (call.num_rows + 15) / 16 * 16;
        rows.lines = {reinterpret_cast<bf16*>(memory), weight.padded_columns(), call.num_rows,
                      static_cast<int>(weight.group), tile_lines};
        rows.scales = reinterpret_cast<float*>(memory + (rows.line_bytes() * call.num_rows + 63) / 64 * 64);
        rows.sums = rows.scales + (is_e2m1(weight.storage) ? rows.groups * rows.padded : 0);
        return rows;
    }
    int64_t line_bytes() const { return lines.columns * int64_t{sizeof(bf16)}; }
    float* scale(int64_t group, int64_t row) const { return scales + group * padded + row; }
    float* sum_of(int64_t group, int64_t row) const { return sums + group * padded + row; }

    void fill(const MatmulCall& call, int64_t row, int64_t group, F16 inverse) const {
        I16 total = integers(0);
        for (int k = 0; k < lines.depth; k += lanes) {
            const I16 whole = nearest(numbers_at(call, row, group * lines.depth + k) * inverse);
            put(lines.at(row, group) + k, whole);
            total = total + whole;
        }
        const auto of_group = static_cast<float>(sum(total));
        *sum_of(group, row) = call.weight->has_minima ? of_group : -of_group;
    }

  private:
    static int64_t largest_integer(const Matrix& weight) {
        if (is_e2m1(weight.storage)) return 12;
        const int bits = weight.storage == Storage::i4 ? 4 : weight.storage == Storage::i6 ? 6 : 8;
        return weight.has_minima ? (1 << bits) - 1 : 1 << (bits - 1);
    }
    // Columns 0, 2, 1, 3 of four, as `put_pairs` has those of a weight.
    static void put(bf16* to, I16 integers) {
        bf16 words[lanes];
        store(words, floats(integers));
        for (int i = 0; i < lanes; i += 4) {
            to[i] = words[i];
            to[i + 1] = words[i + 2];
            to[i + 2] = words[i + 1];
            to[i + 3] = words[i + 3];
        }
    }
};

// Rows as integers: x = scale * (.. + 128 * digit + last digit).
struct RoundedRows {
    Lines<Digit> lines;  // those of a row one after the other, the highest digit first
    int digits, row_lines;
    int64_t count, groups;
    float* scales;     // [rows]; [rows, groups] where the weight is e2m1, whose table they halve
    int32_t* sums;     // [rows, lines], of the numbers of a line; in groups [rows, digits, groups], of
                       // those of a third digit
    int32_t* offsets;  // [groups, rows] of groups: of the first one or two digits joined, times the
                       // zero that all weights have, if they do
    float* x_sums;     // in place of `offsets`, where the weight has minima: of all digits joined
    WholeRows whole;   // in place of all of these but the scales of rows, where `is_whole`
    bool is_whole;

    int64_t num_lines() const { return is_whole ? whole.lines.count : lines.count; }
    int64_t line_bytes() const { return is_whole ? whole.line_bytes() : lines.columns * int64_t{sizeof(Digit)}; }
    static int64_t bytes(const MatmulCall& call) {
        if (WholeRows::suit(call)) return row_scale_bytes(call) + WholeRows::bytes(call);
        const Sizes sizes(call);
        return sizes.value_bytes + (sizes.scales + sizes.sums + sizes.offsets + 15) / 16 * 64;
    }
    static RoundedRows lay_out(const MatmulCall& call, char* memory) {
        if (WholeRows::suit(call)) {
            RoundedRows rows{};
            rows.digits = digits_of(call);
            rows.row_lines = 1;
            rows.count = call.num_rows;
            rows.groups = call.weight->num_groups();
            rows.scales = reinterpret_cast<float*>(memory);
            rows.whole = WholeRows::lay_out(call, memory + row_scale_bytes(call));
            rows.is_whole = true;
            return rows;
        }
        const Sizes sizes(call);
        auto* scales = reinterpret_cast<float*>(memory + sizes.value_bytes);
        auto* sums = reinterpret_cast<int32_t*>(scales + sizes.scales);
        return {{reinterpret_cast<Digit*>(memory), sizes.columns, sizes.lines, sizes.depth,
                 sizes.bundle},
                sizes.digits, sizes.row_lines, call.num_rows, sizes.groups, scales, sums,
                sums + sizes.sums, reinterpret_cast<float*>(sums + sizes.sums), {}, false};
    }
    void fill(const MatmulCall& call, int64_t row) const {
        if (is_e2m1(call.weight->storage)) fill_by_groups(call, row);
        else fill_whole(call, row);
    }

  private:
    static int digits_of(const MatmulCall& call) {
        return call.weight->one_digit ? 1 : call.x_is_bf16 ? 2 : 3;
    }
    static int64_t row_scale_bytes(const MatmulCall& call) {
        return (call.num_rows * int64_t{sizeof(float)} + 63) / 64 * 64;
    }

    struct Sizes {
        int digits, row_lines, depth, bundle = Lines<Digit>{}.bundle;
        int64_t columns, lines, groups, value_bytes, scales, sums, offsets;

        explicit Sizes(const MatmulCall& call) {
            const Matrix& weight = *call.weight;
            digits = digits_of(call);
            row_lines = lines_of_digits(digits, weight.group);
            lines = call.num_rows * row_lines;
            const bool is_direct = weight.group && lines <= most_direct_lines;
            if (is_direct) bundle = all_lines;
            // Groups that are no whole number of 64 columns are multiplied in the weight's tiles.
            depth = is_direct || weight.group % 64 ? tile_shape(weight.storage).columns : 64;
            columns = (weight.padded_columns() + depth - 1) / depth * depth;
            groups = weight.num_groups();
            value_bytes = (lines * columns * int64_t{sizeof(Digit)} + 63) / 64 * 64;
            scales = call.num_rows * (is_e2m1(weight.storage) ? groups : 1);
            sums = call.num_rows * digits * groups;
            offsets = call.num_rows * groups;
        }
    };

    // By one scale. With groups it is a power of two, so that a bf16 number is exact unless it is much
    // smaller than the largest, and so is a bf16 number itself.
    void fill_whole(const MatmulCall& call, int64_t row) const {
        const float most = largest_of(call, row, 0, call.weight->columns);
        const float bound = most > 1e-30f ? most : 1e-30f;
        const float steps = digits == 1 ? 127.0f : digits == 2 ? 127.0f * 128 : 127.0f * 128 * 128;
        const Power power = power_for(most, digits);
        scales[row] = call.weight->group ? power.scale : bound / steps;
        const F16 scale = broadcast(scales[row]);
        const F16 inverse = broadcast(call.weight->group ? power.inverse : steps / bound);
        for (int64_t group = 0; group < groups; ++group)
            if (digits == 1) write_as<1, false>(call, row, group, [&](F16 x) { return x / scale; });
            else write(call, row, group, inverse);
    }

    // By a scale for each group, which the table of e2m1 halves.
    void fill_by_groups(const MatmulCall& call, int64_t row) const {
        const int64_t size = call.weight->padded_columns() / groups;
        for (int64_t group = 0; group < groups; ++group) {
            const float most = largest_of(call, row, group * size, (group + 1) * size);
            const Power power = power_for(most, digits);
            if (is_whole) *whole.scale(group, row) = power.scale * 0.5f;
            else scales[row * groups + group] = power.scale * 0.5f;
            write(call, row, group, broadcast(power.inverse));
        }
    }

    void write(const MatmulCall& call, int64_t row, int64_t group, F16 inverse) const {
        if (is_whole) return whole.fill(call, row, group, inverse);
        const auto divide = [&](F16 x) { return x * inverse; };
        const bool in_groups = call.weight->group;
        if (digits == 2 && in_groups) write_as<2, true>(call, row, group, divide);
        else if (digits == 2) write_as<2, false>(call, row, group, divide);
        else if (in_groups) write_as<3, true>(call, row, group, divide);
        else write_as<3, false>(call, row, group, divide);
    }

    static int32_t wrapped(int64_t number) {
        return static_cast<int32_t>(static_cast<uint32_t>(number));
    }

    // The sum of high * 128 + low. Of a row that is not finite it may be too large; what such a row
    // gives is NaN in any case.
    static int32_t joined_sum(I16 high, I16 low) {
#if defined(__AVX512F__)
        return sum(shift_left<7>(high) + low);
#else
        return wrapped(int64_t{sum(high)} * 128 + sum(low));
#endif
    }

    template <int digits, bool in_groups, typename Divide>
    void write_as(const MatmulCall& call, int64_t row, int64_t group, Divide&& divide) const {
        constexpr int num_lines = lines_of_digits(digits, in_groups);
        const int64_t tiles = lines.columns / groups / lines.depth;
        I16 totals[num_lines];
        for (I16& total : totals) total = integers(0);
        for (int64_t tile = group * tiles; tile < (group + 1) * tiles; ++tile) {
            Digit* to[num_lines];
            for (int line = 0; line < num_lines; ++line)
                to[line] = lines.at(row * num_lines + line, tile);
            for (int k = 0; k < lines.depth; k += lanes) {
                const F16 x = numbers_at(call, row, tile * lines.depth + k);
                write_digits(divide(x), to, totals);
                for (Digit*& at : to) at += lanes;
            }
        }
        if constexpr (in_groups) {
            write_group_sums<digits>(*call.weight, row, group, totals);
        } else {
            for (int line = 0; line < num_lines; ++line)
                sums[row * num_lines + line] = sum(totals[line]);
        }
    }

    template <int digits, int num_lines>
    void write_group_sums(const Matrix& weight, int64_t row, int64_t group,
                          const I16 (&totals)[num_lines]) const {
        int32_t joined = sum(totals[0]);
        if constexpr (num_lines == digits) joined = joined_sum(totals[0], totals[1]);
        const int32_t last = sum(totals[num_lines - 1]);
        const int64_t place = group * count + row;
        const int32_t zero_of_all = weight.has_zeros ? 1 : zero_of(weight.storage);
        if (digits == 3) sums[(row * digits + 2) * groups + group] = last;
        if (!weight.has_minima) offsets[place] = wrapped(int64_t{zero_of_all} * joined);
        else x_sums[place] = static_cast<float>(joined);
        if (digits == 3 && weight.has_minima)
            x_sums[place] = x_sums[place] * 128.0f + static_cast<float>(last);
    }
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
