// The same products in vector instructions, for levels without a matrix unit.
#pragma once

#include "matmul.h"
#include "matmul_decode.h"
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

template <int R>
void multiply_pairs(const bf16* x, int64_t stride, const bf16* tiles, int64_t num_tiles,
                    float* sums) {
    F16 acc[R][block_panels];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < block_panels; ++p) acc[r][p] = zero();
    for (int64_t tile = 0; tile < num_tiles; ++tile)
        for (int step = 0; step < 16; ++step)
            for (int r = 0; r < R; ++r) {
                uint32_t pair;
                std::memcpy(&pair, x + r * stride + tile * 32 + step * 2, 4);
                for (int p = 0; p < block_panels; ++p)
                    acc[r][p] = add_pair(acc[r][p], tiles + (tile * 4 + p) * 512 + step * 32, pair);
            }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < block_panels; ++p)
            store(sums + r * block_rows + p * panel_rows, acc[r][p]);
}

class TileUnit {
  public:
    explicit TileUnit(int64_t) {}

    void narrow(const Matrix& weight, const char* group, const PackedRows& rows, int64_t index,
                int count, bf16* decoded, float* sums) {
        // Tile by tile the sums would have to be kept in memory: the whole group is decoded.
        if (weight.storage != Storage::bf16)
            decoded = static_cast<bf16*>(
                scratch(Scratch::weights, weight.tiles_per_group() * block_panels * 1024));
        wide(weight, decode_group(weight, group, decoded), rows, index, 0, count, sums);
    }

    void wide(const Matrix& weight, const bf16* tiles, const PackedRows& rows, int64_t index,
              int64_t row, int count, float* sums) {
        const int64_t num_tiles = weight.tiles_per_group();
        const bf16* x = rows.at(row) + index * num_tiles * 32;
        for (int done = 0; done < count; done += 4) {
            const int left = count - done;
            const auto multiply = left == 1   ? multiply_pairs<1>
                                  : left == 2 ? multiply_pairs<2>
                                  : left == 3 ? multiply_pairs<3>
                                              : multiply_pairs<4>;
            multiply(x + done * rows.columns, rows.columns, tiles, num_tiles,
                     sums + done * block_rows);
        }
    }

    void integers(const Matrix& weight, int64_t block, const RoundedRows& rows, int64_t row,
                  int count, [[maybe_unused]] const int32_t* row_sums, int32_t* sums) {
        const int64_t num_tiles = weight.num_tiles();
        for (int i = 0; i < count; ++i) {
            const int8_t* x = rows.values + (row + i) * rows.columns;
            const char* w = weight.block(block);
            int32_t* out = sums + i * block_rows;
#if defined(__AVX512VNNI__)
            // The instruction multiplies unsigned by signed: 128 more of x, and as much less after.
            __m512i acc[block_panels];
            for (int p = 0; p < block_panels; ++p)
                acc[p] = _mm512_mullo_epi32(_mm512_loadu_si512(row_sums + p * panel_rows),
                                            _mm512_set1_epi32(-128));
            for (int64_t tile = 0; tile < num_tiles; ++tile, w += 4096)
                for (int step = 0; step < 16; ++step) {
                    int32_t quad;
                    std::memcpy(&quad, x + tile * 64 + step * 4, 4);
                    const __m512i factor =
                        _mm512_set1_epi32(quad ^ static_cast<int32_t>(0x80808080));
                    for (int p = 0; p < block_panels; ++p)
                        acc[p] = _mm512_dpbusd_epi32(
                            acc[p], factor, _mm512_loadu_si512(w + p * 1024 + step * 64));
                }
            for (int p = 0; p < block_panels; ++p)
                _mm512_storeu_si512(out + p * panel_rows, acc[p]);
#else
            for (int n = 0; n < block_rows; ++n) out[n] = 0;
            for (int64_t tile = 0; tile < num_tiles; ++tile, w += 4096)
                for (int p = 0; p < block_panels; ++p)
                    for (int step = 0; step < 16; ++step)
                        for (int lane = 0; lane < 64; ++lane)
                            out[p * panel_rows + lane / 4] +=
                                static_cast<int8_t>(w[p * 1024 + step * 64 + lane]) *
                                x[tile * 64 + step * 4 + lane % 4];
#endif
        }
    }
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
