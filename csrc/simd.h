// Sixteen float32 numbers at once, in the instructions of the level this file is compiled for.
//
// Included by the files that are compiled once for each level; all is in the level's namespace. Such
// files use no templates of the standard library: the linker keeps one copy of each instance, which
// may be that of a level that the machine lacks.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "levels.h"

namespace slipstream::SLIPSTREAM_LEVEL {

constexpr Level this_level = Level::SLIPSTREAM_LEVEL;
constexpr int lanes = 16;
using bf16 = uint16_t;  // the high half of a float32

inline float widen(bf16 value) {
    const uint32_t bits = uint32_t{value} << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

// To the nearest, ties to even; NaN stays NaN.
inline bf16 narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>(bits >> 16 | 0x40);
    return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__)

struct F16 {
    __m512 v;
};
inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 maximum(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 minimum(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// a * b + c, rounded once.
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Halves are added, then quarters: one order at every level.
inline float sum(F16 x) {
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline float largest(F16 x) { return _mm512_reduce_max_ps(x.v); }
inline F16 load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline void store(bf16* p, F16 x) {
#if defined(__AVX512BF16__)
    // Rounds as below, but for numbers below 2^-126, which it takes for zero.
    const __m256bh rounded = _mm512_cvtneps_pbh(x.v);
    std::memcpy(p, &rounded, 32);
#else
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
#endif
}
// The nearest integer, ties to even.
inline F16 round(F16 x) { return {_mm512_roundscale_ps(x.v, 0)}; }
// x * 2^n, of integral n with x * 2^n a normal number or x zero.
inline F16 scale_by_power(F16 x, F16 n) { return {_mm512_scalef_ps(x.v, n.v)}; }

#elif defined(__AVX2__)

struct F16 {
    __m256 a, b;
};
inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F16 operator+(F16 x, F16 y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
inline F16 operator-(F16 x, F16 y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline F16 operator*(F16 x, F16 y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline F16 operator/(F16 x, F16 y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
inline F16 maximum(F16 x, F16 y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
inline F16 minimum(F16 x, F16 y) {
    return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
inline F16 fma(F16 x, F16 y, F16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline float sum(F16 x) {
    const __m256 half = _mm256_add_ps(x.a, x.b);
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline float largest(F16 x) {
    const __m256 half = _mm256_max_ps(x.a, x.b);
    __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline F16 load(const bf16* p) {
    const auto* words = reinterpret_cast<const __m128i*>(p);
    const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128(words));
    const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128(words + 1));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
inline __m256i rounded_to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256 chosen =
        _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan);
    return _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
}
inline void store(bf16* p, F16 x) {
    const __m256i pairs = _mm256_packus_epi32(rounded_to_bf16(x.a), rounded_to_bf16(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(pairs, 0xd8));
}
inline F16 round(F16 x) { return {_mm256_round_ps(x.a, 0x8), _mm256_round_ps(x.b, 0x8)}; }
inline __m256 scale_by_power(__m256 x, __m256 n) {
    const __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
}
inline F16 scale_by_power(F16 x, F16 n) {
    return {scale_by_power(x.a, n.a), scale_by_power(x.b, n.b)};
}

#else

struct F16 {
    float v[lanes];
};
template <typename Op>
inline F16 each(Op op) {
    F16 out;
    for (int i = 0; i < lanes; ++i) out.v[i] = op(i);
    return out;
}
inline F16 broadcast(float x) { return each([&](int) { return x; }); }
inline F16 zero() { return broadcast(0.0f); }
inline F16 load(const float* p) { return each([&](int i) { return p[i]; }); }
inline void store(float* p, F16 x) { std::memcpy(p, x.v, sizeof x.v); }
inline F16 operator+(F16 a, F16 b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline F16 operator-(F16 a, F16 b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline F16 operator*(F16 a, F16 b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline F16 operator/(F16 a, F16 b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline F16 maximum(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 minimum(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
// Rounded twice: without the instruction the library's exact one is a hundred times slower.
inline F16 fma(F16 a, F16 b, F16 c) { return a * b + c; }
inline float sum(F16 x) {
    for (int half = lanes / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
    return x.v[0];
}
inline float largest(F16 x) {
    float most = x.v[0];
    for (int i = 1; i < lanes; ++i) most = x.v[i] > most ? x.v[i] : most;
    return most;
}
inline F16 load(const bf16* p) { return each([&](int i) { return widen(p[i]); }); }
inline void store(bf16* p, F16 x) {
    for (int i = 0; i < lanes; ++i) p[i] = narrow(x.v[i]);
}
inline F16 round(F16 x) { return each([&](int i) { return __builtin_rintf(x.v[i]); }); }
inline F16 scale_by_power(F16 x, F16 n) {
    return each([&](int i) {
        const uint32_t bits = static_cast<uint32_t>(static_cast<int>(n.v[i]) + 127) << 23;
        float power;
        std::memcpy(&power, &bits, 4);
        return x.v[i] * power;
    });
}

#endif

// Sixteen integers at once.
#if defined(__AVX512F__)

struct I16 {
    __m512i v;
};
inline I16 integers(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I16 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, I16 x) { _mm512_storeu_si512(p, x.v); }
inline I16 load_bytes(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I16 operator-(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I16 operator*(I16 a, I16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
template <int bits>
inline I16 shift_left(I16 x) {
    return {_mm512_slli_epi32(x.v, bits)};
}
template <int bits>
inline I16 shift_right(I16 x) {  // keeps the sign
    return {_mm512_srai_epi32(x.v, bits)};
}
inline I16 operator&(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I16 maximum(I16 a, I16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
// To the nearest, ties to even.
inline I16 nearest(F16 x) { return {_mm512_cvtps_epi32(x.v)}; }
inline F16 floats(I16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
// The floats that have these bits.
inline F16 as_floats(I16 x) { return {_mm512_castsi512_ps(x.v)}; }

#elif defined(__AVX2__)

struct I16 {
    __m256i a, b;
};
inline I16 integers(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I16 load(const int32_t* p) {
    const auto* words = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
inline void store(int32_t* p, I16 x) {
    auto* words = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(words, x.a);
    _mm256_storeu_si256(words + 1, x.b);
}
inline I16 load_bytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline I16 operator+(I16 x, I16 y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline I16 operator-(I16 x, I16 y) {
    return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
inline I16 operator*(I16 x, I16 y) {
    return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
template <int bits>
inline I16 shift_left(I16 x) {
    return {_mm256_slli_epi32(x.a, bits), _mm256_slli_epi32(x.b, bits)};
}
template <int bits>
inline I16 shift_right(I16 x) {
    return {_mm256_srai_epi32(x.a, bits), _mm256_srai_epi32(x.b, bits)};
}
inline I16 operator&(I16 x, I16 y) {
    return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
inline I16 maximum(I16 x, I16 y) {
    return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
inline I16 nearest(F16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F16 floats(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F16 as_floats(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

#else

struct I16 {
    int32_t v[lanes];
};
template <typename Op>
inline I16 each_integer(Op op) {
    I16 out;
    for (int i = 0; i < lanes; ++i) out.v[i] = op(i);
    return out;
}
inline I16 integers(int32_t x) { return each_integer([&](int) { return x; }); }
inline I16 load(const int32_t* p) { return each_integer([&](int i) { return p[i]; }); }
inline void store(int32_t* p, I16 x) { std::memcpy(p, x.v, sizeof x.v); }
inline I16 load_bytes(const uint8_t* p) { return each_integer([&](int i) { return p[i]; }); }
inline I16 operator+(I16 a, I16 b) { return each_integer([&](int i) { return a.v[i] + b.v[i]; }); }
inline I16 operator-(I16 a, I16 b) { return each_integer([&](int i) { return a.v[i] - b.v[i]; }); }
inline I16 operator*(I16 a, I16 b) { return each_integer([&](int i) { return a.v[i] * b.v[i]; }); }
template <int bits>
inline I16 shift_left(I16 x) {
    return each_integer([&](int i) { return x.v[i] * (1 << bits); });
}
template <int bits>
inline I16 shift_right(I16 x) {
    return each_integer([&](int i) { return x.v[i] >> bits; });
}
inline I16 operator&(I16 a, I16 b) { return each_integer([&](int i) { return a.v[i] & b.v[i]; }); }
inline I16 maximum(I16 a, I16 b) {
    return each_integer([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline I16 nearest(F16 x) {
    return each_integer([&](int i) { return static_cast<int32_t>(__builtin_rintf(x.v[i])); });
}
inline F16 floats(I16 x) {
    float values[lanes];
    for (int i = 0; i < lanes; ++i) values[i] = static_cast<float>(x.v[i]);
    return load(values);
}
inline F16 as_floats(I16 x) {
    F16 out;
    std::memcpy(out.v, x.v, sizeof out.v);
    return out;
}

#endif

// e^x to about 2 ulp; 0 below -87, and 2^127 is the most.
inline F16 exp(F16 x) {
    const F16 least = broadcast(-87.0f), most = broadcast(88.0f);
    const F16 bounded = minimum(maximum(x, least), most);
    const F16 n = round(bounded * broadcast(1.44269504f));
    // ln 2 in two parts, so that the difference is exact.
    const F16 r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), bounded));
    F16 p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p, r * r, r + broadcast(1.0f));
    const F16 e = scale_by_power(p, n);
#if defined(__AVX512F__)
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, least.v, _CMP_GE_OQ), e.v)};
#elif defined(__AVX2__)
    return {_mm256_and_ps(e.a, _mm256_cmp_ps(x.a, least.a, _CMP_GE_OQ)),
            _mm256_and_ps(e.b, _mm256_cmp_ps(x.b, least.b, _CMP_GE_OQ))};
#else
    float in[lanes], out[lanes];
    store(in, x);
    store(out, e);
    for (int i = 0; i < lanes; ++i) out[i] = in[i] >= -87.0f ? out[i] : 0.0f;
    return load(out);
#endif
}

// The first `count` (0 to 16) numbers at p, then zeros.
template <typename Number>
inline F16 load_first(const Number* p, int count) {
    Number whole[lanes] = {};
    std::memcpy(whole, p, count * sizeof(Number));
    return load(whole);
}
template <typename Number>
inline void store_first(Number* p, F16 x, int count) {
    Number whole[lanes];
    store(whole, x);
    std::memcpy(p, whole, count * sizeof(Number));
}

// Up to a vector of the `count` numbers that are left.
template <typename Number>
inline F16 load_some(const Number* p, int64_t count) {
    return count >= lanes ? load(p) : load_first(p, count > 0 ? static_cast<int>(count) : 0);
}
template <typename Number>
inline void store_some(Number* p, F16 x, int64_t count) {
    if (count >= lanes) store(p, x);
    else if (count > 0) store_first(p, x, static_cast<int>(count));
}

// Rounded to a type and back.
template <typename Number>
inline F16 rounded(F16 x) {
    if constexpr (sizeof(Number) == 4) {
        return x;
    } else {
        bf16 narrow[lanes];
        store(narrow, x);
        return load(narrow);
    }
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
