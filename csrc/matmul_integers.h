// Integer weights: unpacking, and from exact sums to numbers. Compiled for each level.
#pragma once

#include "matmul.h"
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

// A group of a block of i4 as bytes: [tile of `depth` columns][4 panels][steps of 4 columns][16][4].
inline void unpack_group(const Matrix& weight, const char* group, int depth, uint8_t* to) {
    const int64_t tiles = weight.tiles_per_group();
    const int halves = depth / 32, panel_bytes = depth * panel_rows;
    for (int64_t tile = 0; tile < tiles; ++tile)
        for (int panel = 0; panel < block_panels; ++panel) {
            const char* from = group + (tile * block_panels + panel) * 256;
            uint8_t* out = to + (tile / halves * block_panels + panel) * panel_bytes +
                           tile % halves * 512;
#if defined(__AVX512F__)
            const __m512i low = _mm512_set1_epi8(15);
            for (int step = 0; step < 4; ++step) {
                const __m512i both = _mm512_loadu_si512(from + step * 64);
                _mm512_storeu_si512(out + step * 128, _mm512_and_si512(both, low));
                _mm512_storeu_si512(out + step * 128 + 64,
                                    _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
            }
#else
            for (int step = 0; step < 4; ++step)
                for (int i = 0; i < 64; ++i) {
                    const auto both = static_cast<uint8_t>(from[step * 64 + i]);
                    out[step * 128 + i] = both & 15;
                    out[step * 128 + 64 + i] = both >> 4;
                }
#endif
        }
}

// Asks for what will be read so many bytes later: the machine's own look-ahead loses four-bit weights,
// whose bytes pass so fast that it would have to look further.
inline void look_ahead([[maybe_unused]] const char* from, [[maybe_unused]] int64_t bytes) {
#if defined(__AVX2__)
    constexpr int64_t distance = 4096;
    for (int64_t line = 0; line < bytes; line += 64)
        _mm_prefetch(from + distance + line, _MM_HINT_T0);
#endif
}

// Lines that take four-bit numbers straight from their bytes, without unpacking them to memory.
#if defined(__AVX512VNNI__)
constexpr int64_t few_lines = 4;

// Sums [L][64] of the first L lines times a group of a block, whose columns begin at `tile` (of 32).
template <int L>
inline void multiply_few(const Lines<int8_t>& lines, const Matrix& weight, const char* group,
                         int64_t tile, int32_t* sums) {
    const __m512i low = _mm512_set1_epi8(15);
    const int64_t tiles = weight.tiles_per_group();
    const int halves = lines.depth / 32;
    for (int panel = 0; panel < block_panels; ++panel) {
        // Two sums a line, since each waits for the one before.
        __m512i even[L], odd[L];
        for (int line = 0; line < L; ++line) even[line] = odd[line] = _mm512_setzero_si512();
        for (int64_t t = 0; t < tiles; ++t) {
            const char* from = group + (t * block_panels + panel) * 256;
            for (int step = 0; step < 4; ++step) {
                const __m512i both = _mm512_loadu_si512(from + step * 64);
                const __m512i first = _mm512_and_si512(both, low);
                const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                for (int line = 0; line < L; ++line) {
                    const int8_t* x = lines.at(line, (tile + t) / halves) +
                                      (tile + t) % halves * 32 + step * 8;
                    int32_t quads[2];
                    std::memcpy(quads, x, sizeof quads);
                    even[line] = _mm512_dpbusd_epi32(even[line], first, _mm512_set1_epi32(quads[0]));
                    odd[line] = _mm512_dpbusd_epi32(odd[line], second, _mm512_set1_epi32(quads[1]));
                }
            }
        }
        for (int line = 0; line < L; ++line)
            _mm512_storeu_si512(sums + line * block_rows + panel * panel_rows,
                                _mm512_add_epi32(even[line], odd[line]));
    }
}

inline void multiply_few(const Lines<int8_t>& lines, const Matrix& weight, const char* group,
                         int64_t tile, int32_t* sums) {
    switch (lines.count) {
        case 1: multiply_few<1>(lines, weight, group, tile, sums); break;
        case 2: multiply_few<2>(lines, weight, group, tile, sums); break;
        case 3: multiply_few<3>(lines, weight, group, tile, sums); break;
        default: multiply_few<4>(lines, weight, group, tile, sums);
    }
}
#else
constexpr int64_t few_lines = 0;
inline void multiply_few(const Lines<int8_t>&, const Matrix&, const char*, int64_t, int32_t*) {}
#endif

// Of a group of a block: scales and zeros.
struct GroupScales {
    float scales[block_rows], zeros[block_rows];

    GroupScales(const Matrix& weight, const char* group) {
        const char* tail = group + weight.group_bytes() - weight.group_tail_bytes();
        for (int n = 0; n < block_rows; n += lanes) load_scales(tail + n * 2, scales + n);
        const auto* bytes = reinterpret_cast<const uint8_t*>(tail + block_rows * 2);
        for (int n = 0; n < block_rows; ++n)
            zeros[n] = static_cast<float>(weight.has_zeros ? bytes[n] : int4_zero);
    }

  private:
    static void load_scales(const char* halves, float* to) {
#if defined(__AVX512F__)
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves));
        _mm512_storeu_ps(to, _mm512_cvtph_ps(half));
#else
        for (int i = 0; i < lanes; ++i) {
            uint16_t half;
            std::memcpy(&half, halves + i * 2, 2);
            to[i] = from_float16(half);
        }
#endif
    }
};

// Sums [digits][64] of a row with int8, less what their zeros add: sixteen numbers. The difference
// is taken in integers, for both sides are many times as large.
inline F16 join_digits(const int32_t* sums, const int32_t* x_sums, int digits) {
    F16 value = zero();
    for (int digit = 0; digit < digits; ++digit) {
        const F16 part = less(sums + digit * block_rows, int8_zero * x_sums[digit]);
        value = digit ? fma(value, broadcast(128.0f), part) : part;
    }
    return value;
}

// values [64] += scale * (sums - zero * sum of x) of a group, of one row with its digits' sums
// [digits][64]: integers below 2^24 but for the join, so floats take them as they are.
inline void fold_group(float* values, const int32_t* sums, const GroupScales& group,
                       const Rounded& rows, int64_t row, int64_t index, int64_t groups) {
    const int32_t* x_sums = rows.sums + row * rows.digits * groups + index;
    float x_sum = static_cast<float>(x_sums[0]);
    for (int digit = 1; digit < rows.digits; ++digit)
        x_sum = x_sum * 128.0f + static_cast<float>(x_sums[digit * groups]);
    for (int n = 0; n < block_rows; n += lanes) {
        F16 joined = less(sums + n, 0);
        for (int digit = 1; digit < rows.digits; ++digit)
            joined = fma(joined, broadcast(128.0f), less(sums + digit * block_rows + n, 0));
        joined = fma(load(group.zeros + n), broadcast(-x_sum), joined);
        const F16 before = index ? load(values + n) : zero();
        store(values + n, fma(load(group.scales + n), joined, before));
    }
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
