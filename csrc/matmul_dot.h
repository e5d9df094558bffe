// The same products in vector instructions, for levels without a matrix unit.
#pragma once

#include "matmul.h"
#include "matmul_quads.h"
#include "matmul_rows.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// sum += even column * its x + odd column * its x, of 16 rows; both x in the halves of `pair`.
inline F16 add_pair(F16 sum, const bf16* w, uint32_t pair) {
#if defined(__AVX512BF16__)
    const __m512i factor = _mm512_set1_epi32(static_cast<int>(pair));
    const __m512i weights = _mm512_loadu_si512(w);
    __m512bh a, b;
    std::memcpy(&a, &factor, 64);
    std::memcpy(&b, &weights, 64);
    return {_mm512_dpbf16_ps(sum.v, b, a)};
#else
    const float even_x = widen(static_cast<bf16>(pair)), odd_x = widen(static_cast<bf16>(pair >> 16));
    F16 even, odd;
#if defined(__AVX512F__)
    const __m512i both = _mm512_loadu_si512(w);
    even.v = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd.v = _mm512_castsi512_ps(
        _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
#elif defined(__AVX2__)
    const auto* words = reinterpret_cast<const __m256i*>(w);
    const __m256i a = _mm256_loadu_si256(words), b = _mm256_loadu_si256(words + 1);
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(a, high)),
           _mm256_castsi256_ps(_mm256_and_si256(b, high))};
#else
    for (int i = 0; i < lanes; ++i) {
        even.v[i] = widen(w[2 * i]);
        odd.v[i] = widen(w[2 * i + 1]);
    }
#endif
    sum = fma(even, broadcast(even_x), sum);
    return fma(odd, broadcast(odd_x), sum);
#endif
}

// Sums of a product: [lines][64], float32 of bf16 and int32 of bytes.
class ProductUnit {
  public:
    // Lines first .. first + count times some tiles of a block; the lines' tiles begin with number
    // `tile`. Every sum is one chain along K, whatever stands beside it.
    template <typename Number, typename Weight, typename Sum>
    void multiply(const Lines<Number>& lines, int64_t first, int64_t count, int64_t tile,
                  const Weight* weight, int64_t num_tiles, Sum* sums) {
        // As many tiles as stay in the first cache while all lines pass.
        const int64_t most = count <= most_lines ? num_tiles : resident_tiles;
        const int64_t tile_numbers = lines.depth * int64_t{block_rows};
        for (int64_t done = 0; done < num_tiles; done += most) {
            const int64_t part = num_tiles - done < most ? num_tiles - done : most;
            for (int64_t line = 0; line < count; line += most_lines)
                some_lines(lines, first + line, count - line, tile + done,
                           weight + done * tile_numbers, part, done > 0, sums + line * block_rows);
        }
    }

  private:
#if defined(__AVX512F__)
    static constexpr int most_lines = 6, panels = 4;
#else
    static constexpr int most_lines = 4, panels = 1;
#endif
    static constexpr int64_t resident_tiles = 4;

    template <typename Number, typename Weight, typename Sum>
    static void some_lines(const Lines<Number>& lines, int64_t line, int64_t count, int64_t tile,
                           const Weight* weight, int64_t num_tiles, bool adds, Sum* sums) {
        const Number* x = lines.at(line, tile);
        for (int panel = 0; panel < block_panels; panel += panels)
            switch (count < most_lines ? count : most_lines) {
                case 1: chains<1>(x, lines, weight, num_tiles, panel, adds, sums); break;
                case 2: chains<2>(x, lines, weight, num_tiles, panel, adds, sums); break;
                case 3: chains<3>(x, lines, weight, num_tiles, panel, adds, sums); break;
                case 4: chains<4>(x, lines, weight, num_tiles, panel, adds, sums); break;
#if defined(__AVX512F__)
                case 5: chains<5>(x, lines, weight, num_tiles, panel, adds, sums); break;
                case 6: chains<6>(x, lines, weight, num_tiles, panel, adds, sums); break;
#endif
            }
    }

    static F16 start(float) { return zero(); }
    static I16 start(int32_t) { return integers(0); }
    static F16 add(F16 sum, const bf16* w, int32_t x) {
        return add_pair(sum, w, static_cast<uint32_t>(x));
    }
    static I16 add(I16 sum, const uint8_t* w, int32_t x) {
        return add_quads<false>(sum, load_quads(w), x);
    }

    // R lines times a few panels.
    template <int R, typename Number, typename Weight, typename Sum>
    static void chains(const Number* x, const Lines<Number>& lines, const Weight* weight,
                       int64_t num_tiles, int panel, bool adds, Sum* sums) {
        constexpr int in_step = 4 / sizeof(Number);  // columns
        const int depth = lines.depth, steps = depth / in_step;
        const int64_t stride = lines.stride(), panel_numbers = depth * panel_rows;
        decltype(start(Sum{})) acc[R][panels];
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < panels; ++p)
                acc[r][p] = adds ? load(sums + r * block_rows + (panel + p) * panel_rows)
                                 : start(Sum{});
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const Weight* w = weight + (tile * block_panels + panel) * panel_numbers;
            const Number* from = x + tile * depth;
            for (int step = 0; step < steps; ++step)
                for (int r = 0; r < R; ++r) {
                    int32_t together;
                    std::memcpy(&together, from + r * stride + step * in_step, 4);
                    for (int p = 0; p < panels; ++p)
                        acc[r][p] = add(acc[r][p],
                                        w + p * panel_numbers + step * in_step * panel_rows,
                                        together);
                }
        }
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < panels; ++p)
                store(sums + r * block_rows + (panel + p) * panel_rows, acc[r][p]);
    }
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
