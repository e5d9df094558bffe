// The same products in vector instructions, for levels without a matrix unit.
#pragma once

#include "matmul.h"
#include "matmul_quads.h"
#include "matmul_rows.h"

namespace slipstream::SLIPSTREAM_LEVEL {

#if defined(__AVX512BF16__)
// sum += even column * its x + odd column * its x, of 16 rows; both x in the halves of `pair`.
inline F16 add_pair(F16 sum, const bf16* w, int32_t pair) {
    const __m512i factor = _mm512_set1_epi32(pair), weights = _mm512_loadu_si512(w);
    __m512bh a, b;
    std::memcpy(&a, &factor, 64);
    std::memcpy(&b, &weights, 64);
    return {_mm512_dpbf16_ps(sum.v, b, a)};
}
#endif

// Two columns of 16 rows of bf16, as floats.
struct Columns {
    F16 even, odd;
};
inline Columns widen_columns(const bf16* w) {
#if defined(__AVX512F__)
    const __m512i both = _mm512_loadu_si512(w);
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(both, high))}};
#elif defined(__AVX2__)
    const auto* words = reinterpret_cast<const __m256i*>(w);
    const __m256i a = _mm256_loadu_si256(words), b = _mm256_loadu_si256(words + 1);
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
             _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(a, high)),
             _mm256_castsi256_ps(_mm256_and_si256(b, high))}};
#else
    Columns columns;
    for (int i = 0; i < lanes; ++i) {
        columns.even.v[i] = widen(w[2 * i]);
        columns.odd.v[i] = widen(w[2 * i + 1]);
    }
    return columns;
#endif
}

// Sums of a product: [lines][64], float32 of bf16 and int32 of bytes.
class ProductUnit {
  public:
    // Lines first .. first + count times some tiles of a block; the lines' tiles begin with number
    // `tile`. Every sum is one chain along K, whatever other lines there are.
    template <typename Number, typename Weight, typename Sum>
    void multiply(const Lines<Number>& lines, int64_t first, int64_t count, int64_t tile,
                  const Weight* weight, int64_t num_tiles, Sum* sums) {
        // As many tiles as stay in the first cache while all lines pass.
        constexpr int64_t most_lines = most_lines_of(sizeof(Number));
        const int64_t parts = (count + most_lines - 1) / most_lines;
        const int64_t most = parts == 1 ? num_tiles : resident_tiles;
        const int64_t tile_numbers = lines.depth * int64_t{block_rows};
        for (int64_t done = 0; done < num_tiles; done += most) {
            const int64_t some = num_tiles - done < most ? num_tiles - done : most;
            // In parts of nearly one size: sums of one line alone wait for each other.
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t line = count * part / parts, next = count * (part + 1) / parts;
                some_lines(lines, first + line, next - line, tile + done,
                           weight + done * tile_numbers, some, done > 0, part == 0,
                           sums + line * block_rows);
            }
        }
    }

  private:
    // Sums of so many lines times so many panels fit into the registers together with the operands;
    // floats are multiplied by the even and the odd columns of bf16. Sums of only one line of floats
    // would wait for each other.
#if defined(__AVX512F__)
    static constexpr int most_lines_of(size_t) { return 6; }
    static constexpr int panels_of(int, size_t) { return 4; }
#else
    static constexpr int most_lines_of(size_t number_bytes) { return number_bytes == 4 ? 5 : 6; }
    static constexpr int panels_of(int lines, size_t number_bytes) {
        return number_bytes == 4 && lines == 1 ? 4 : 1;
    }
#endif
    static constexpr int64_t resident_tiles = 4;

    template <typename Number, typename Weight, typename Sum>
    static void some_lines(const Lines<Number>& lines, int64_t line, int64_t count, int64_t tile,
                           const Weight* weight, int64_t num_tiles, bool adds, bool asks_ahead,
                           Sum* sums) {
        const Number* x = lines.at(line, tile);
        switch (count) {
            case 1: chains<1>(x, lines, weight, num_tiles, adds, asks_ahead, sums); break;
            case 2: chains<2>(x, lines, weight, num_tiles, adds, asks_ahead, sums); break;
            case 3: chains<3>(x, lines, weight, num_tiles, adds, asks_ahead, sums); break;
            case 4: chains<4>(x, lines, weight, num_tiles, adds, asks_ahead, sums); break;
            case 5: chains<5>(x, lines, weight, num_tiles, adds, asks_ahead, sums); break;
            case 6: chains<6>(x, lines, weight, num_tiles, adds, asks_ahead, sums); break;
        }
    }

    // R lines. Loops over them and over panels are unrolled: only so all sums stay in registers.
    template <int R, typename Number, typename Weight, typename Sum>
    static void chains(const Number* x, const Lines<Number>& lines, const Weight* weight,
                       int64_t num_tiles, bool adds, bool asks_ahead, Sum* sums) {
        constexpr int panels = panels_of(R, sizeof(Number));
        const int depth = lines.depth;
        const int64_t stride = lines.stride(), panel_numbers = depth * panel_rows;
        // From memory all of a tile before the next one: that is the order of its addresses.
        const int64_t run = asks_ahead && panels < block_panels ? 1 : num_tiles;
        for (int64_t first = 0; first < num_tiles; first += run)
            for (int panel = 0; panel < block_panels; panel += panels) {
                Sum* own = sums + panel * panel_rows;
                decltype(load(sums)) acc[R][panels];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                    for (int p = 0; p < panels; ++p)
                        acc[r][p] = adds || first ? load(own + r * block_rows + p * panel_rows)
                                                  : start(sums);
                for (int64_t tile = first; tile < first + run; ++tile) {
                    const Weight* w = weight + (tile * block_panels + panel) * panel_numbers;
                    if (asks_ahead) look_ahead<panels * 1024>(w);
                    multiply_tile(x + tile * depth, stride, depth, w, acc);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                    for (int p = 0; p < panels; ++p)
                        store(own + r * block_rows + p * panel_rows, acc[r][p]);
            }
    }

    static F16 start(const float*) { return zero(); }
    static I16 start(const int32_t*) { return integers(0); }

    template <int R, int panels>
    static inline __attribute__((always_inline)) void multiply_tile(
        const Digit* x, int64_t stride, int depth, const uint8_t* w, I16 (&acc)[R][panels]) {
        for (int k = 0; k < depth; k += 4) {
            add_quads<0>(x + k, stride, depth, w + k * panel_rows, acc);
            if (quad_parts == 2) add_quads<1>(x + k + 2, stride, depth, w + k * panel_rows, acc);
        }
    }
    template <int part, int R, int panels>
    static inline __attribute__((always_inline)) void add_quads(
        const Digit* x, int64_t stride, int depth, const uint8_t* w, I16 (&acc)[R][panels]) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const int32_t digits = digits_at(x + r * stride);
#pragma GCC unroll 8
            for (int p = 0; p < panels; ++p)
                acc[r][p] = add_part(
                    acc[r][p], part_of<part>(load_quads(w + p * depth * panel_rows)), digits);
        }
    }

    template <int R, int panels>
    static inline __attribute__((always_inline)) void multiply_tile(
        const float* x, int64_t stride, int depth, const bf16* w, F16 (&acc)[R][panels]) {
        for (int k = 0; k < depth; k += 2)
#pragma GCC unroll 8
            for (int p = 0; p < panels; ++p) {
                const Columns columns = widen_columns(w + (p * depth + k) * panel_rows);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const float* at = x + r * stride + k;
                    acc[r][p] = fma(columns.even, broadcast(at[0]), acc[r][p]);
                    acc[r][p] = fma(columns.odd, broadcast(at[1]), acc[r][p]);
                }
            }
    }

#if defined(__AVX512BF16__)
    template <int R, int panels>
    static inline __attribute__((always_inline)) void multiply_tile(
        const bf16* x, int64_t stride, int depth, const bf16* w, F16 (&acc)[R][panels]) {
        for (int k = 0; k < depth; k += 2)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                int32_t pair;
                std::memcpy(&pair, x + r * stride + k, 4);
#pragma GCC unroll 8
                for (int p = 0; p < panels; ++p)
                    acc[r][p] = add_pair(acc[r][p], w + (p * depth + k) * panel_rows, pair);
            }
    }
#endif
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
