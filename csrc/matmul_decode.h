// Integer weights as floats. Compiled for each level.
#pragma once

#include "matmul.h"
#include "simd.h"

namespace slipstream::SLIPSTREAM_LEVEL {

inline float from_float16(uint16_t half) {
    const uint32_t exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    if (!exponent) return static_cast<float>(mantissa) * 0x1p-24f;
    const uint32_t bits = (exponent + 112) << 23 | mantissa << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    return half >> 15 ? -value : value;
}

// One panel of a tile of i8 [32 columns][16 rows] -> pairs of bf16, as `Storage::bf16` has them.
// Integers up to 256 are bf16 numbers: nothing is rounded.
inline void decode_int8_panel(const char* from, bf16* to) {
#if defined(__AVX512F__)
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    for (int pair = 0; pair < 16; ++pair) {
        const auto* bytes = reinterpret_cast<const __m128i*>(from + pair * 32);
        const __m512i even = _mm512_castps_si512(
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes))));
        const __m512i odd = _mm512_castps_si512(
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1))));
        // (high & odd) | (even >> 16)
        const __m512i both =
            _mm512_ternarylogic_epi32(high, odd, _mm512_srli_epi32(even, 16), 0xea);
        _mm512_storeu_si512(to + pair * 32, both);
    }
#else
    for (int column = 0; column < 32; ++column)
        for (int row = 0; row < panel_rows; ++row)
            to[column / 2 * 32 + row * 2 + column % 2] =
                narrow(static_cast<float>(static_cast<int8_t>(from[column * 16 + row])));
#endif
}

// bf16 of the values -`offset` to 15 - `offset`, twice: the fifth bit of an index does not matter.
struct Int4Table {
#if defined(__AVX512F__)
    __m512i entries;
#else
    bf16 entries[16];
#endif
    explicit Int4Table(int offset) {
        bf16 values[32];
        for (int i = 0; i < 32; ++i) values[i] = narrow(static_cast<float>(i % 16 - offset));
        std::memcpy(&entries, values, sizeof entries);
    }
};

// One panel of a tile of i4 -> pairs of bf16.
inline void decode_int4_panel(const char* from, bf16* to, const Int4Table& table) {
#if defined(__AVX512F__)
    for (int step = 0; step < 4; ++step) {
        const __m512i words = _mm512_loadu_si512(from + step * 64);
        bf16* out = to + step * 128;
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(words, table.entries));
        _mm512_storeu_si512(
            out + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table.entries));
        _mm512_storeu_si512(
            out + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table.entries));
        _mm512_storeu_si512(
            out + 96, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table.entries));
    }
#else
    for (int step = 0; step < 4; ++step)
        for (int word = 0; word < 32; ++word) {
            uint16_t bits;
            std::memcpy(&bits, from + step * 64 + word * 2, 2);
            for (int pair = 0; pair < 4; ++pair)
                to[(step * 4 + pair) * 32 + word] = table.entries[bits >> 4 * pair & 15];
        }
#endif
}

// The scales of a group of a block, [64], and each times its zero where there are zeros.
inline void group_scales(const Matrix& weight, const char* tail, float* scales, float* products) {
    for (int row = 0; row < block_rows; ++row) {
        uint16_t half;
        std::memcpy(&half, tail + row * 2, 2);
        scales[row] = from_float16(half);
    }
    if (!weight.has_zeros) return;
    for (int row = 0; row < block_rows; ++row)
        products[row] =
            scales[row] * static_cast<float>(static_cast<uint8_t>(tail[block_rows * 2 + row]));
}

// A group of a block as tiles of bf16 in `to`; of stored bf16 those themselves.
inline const bf16* decode_group(const Matrix& weight, const char* group, bf16* to) {
    if (weight.storage == Storage::bf16) return reinterpret_cast<const bf16*>(group);
    const int64_t panels = weight.tiles_per_group() * block_panels;
    const int bytes = tile_shape(weight.storage).panel_bytes();
    const Int4Table table(weight.has_zeros ? 0 : 8);
    for (int64_t panel = 0; panel < panels; ++panel) {
        if (weight.storage == Storage::i8) decode_int8_panel(group + panel * bytes, to + panel * 512);
        else decode_int4_panel(group + panel * bytes, to + panel * 512, table);
    }
    return to;
}

// A block as float32 [padded columns][64]; of integers with their scales but those of whole rows.
inline void decode_block(const Matrix& weight, const char* block, float* to) {
    const TileShape shape = tile_shape(weight.storage);
    const bool is_i4 = weight.storage == Storage::i4;
    const Int4Table table(weight.has_zeros ? 0 : 8);
    bf16 pairs[512];
    float scales[block_rows], products[block_rows];
    for (int64_t tile = 0; tile < weight.num_tiles(); ++tile) {
        const int64_t group = tile / weight.tiles_per_group();
        const char* start = block + group * weight.group_bytes();
        const char* from = start + tile % weight.tiles_per_group() * shape.block_bytes();
        if (is_i4 && tile % weight.tiles_per_group() == 0)
            group_scales(weight, start + weight.group_bytes() - weight.group_tail_bytes(), scales,
                         products);
        for (int panel = 0; panel < block_panels; ++panel) {
            if (is_i4) decode_int4_panel(from + panel * shape.panel_bytes(), pairs, table);
            else decode_int8_panel(from + panel * shape.panel_bytes(), pairs);
            for (int column = 0; column < 32; ++column)
                for (int row = 0; row < panel_rows; ++row) {
                    const int place = panel * panel_rows + row;
                    float value = widen(pairs[column / 2 * 32 + row * 2 + column % 2]);
                    if (is_i4) {
                        value *= scales[place];
                        if (weight.has_zeros) value -= products[place];
                    }
                    to[(tile * 32 + column) * block_rows + place] = value;
                }
        }
    }
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
