// The rows that a weight is multiplied by, laid out for the kernels. Compiled for each level.
#pragma once

#include "matmul.h"
#include "matmul_quads.h"
#include "simd.h"
#include "threads.h"

namespace slipstream::SLIPSTREAM_LEVEL {

#if defined(__AMX_BF16__)
constexpr bool in_tiles = true;
#else
constexpr bool in_tiles = false;
#endif

// How many lines lie together, a power of two: one, a tile of the matrix unit, or all.
constexpr int one_line = 0, tile_lines = 4, all_lines = 62;

// What is multiplied: rows of bf16, or the digits of rounded rows one after the other; K is filled
// up with zeros to whole tiles. Lines that lie together (less at the end) are [tile][line][depth].
template <typename Number>
struct Lines {
    Number* values;
    int64_t columns, count;
    int depth;  // columns of a tile
    int bundle = in_tiles ? tile_lines : one_line;

    // Where a tile of a line begins.
    Number* at(int64_t line, int64_t tile) const {
        if (bundle == one_line) return values + line * columns + tile * depth;
        const int64_t first = line >> bundle << bundle;
        return values + first * columns + (tile * together(first) + line - first) * depth;
    }
    // Where a column of a line lies; depths are powers of two.
    Number* number(int64_t line, int64_t column) const {
        return at(line, column >> __builtin_ctz(depth)) + (column & (depth - 1));
    }
    // How many of the lines that lie together from `first` on there are.
    int64_t together(int64_t first) const {
        const int64_t left = count - first, most = int64_t{1} << bundle;
        return left < most ? left : most;
    }
    // From one line of a tile to the next.
    int64_t stride() const { return bundle == one_line ? columns : depth; }
};

// Lines of a weight in groups that `GroupedRows` multiplies, as the matrix unit is slower with so few.
constexpr int64_t most_direct_lines = in_tiles ? 10 : int64_t{1} << 60;

// Prefetches what is read this many bytes later: few rows are done with a weight so soon that the
// hardware prefetcher, which stops at the end of a page, falls behind.
// Always inlined: gcc treats a function that only prefetches as one without effect, and drops it.
template <int64_t bytes>
inline __attribute__((always_inline)) void look_ahead([[maybe_unused]] const void* from) {
#if defined(__AVX2__)
    constexpr int64_t distance = 4096;
    for (int64_t line = 0; line < bytes; line += 64)
        _mm_prefetch(static_cast<const char*>(from) + distance + line, _MM_HINT_T0);
#endif
}

// Memory for sums [count][64] of a task. The matrix unit writes whole tiles, so more has room.
constexpr int64_t spare_lines = 32;
template <typename Sum>
inline Sum* sums_of(int64_t count) {
    return static_cast<Sum*>(
        scratch(Scratch::sums, (count + spare_lines) * block_rows * sizeof(Sum)));
}

// What rows of bf16 are multiplied as: floats where no instruction takes pairs.
#if defined(__AVX512BF16__)
using Factor = bf16;
inline void copy_tile(const bf16* from, int64_t count, bf16* to) {
    if (count < 32) std::memset(to, 0, 64);
    std::memcpy(to, from, count * 2);
}
#else
using Factor = float;
inline void copy_tile(const bf16* from, int64_t count, float* to) {
    for (int half = 0; half < 32; half += lanes) {
        const int64_t left = count - half;
        const int some = static_cast<int>(left < 0 ? 0 : left < lanes ? left : lanes);
        store(to + half, some == lanes ? load(from + half) : load_first(from + half, some));
    }
}
#endif

// Where a row of the result begins in x.
inline int64_t place_of(const MatmulCall& call, int64_t row) {
    return (call.row_ids ? call.row_ids[row] : row) * call.x_stride;
}

// Rows in the form that a call's kernels take: their size, their layout in memory, and the conversion
// of one row. These are float32 rows, which are copied.
struct PlainRows {
    Lines<float> lines;

    static int64_t bytes(const MatmulCall&) { return 0; }
    static PlainRows lay_out(const MatmulCall& call, char*) {
        return {{nullptr, call.weight->columns, call.num_rows, 1}};
    }
    void fill(const MatmulCall&, int64_t) const {}
};

// Of bfloat16.
struct PackedRows {
    Lines<Factor> lines;

    static int64_t bytes(const MatmulCall& call) {
        return call.num_rows * call.weight->padded_columns() * int64_t{sizeof(Factor)};
    }
    static PackedRows lay_out(const MatmulCall& call, char* memory) {
        return {{reinterpret_cast<Factor*>(memory), call.weight->padded_columns(), call.num_rows, 32}};
    }
    void fill(const MatmulCall& call, int64_t row) const {
        const auto* from = static_cast<const bf16*>(call.x) + place_of(call, row);
        for (int64_t tile = 0; tile < lines.columns / 32; ++tile) {
            const int64_t left = call.weight->columns - tile * 32;
            copy_tile(from + tile * 32, left < 32 ? left : 32, lines.at(row, tile));
        }
    }
};

// In how many lines a row is written. A line has a digit, or in words the first two joined, where a
// group's sums of these fit into 32 bits.
constexpr int lines_of_digits(int digits, bool in_groups) {
    return takes_words && in_groups ? digits - 1 : digits;
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

inline int32_t sum(I16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(x.v);
#elif defined(__AVX2__)
    const __m256i half = _mm256_add_epi32(x.a, x.b);
    __m128i quarter = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    quarter = _mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0xb1)));
#else
    int32_t values[lanes], total = 0;
    store(values, x);
    for (int i = 0; i < lanes; ++i) total += values[i];
    return total;
#endif
}

inline F16 numbers_at(const MatmulCall& call, int64_t row, int64_t k) {
    const int64_t left = call.weight->columns - k, at = place_of(call, row) + k;
    if (left <= 0) return zero();
    if (call.x_is_bf16) {
        const bf16* x = static_cast<const bf16*>(call.x) + at;
        return left >= lanes ? load(x) : load_first(x, static_cast<int>(left));
    }
    const float* x = static_cast<const float*>(call.x) + at;
    return left >= lanes ? load(x) : load_first(x, static_cast<int>(left));
}

// The largest magnitude in columns first .. last of a row.
inline float largest_of(const MatmulCall& call, int64_t row, int64_t first, int64_t last) {
    F16 most[2] = {zero(), zero()};  // neither waits for the other
    for (int64_t k = first; k < last; k += 2 * lanes) {
        const F16 x = numbers_at(call, row, k);
        most[0] = maximum(most[0], maximum(x, zero() - x));
        if (k + lanes >= last) break;
        const F16 next = numbers_at(call, row, k + lanes);
        most[1] = maximum(most[1], maximum(next, zero() - next));
    }
    return largest(maximum(most[0], most[1]));
}

// Rows as integers: x = scale * (.. + 128 * digit + last digit).
struct RoundedRows {
    Lines<Digit> lines;  // those of a row one after the other, the highest digit first
    int digits, row_lines;
    int64_t count, groups;
    float* scales;     // [rows]; [rows, groups] where the weight is e2m1, whose table they halve
    int32_t* sums;     // [rows, digits, groups], of the numbers of a group; in groups only of a third
    int32_t* offsets;  // [groups, rows] of groups: of the first one or two digits joined, times the
                       // zero that all weights have, if they do
    float* x_sums;     // in place of `offsets`, where the weight has minima: of all digits joined

    static int64_t bytes(const MatmulCall& call) {
        const Sizes sizes(call);
        return sizes.value_bytes + (sizes.scales + sizes.sums + sizes.offsets + 15) / 16 * 64;
    }
    static RoundedRows lay_out(const MatmulCall& call, char* memory) {
        const Sizes sizes(call);
        auto* scales = reinterpret_cast<float*>(memory + sizes.value_bytes);
        auto* sums = reinterpret_cast<int32_t*>(scales + sizes.scales);
        return {{reinterpret_cast<Digit*>(memory), sizes.columns, sizes.lines, sizes.depth,
                 sizes.bundle},
                sizes.digits, sizes.row_lines, call.num_rows, sizes.groups, scales, sums,
                sums + sizes.sums, reinterpret_cast<float*>(sums + sizes.sums)};
    }
    void fill(const MatmulCall& call, int64_t row) const {
        if (is_e2m1(call.weight->storage)) fill_by_groups(call, row);
        else fill_whole(call, row);
    }

  private:
    struct Sizes {
        int digits, row_lines, depth, bundle = Lines<Digit>{}.bundle;
        int64_t columns, lines, groups, value_bytes, scales, sums, offsets;

        explicit Sizes(const MatmulCall& call) {
            const Matrix& weight = *call.weight;
            digits = weight.one_digit ? 1 : call.x_is_bf16 ? 2 : 3;
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

    // By one scale.
    void fill_whole(const MatmulCall& call, int64_t row) const {
        const float most = largest_of(call, row, 0, call.weight->columns);
        const float bound = most > 1e-30f ? most : 1e-30f;
        const float steps = digits == 1 ? 127.0f : digits == 2 ? 127.0f * 128 : 127.0f * 128 * 128;
        scales[row] = bound / steps;
        const F16 scale = broadcast(scales[row]), inverse = broadcast(steps / bound);
        for (int64_t group = 0; group < groups; ++group)
            if (digits == 1) write_as<1, false>(call, row, group, [&](F16 x) { return x / scale; });
            else write(call, row, group, inverse);
    }

    // By a power of two for each group: the least whose digits hold the largest number.
    void fill_by_groups(const MatmulCall& call, int64_t row) const {
        const int64_t size = lines.columns / groups;
        for (int64_t group = 0; group < groups; ++group) {
            const float most = largest_of(call, row, group * size, (group + 1) * size);
            // Digits go to 127.5 steps of the first.
            const float bound = (most > 0x1p-100f ? most : 0x1p-100f) * (128.0f / 127.25f);
            uint32_t bits;
            std::memcpy(&bits, &bound, 4);
            const int power = static_cast<int>(bits >> 23) - 126 - 7 * digits;
            // What is not finite stays so.
            scales[row * groups + group] =
                bits >> 23 == 255 ? bound : __builtin_ldexpf(1.0f, power - 1);
            const F16 inverse = broadcast(__builtin_ldexpf(1.0f, -power));
            write(call, row, group, inverse);
        }
    }

    void write(const MatmulCall& call, int64_t row, int64_t group, F16 inverse) const {
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
            for (int digit = 0; digit < digits; ++digit)
                sums[row * digits + digit] = sum(totals[digit]);
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

// values [64] of a block, times `scales` where there are any, and bias, to the row's place.
inline void finish_row(const MatmulCall& call, int64_t block, int64_t row, const float* values,
                       const float* scales) {
    const int64_t first = block * block_rows;
    for (int n = 0; n < block_rows && first + n < call.weight->rows; n += lanes) {
        const int64_t left = call.weight->rows - first - n;
        const int count = static_cast<int>(left < lanes ? left : lanes);
        F16 value = load(values + n);
        if (scales) value = value * load(scales + n);
        if (call.bias) {
            const F16 bias =
                call.x_is_bf16
                    ? load_first(static_cast<const bf16*>(call.bias) + first + n, count)
                    : load_first(static_cast<const float*>(call.bias) + first + n, count);
            value = value + bias;
        }
        const int64_t to = row * call.out_stride + first + n;
        if (count == lanes) {
            if (call.out_is_bf16) store(static_cast<bf16*>(call.out) + to, value);
            else store(static_cast<float*>(call.out) + to, value);
        } else if (call.out_is_bf16) {
            store_first(static_cast<bf16*>(call.out) + to, value, count);
        } else {
            store_first(static_cast<float*>(call.out) + to, value, count);
        }
    }
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
