// Integer weights: where their parts lie, and from exact sums to numbers. Compiled for each level.
#pragma once

#include "matmul.h"
#include "matmul_quads.h"
#include "matmul_rows.h"
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

// Sums [digits][64] of a row with int8, less what their zeros add: sixteen numbers. The difference
// is taken in integers, for both sides are many times as large.
inline F16 join_digits(const int32_t* sums, const int32_t* x_sums, int digits) {
    F16 value = zero();
    for (int digit = 0; digit < digits; ++digit) {
        const F16 part =
            floats(load(sums + digit * block_rows) - integers(zero_of(Storage::i8) * x_sums[digit]));
        value = digit ? fma(value, broadcast(128.0f), part) : part;
    }
    return value;
}

// ---- in groups --------------------------------------------------------------------------------

// Scales, and zeros or minima, of 16 rows of the weight, of a group.
struct GroupScales {
    F16 scales;
    enum { common_zero, zeros, minima } kind;  // a common zero is in the offsets of what they meet
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

// A block of a weight in groups of `tiles` tiles, each with its scales, minima and zeros behind it.
template <Storage storage>
struct GroupedBlock {
    static constexpr TileShape shape = tile_shape(storage);

    const char* data;
    const uint16_t* factors;
    int64_t groups, tiles, group_bytes, tail, factor_groups;
    bool has_zeros, has_minima;

    GroupedBlock(const Matrix& weight, int64_t block)
        : data(weight.block(block)), factors(weight.block_factors(block)),
          groups(weight.num_groups()), tiles(weight.tiles_per_group()),
          group_bytes(weight.group_bytes()), tail(group_bytes - weight.group_tail_bytes()),
          factor_groups(weight.factor_groups), has_zeros(weight.has_zeros),
          has_minima(weight.has_minima) {}

    const char* group(int64_t index) const { return data + index * group_bytes; }
    const char* tile(int64_t index, int64_t tile, int panel) const {
        return group(index) + (tile * block_panels + panel) * shape.panel_bytes();
    }

    // Of rows n .. n + 16.
    GroupScales scales(int64_t index, int n) const {
        const char* from = group(index) + tail;
        if constexpr (storage == Storage::mxfp4) {
            // The byte is the exponent of a float32, but 2^-127 is below the normal ones.
            const I16 exponents = load_bytes(reinterpret_cast<const uint8_t*>(from + n));
            const F16 powers = as_floats(maximum(shift_left<23>(exponents), integers(0x400000)));
            return {powers, GroupScales::common_zero, integers(0), zero()};
        }
        const F16 first = numbers(from, index, 0, n);
        if (has_minima)
            return {first, GroupScales::minima, integers(0), numbers(from, index, 1, n)};
        if (!has_zeros) return {first, GroupScales::common_zero, integers(0), zero()};
        const char* bytes = from + block_rows * 2 + n;
        return {first, GroupScales::zeros, load_bytes(reinterpret_cast<const uint8_t*>(bytes)),
                zero()};
    }

  private:
    // Scales (part 0) or minima (part 1).
    F16 numbers(const char* from, int64_t index, int part, int n) const {
        if (!factors) return load_halves(from + (part * block_rows + n) * 2);
        const char* bytes = from + part * block_rows + n;
        const I16 whole = load_bytes(reinterpret_cast<const uint8_t*>(bytes)) - integers(128);
        const int64_t place = index / factor_groups * (1 + has_minima) + part;
        return floats(whole) * load_halves(factors + place * block_rows + n);
    }
};

// value += what the sums of a row's digits with a group stand for, but for the scales of whole rows.
// `joined` is of the first two digits, or of the only one: with their zeros they fit into 32 bits,
// exactly. A third joins in floats.
template <Storage storage, int digits>
inline F16 add_group(F16 value, I16 joined, I16 last, const GroupScales& by,
                     const RoundedRows& rows, int64_t row, int64_t index) {
    const int64_t place = index * rows.count + row;
    F16 number;
    if (by.kind == GroupScales::minima) {
        number = floats(joined);
        if constexpr (digits == 3) number = fma(number, broadcast(128.0f), floats(last));
        value = fma(by.scales, number, value);
        return fma(by.minimum, broadcast(rows.x_sums[place]), value);
    }
    const I16 offset = integers(rows.offsets[place]);
    const bool has_zeros = by.kind == GroupScales::zeros;
    number = floats(joined - (has_zeros ? by.zero * offset : offset));
    if constexpr (digits == 3) {
        const int32_t last_total = rows.sums[(row * digits + 2) * rows.groups + index];
        const I16 zero = has_zeros ? by.zero : integers(zero_of(storage));
        number = fma(number, broadcast(128.0f), floats(last - zero * integers(last_total)));
    }
    if constexpr (is_e2m1(storage)) number = number * broadcast(rows.scales[row * rows.groups + index]);
    return fma(by.scales, number, value);
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
