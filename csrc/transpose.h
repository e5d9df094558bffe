// A square of 16 x 16 numbers of 4 bytes, turned. Compiled for each level.
#pragma once

#include "simd.h"

namespace slipstream::SLIPSTREAM_LEVEL {

#if defined(__AVX512F__)

inline void transpose(F16 (&m)[lanes]) {
    __m512 pairs[lanes], quads[lanes];
#pragma GCC unroll 8
    for (int i = 0; i < lanes; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(m[i].v, m[i + 1].v);
        pairs[i + 1] = _mm512_unpackhi_ps(m[i].v, m[i + 1].v);
    }
#pragma GCC unroll 4
    for (int i = 0; i < lanes; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const __m512d a = _mm512_castps_pd(pairs[i + j]), b = _mm512_castps_pd(pairs[i + 2 + j]);
            quads[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            quads[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    // Quarters of 4 columns: quads[4 r + c] holds columns c, c + 4, ... of rows 4 r to 4 r + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512 upper_even = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);
        const __m512 upper_odd = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xdd);
        const __m512 lower_even = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);
        const __m512 lower_odd = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xdd);
        m[c].v = _mm512_shuffle_f32x4(upper_even, lower_even, 0x88);
        m[c + 8].v = _mm512_shuffle_f32x4(upper_even, lower_even, 0xdd);
        m[c + 4].v = _mm512_shuffle_f32x4(upper_odd, lower_odd, 0x88);
        m[c + 12].v = _mm512_shuffle_f32x4(upper_odd, lower_odd, 0xdd);
    }
}

#elif defined(__AVX2__)

inline void transpose_quarter(__m256 (&m)[8]) {
    __m256 pairs[8], quads[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(m[i], m[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(m[i], m[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            quads[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
            quads[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
        }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        m[c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x20);
        m[c + 4] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x31);
    }
}

inline void transpose(F16 (&m)[lanes]) {
    __m256 quarters[2][2][8];
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 8; ++i) {
            quarters[half][0][i] = m[half * 8 + i].a;
            quarters[half][1][i] = m[half * 8 + i].b;
        }
    for (auto& half : quarters)
        for (auto& quarter : half) transpose_quarter(quarter);
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 8; ++i)
            m[half * 8 + i] = {quarters[0][half][i], quarters[1][half][i]};
}

#else

inline void transpose(F16 (&m)[lanes]) {
    for (int i = 0; i < lanes; ++i)
        for (int j = 0; j < i; ++j) {
            const float kept = m[i].v[j];
            m[i].v[j] = m[j].v[i];
            m[j].v[i] = kept;
        }
}

#endif

// The 64 bytes at `at` of 16 rows, turned: to[i, row] is the i-th number of 4 bytes.
inline void transpose_rows(const char* const (&rows)[lanes], int64_t at, float* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // A quarter fits into the registers.
    for (int half = 0; half < 2; ++half)
        for (int part = 0; part < 2; ++part) {
            __m256 m[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i)
                m[i] = _mm256_loadu_ps(
                    reinterpret_cast<const float*>(rows[half * 8 + i] + at + part * 32));
            transpose_quarter(m);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i)
                _mm256_storeu_ps(to + (part * 8 + i) * lanes + half * 8, m[i]);
        }
#else
    F16 square[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) std::memcpy(&square[i], rows[i] + at, sizeof square[i]);
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) store(to + i * lanes, square[i]);
#endif
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
