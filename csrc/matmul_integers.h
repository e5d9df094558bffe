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

// ---- four bits --------------------------------------------------------------------------------

// Zeros of 16 rows of the weight, of a group.
struct GroupZeros {
    I16 each;
    bool are_own;  // or all the same, which is in the offsets of what they meet

    I16 times(int32_t offset) const {
        return are_own ? each * integers(offset) : integers(offset);
    }
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

// A block of a weight in four bits: groups of `tiles` tiles, each with its scales and zeros behind it.
template <Storage storage>
struct FourBitBlock {
    static constexpr TileShape shape = tile_shape(storage);

    const char* data;
    int64_t groups, tiles, group_bytes, tail;
    bool has_zeros;

    FourBitBlock(const Matrix& weight, int64_t block)
        : data(weight.block(block)), groups(weight.num_groups()), tiles(weight.tiles_per_group()),
          group_bytes(weight.group_bytes()), tail(group_bytes - weight.group_tail_bytes()),
          has_zeros(weight.has_zeros) {}

    const char* group(int64_t index) const { return data + index * group_bytes; }
    const char* tile(int64_t index, int64_t tile, int panel) const {
        return group(index) + (tile * block_panels + panel) * shape.panel_bytes();
    }

    // Of rows n .. n + 16.
    F16 scales(int64_t index, int n) const {
        if constexpr (storage == Storage::mxfp4) {
            // The byte is the exponent of a float32, but 2^-127 is below the normal ones.
            const char* bytes = group(index) + tail + n;
            const I16 exponents = load_bytes(reinterpret_cast<const uint8_t*>(bytes));
            return as_floats(maximum(shift_left<23>(exponents), integers(0x400000)));
        }
        const char* halves = group(index) + tail + n * 2;
#if defined(__AVX512F__)
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)))};
#else
        float values[lanes];
        for (int i = 0; i < lanes; ++i) {
            uint16_t half;
            std::memcpy(&half, halves + i * 2, 2);
            values[i] = from_float16(half);
        }
        return load(values);
#endif
    }
    GroupZeros zeros(int64_t index, int n) const {
        if (!has_zeros) return {integers(0), false};
        const char* bytes = group(index) + tail + block_rows * 2 + n;
        return {load_bytes(reinterpret_cast<const uint8_t*>(bytes)), true};
    }
};

// What the sums of a row's digits with a group stand for, but for the weight's scales and those of
// whole rows. Two digits and their zeros fit into 32 bits, exactly; a third joins in floats.
template <Storage storage, int digits>
inline F16 join_group(I16 first, I16 second, I16 third, const GroupZeros& zeros,
                      const RoundedRows& rows, int64_t row, int64_t index) {
    I16 whole = first;
    if constexpr (digits > 1) whole = shift_left<7>(first) + second;
    F16 joined = floats(whole - zeros.times(rows.offsets[row * rows.groups + index]));
    if constexpr (digits == 3) {
        const int32_t last = rows.sums[(row * digits + 2) * rows.groups + index];
        const F16 rest =
            floats(third - zeros.times(zeros.are_own ? last : zero_of(storage) * last));
        joined = fma(joined, broadcast(128.0f), rest);
    }
    if constexpr (is_e2m1(storage))
        joined = joined * broadcast(rows.scales[row * rows.groups + index]);
    return joined;
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
