// Integer weights: where their parts lie, and from exact sums to numbers. Compiled for each level.
#pragma once

#include "matmul.h"
#include "matmul_quads.h"
#include "matmul_rounded.h"
#include "simd.h"

namespace slipstream::SLIPSTREAM_LEVEL {

inline float from_float16(uint16_t half) {
    const uint32_t exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    float value = static_cast<float>(mantissa) * 0x1p-24f;
    if (exponent) {
        const uint32_t bits = (exponent + 112) << 23 | mantissa << 13;
        std::memcpy(&value, &bits, 4);
    }
    return half >> 15 ? -value : value;
}

// Sums [lines][64] of a row's digits with int8, less what their zeros add, joined exactly and rounded
// once, so that it does not matter which of them were joined before: sixteen numbers.
template <typename Sum>
F16 join_digits(const Sum* sums, const int32_t* x_sums, int lines) {
    double joined[lanes] = {};
    for (int line = 0; line < lines; ++line) {
        const double of_zero = double{zero_of(Storage::i8)} * x_sums[line];
        for (int i = 0; i < lanes; ++i)
            joined[i] = joined[i] * 128.0 + (static_cast<double>(sums[line * block_rows + i]) - of_zero);
    }
    float values[lanes];
    for (int i = 0; i < lanes; ++i) values[i] = static_cast<float>(joined[i]);
    return load(values);
}

// ---- in groups --------------------------------------------------------------------------------

// What stands for 0 in a group: one integer for all weights, which is in the offsets of what they
// meet; an integer of each row; or none, where a minimum is added to each number.
enum class Zeros { common, own, minima };

// Scales, and zeros or minima, of 16 rows of the weight, of a group.
struct GroupScales {
    F16 scales;
    I16 zero;
    F16 minimum;
};

// Twice the numbers of e2m1, of which the upper eight are negative, plus their zero.
inline constexpr uint8_t e2m1_integers[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                              12, 11, 10, 9,  8,  6,  4,  0};

// Four bits of each byte, those below and those above, as unsigned integers.
template <Storage storage>
inline Quads low_integers(Quads both) {
    return is_e2m1(storage) ? look_up_low(e2m1_integers, both) : low_halves(both);
}
template <Storage storage>
inline Quads high_integers(Quads both) {
    return is_e2m1(storage) ? look_up_high(e2m1_integers, both) : high_halves(both);
}

// Eight columns of 16 rows, from step `pair` of a panel's tile on.
struct QuadPair {
    Quads first, second;
};
template <Storage storage>
inline QuadPair pair_at(const char* panel, int pair) {
    if constexpr (storage == Storage::g8)
        return {load_quads(panel + pair * 128), load_quads(panel + pair * 128 + 64)};
    const Quads both = load_quads(panel + pair * 64);
    const QuadPair found = {low_integers<storage>(both), high_integers<storage>(both)};
    if constexpr (storage == Storage::i6) {
        const Quads upper = load_quads(panel + 128);
        if (pair) return {with_upper<2>(found.first, upper), with_upper<3>(found.second, upper)};
        return {with_upper<0>(found.first, upper), with_upper<1>(found.second, upper)};
    }
    return found;
}

// Sixteen float16 numbers.
inline F16 load_halves(const void* halves) {
#if defined(__AVX512F__)
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(halves)))};
#elif defined(__F16C__)
    const auto* eights = static_cast<const __m128i*>(halves);
    return {_mm256_cvtph_ps(_mm_loadu_si128(eights)), _mm256_cvtph_ps(_mm_loadu_si128(eights + 1))};
#else
    float values[lanes];
    for (int i = 0; i < lanes; ++i) {
        uint16_t half;
        std::memcpy(&half, static_cast<const char*>(halves) + i * 2, 2);
        values[i] = from_float16(half);
    }
    return load(values);
#endif
}

// A group of a block: its tiles, its scales and what follows, and the factors of these or null.
struct GroupPlace {
    const char *tiles, *tail;
    const uint16_t* factors;
};

// A block of a weight in groups of `tiles` tiles, each followed by its scales, minima and zeros.
template <Storage storage>
struct GroupedBlock {
    static constexpr TileShape shape = tile_shape(storage);

    const char* data;
    const uint16_t* factors;
    int64_t groups, tiles, group_bytes, factor_groups;
    Zeros zeros;

    GroupedBlock(const Matrix& weight, int64_t block)
        : data(weight.block(block)), factors(weight.block_factors(block)),
          groups(weight.num_groups()), tiles(weight.tiles_per_group()),
          group_bytes(weight.group_bytes()), factor_groups(weight.factor_groups),
          zeros(weight.has_minima  ? Zeros::minima
                : weight.has_zeros ? Zeros::own
                                   : Zeros::common) {}

    GroupPlace at(int64_t group) const {
        const char* from = data + group * group_bytes;
        const int64_t parts = zeros == Zeros::minima ? 2 : 1;
        return {from, from + tiles * shape.block_bytes(),
                factors ? factors + group / factor_groups * parts * block_rows : nullptr};
    }

    // Calls work(from) for the panels' tiles of a group in the order of a matrix unit whose tiles are
    // `halves` of these deep.
    template <typename Work>
    inline __attribute__((always_inline)) void for_tiles(const GroupPlace& at, int halves,
                                                         Work&& work) const {
        for (int64_t tile = 0; tile < tiles; tile += halves)
            for (int panel = 0; panel < block_panels; ++panel)
                for (int half = 0; half < halves; ++half)
                    work(at.tiles + (tile + half) * shape.block_bytes() +
                         panel * shape.panel_bytes());
    }

    // Of rows n .. n + 16.
    template <Zeros zeros>
    GroupScales scales(const GroupPlace& at, int n) const {
        if constexpr (storage == Storage::mxfp4) {
            // The byte is the exponent of a float32, but 2^-127 is below the normal ones.
            const I16 exponents = load_bytes(reinterpret_cast<const uint8_t*>(at.tail + n));
            const F16 powers = as_floats(maximum(shift_left<23>(exponents), integers(0x400000)));
            return {powers, integers(zero_of(storage)), zero()};
        }
        GroupScales found = {numbers(at, n), integers(zero_of(storage)), zero()};
        if constexpr (zeros == Zeros::minima) found.minimum = numbers(at, block_rows + n);
        if constexpr (zeros == Zeros::own)
            found.zero = load_bytes(reinterpret_cast<const uint8_t*>(at.tail + block_rows * 2 + n));
        return found;
    }

  private:
    // Scales, or the minima, which follow the scales of all 64 rows.
    F16 numbers(const GroupPlace& at, int n) const {
        if (!at.factors) return load_halves(at.tail + n * 2);
        const I16 bytes = load_bytes(reinterpret_cast<const uint8_t*>(at.tail + n));
        return floats(bytes - integers(128)) * load_halves(at.factors + n);
    }
};

// What rows have in a group.
struct RowGroup {
    const int32_t* offsets;  // [rows]
    const float* x_sums;     // [rows]
    const int32_t* sums;     // of the first row's first digit; of other digits and rows `groups` later
    const float* scales;     // where the weight is e2m1: of other rows `groups` later
    int64_t groups;

    RowGroup(const RoundedRows& of, int64_t row, int64_t group)
        : offsets(of.offsets + group * of.count + row), x_sums(of.x_sums + group * of.count + row),
          sums(of.sums + row * of.digits * of.groups + group),
          scales(of.scales + row * of.groups + group), groups(of.groups) {}
};

// value += what the sums of a row's digits with a group stand for, but for the scales of whole rows.
// `joined` is of the first two digits: with their zeros they fit into 32 bits, exactly. A third joins
// in floats. The row is number `r` of x.
template <Storage storage, int digits, Zeros zeros>
inline F16 add_group(F16 value, I16 joined, I16 last, const GroupScales& by, const RowGroup& x,
                     int64_t r) {
    if constexpr (zeros == Zeros::minima) {
        F16 number = floats(joined);
        if constexpr (digits == 3) number = fma(number, broadcast(128.0f), floats(last));
        value = fma(by.scales, number, value);
        return fma(by.minimum, broadcast(x.x_sums[r]), value);
    }
    const I16 offset = integers(x.offsets[r]);
    F16 number = floats(joined - (zeros == Zeros::own ? by.zero * offset : offset));
    if constexpr (digits == 3) {
        const I16 total = integers(x.sums[(r * digits + 2) * x.groups]);
        number = fma(number, broadcast(128.0f), floats(last - by.zero * total));
    }
    if constexpr (is_e2m1(storage)) number = number * broadcast(x.scales[r * x.groups]);
    return fma(by.scales, number, value);
}

template <Zeros zeros>
struct ZerosOf {
    static constexpr Zeros value = zeros;
};

// Calls work(ZerosOf) of the one that a block of this storage has.
template <Storage storage, typename Work>
inline __attribute__((always_inline)) void with_zeros(Zeros zeros, Work&& work) {
    if (!is_e2m1(storage) && zeros == Zeros::minima) work(ZerosOf<Zeros::minima>{});
    else if (storage == Storage::i4 && zeros == Zeros::own) work(ZerosOf<Zeros::own>{});
    else work(ZerosOf<Zeros::common>{});
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
