// Which numbers attention multiplies, and how. Compiled for each level.
//
// Both products (queries by keys, weights by values) are of one form: rows of the left factor lie
// one after the other; the right factor is tiles of 16 steps of 16 lanes of 4 bytes, where a lane
// is a column and a step one number along the sum (`Floats`) or two (`Pairs`).
#pragma once

#include "attention.h"
#include "simd.h"

namespace slipstream::SLIPSTREAM_LEVEL {

constexpr int tile_steps = 16, tile_bytes = tile_steps * lanes * 4;
constexpr int block_tokens = 64;   // keys that are packed at once; spans are rounded to these
constexpr int split_tokens = 512;  // parts of a context that are weighed by themselves
constexpr int most_lines = 32;     // of queries that are multiplied at once
constexpr int few_lines = 16;      // up to which keys and values are not turned into right factors
// From one line's scores and weights to the next's: lines a power of two apart would share the few
// places of the first cache that such addresses have.
constexpr int line_tokens = split_tokens + 32;

inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// A product: lines of `a` times `panels` of 16 columns, each `tiles` long -> out [lines, 16 panels].
// With few lines the memory of `a` and `out` still has room for 16, and for 32 beyond that.
struct Product {
    int lines;
    const void* a;
    int64_t a_stride;  // bytes
    const char* b;
    int64_t panel_stride, tile_stride;  // bytes
    int64_t tiles, panels;
    float* out;
    int64_t out_stride;  // numbers
};

// float32 factors.
struct Floats {
    using Number = float;
    static constexpr int in_lane = 1;

    static F16 add(F16 sum, const char* a, const char* b) {
        float factor;
        std::memcpy(&factor, a, 4);
        return fma(broadcast(factor), load(reinterpret_cast<const float*>(b)), sum);
    }
    static void put(float* to, F16 x) { store(to, x); }
};

#if defined(__AVX512BF16__)
// bfloat16 factors, two at a time; sums are float32.
struct Pairs {
    using Number = bf16;
    static constexpr int in_lane = 2;

    static F16 add(F16 sum, const char* a, const char* b) {
        int pair;
        std::memcpy(&pair, a, 4);
        const __m512i factor = _mm512_set1_epi32(pair), others = _mm512_loadu_si512(b);
        __m512bh x, y;
        std::memcpy(&x, &factor, 64);
        std::memcpy(&y, &others, 64);
        return {_mm512_dpbf16_ps(sum.v, x, y)};
    }
    static void put(bf16* to, F16 x) {
        const __m256bh rounded = _mm512_cvtneps_pbh(x.v);
        std::memcpy(to, &rounded, 32);
    }
};
#endif

// Lines and panels whose sums fit into the registers together with the operands.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int lines_at_once = 6;
constexpr int panels_at_once(int lines) { return lines == 1 ? 4 : lines <= 3 ? 2 : 1; }
#else
constexpr int lines_at_once = 4;
constexpr int panels_at_once(int) { return 4; }
#endif

template <typename Mode, int R>
inline void multiply_lines(const Product& product, int64_t line, int64_t panel, int width) {
    constexpr int P = panels_at_once(R);
    const char* a = static_cast<const char*>(product.a) + line * product.a_stride;
    const char* b = product.b + panel * product.panel_stride;
    float* out = product.out + line * product.out_stride + panel * lanes;
    for (int first = 0; first < width; first += P) {
        F16 sums[R][P];
        // Where there are fewer panels the last is multiplied again instead.
        int64_t at[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            at[p] = (first + p < width ? first + p : width - 1) * product.panel_stride;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][p] = zero();
        }
        for (int64_t tile = 0; tile < product.tiles; ++tile)
            for (int step = 0; step < tile_steps; ++step) {
                const char* factor = a + (tile * tile_steps + step) * 4;
                const char* others = b + tile * product.tile_stride + step * 64;
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int p = 0; p < P; ++p)
                        sums[r][p] =
                            Mode::add(sums[r][p], factor + r * product.a_stride, others + at[p]);
            }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p)
                if (first + p < width)
                    store(out + r * product.out_stride + (first + p) * lanes, sums[r][p]);
    }
}

// In vector instructions. All lines take a few panels, which stay in the first cache.
template <typename Mode>
inline void multiply_vectors(const Product& product) {
    const int parts = (product.lines + lines_at_once - 1) / lines_at_once;
    const int unit = panels_at_once(product.lines < 2 ? 1 : 2);
    for (int64_t panel = 0; panel < product.panels; panel += unit) {
        const int64_t left = product.panels - panel;
        const int width = static_cast<int>(left < unit ? left : unit);
        for (int part = 0; part < parts; ++part) {
            const int line = product.lines * part / parts;
            const int count = product.lines * (part + 1) / parts - line;
            const auto multiply = count == 1   ? multiply_lines<Mode, 1>
                                  : count == 2 ? multiply_lines<Mode, 2>
                                  : count == 3 ? multiply_lines<Mode, 3>
                                  : count == 4 ? multiply_lines<Mode, 4>
                                  : count == 5 ? multiply_lines<Mode, lines_at_once < 5 ? 1 : 5>
                                               : multiply_lines<Mode, lines_at_once < 6 ? 1 : 6>;
            multiply(product, line, panel, width);
        }
    }
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
