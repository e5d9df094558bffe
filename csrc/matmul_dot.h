// The same products in vector instructions, for levels without a matrix unit.
#pragma once

#include "matmul.h"
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
#else
    uint32_t even_bits[lanes], odd_bits[lanes];
    std::memcpy(odd_bits, w, sizeof odd_bits);
    for (int i = 0; i < lanes; ++i) {
        even_bits[i] = odd_bits[i] << 16;
        odd_bits[i] &= 0xffff0000;
    }
    std::memcpy(&even, even_bits, sizeof even);
    std::memcpy(&odd, odd_bits, sizeof odd);
#endif
    sum = fma(even, broadcast(even_x), sum);
    return fma(odd, broadcast(odd_x), sum);
#endif
}

class ProductUnit {
  public:
    template <typename Number, typename Weight, typename Sum>
    void narrow(const Lines<Number>& lines, int64_t line, int64_t tile, const Weight* weight,
                int64_t num_tiles, Sum* sums) {
        multiply(lines, line, tile, weight, num_tiles, 0, block_panels, false, sums);
    }

    template <typename Number, typename Weight, typename Sum>
    void wide(const Lines<Number>& lines, int64_t line, int64_t tile, const Weight* weight,
              int64_t num_tiles, int half, bool adds, Sum* sums) {
        multiply(lines, line, tile, weight, num_tiles, half * 2, 2, adds, sums);
    }

  private:
    template <typename Number, typename Weight, typename Sum>
    void multiply(const Lines<Number>& lines, int64_t line, int64_t tile, const Weight* weight,
                  int64_t num_tiles, int first_panel, int panels, bool adds, Sum* sums) {
        const int most = panels == 2 ? 32 : 16;
        const int64_t left = lines.count - line, count = left < most ? left : most;
        for (int64_t done = 0; done < count; done += 4) {
            const Number* x = lines.at(line + done, tile);
            Sum* out = sums + done * block_rows;
            for (int panel = first_panel; panel < first_panel + panels; panel += 2) {
                switch (count - done) {
                    case 1: pairs<1>(x, lines, weight, num_tiles, panel, adds, out); break;
                    case 2: pairs<2>(x, lines, weight, num_tiles, panel, adds, out); break;
                    case 3: pairs<3>(x, lines, weight, num_tiles, panel, adds, out); break;
                    default: pairs<4>(x, lines, weight, num_tiles, panel, adds, out);
                }
            }
        }
    }

    // R lines times two panels.
    template <int R>
    static void pairs(const bf16* x, const Lines<bf16>& lines, const bf16* weight,
                      int64_t num_tiles, int panel, bool adds, float* sums) {
        F16 acc[R][2];
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < 2; ++p)
                acc[r][p] =
                    adds ? load(sums + r * block_rows + (panel + p) * panel_rows) : zero();
        for (int64_t tile = 0; tile < num_tiles; ++tile)
            for (int step = 0; step < 16; ++step)
                for (int r = 0; r < R; ++r) {
                    uint32_t pair;
                    std::memcpy(&pair, x + r * lines.stride() + tile * 32 + step * 2, 4);
                    for (int p = 0; p < 2; ++p)
                        acc[r][p] = add_pair(
                            acc[r][p], weight + (tile * 4 + panel + p) * 512 + step * 32, pair);
                }
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < 2; ++p)
                store(sums + r * block_rows + (panel + p) * panel_rows, acc[r][p]);
    }

    template <int R>
    static void pairs(const int8_t* x, const Lines<int8_t>& lines, const uint8_t* weight,
                      int64_t num_tiles, int panel, bool adds, int32_t* sums) {
        const int depth = lines.depth, panel_bytes = depth * panel_rows;
        for (int r = 0; r < R; ++r)
            for (int p = panel; p < panel + 2; ++p) {
                int32_t* out = sums + r * block_rows + p * panel_rows;
                const int8_t* line = x + r * lines.stride();
#if defined(__AVX512VNNI__)
                __m512i acc = adds ? _mm512_loadu_si512(out) : _mm512_setzero_si512();
                for (int64_t tile = 0; tile < num_tiles; ++tile)
                    for (int step = 0; step < depth / 4; ++step) {
                        int32_t quad;
                        std::memcpy(&quad, line + tile * depth + step * 4, 4);
                        acc = _mm512_dpbusd_epi32(
                            acc,
                            _mm512_loadu_si512(weight + (tile * 4 + p) * panel_bytes + step * 64),
                            _mm512_set1_epi32(quad));
                    }
                _mm512_storeu_si512(out, acc);
#else
                int32_t acc[panel_rows] = {};
                if (adds) std::memcpy(acc, out, sizeof acc);
                for (int64_t tile = 0; tile < num_tiles; ++tile)
                    for (int step = 0; step < depth / 4; ++step) {
                        const uint8_t* w = weight + (tile * 4 + p) * panel_bytes + step * 64;
                        const int8_t* quad = line + tile * depth + step * 4;
                        for (int lane = 0; lane < panel_rows; ++lane)
                            for (int i = 0; i < 4; ++i) acc[lane] += w[lane * 4 + i] * quad[i];
                    }
                std::memcpy(out, acc, sizeof acc);
#endif
            }
    }
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
