// What sampling needs beyond simd.h: comparisons, integers, and the noise of a request.
//
// Noise is Philox4x32-10 (Salmon et al. 2011), keyed and counted as the package's plain torch does
// it: the same words, bit for bit. Token v has word v % 4 of counter v / 4.
#pragma once

#include "sampling.h"
#include "simd.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Lane i of such masks is bit i.
#if defined(__AVX512F__)

struct U16 {
    __m512i v;
};
inline unsigned greater(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline unsigned at_least(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline unsigned equal(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// x where key >= least, else 0.
inline F16 where_at_least(F16 key, F16 least, F16 x) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(key.v, least.v, _CMP_GE_OQ), x.v)};
}
// Writes the lanes of the mask one after the other, and arbitrary numbers after them.
inline int64_t append(float* p, F16 x, unsigned mask) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), x.v));
    return __builtin_popcount(mask);
}
inline U16 words(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline U16 load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(uint32_t* p, U16 x) { _mm512_storeu_si512(p, x.v); }
inline U16 operator+(U16 a, U16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline U16 operator^(U16 a, U16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
// The two words of each product.
inline void multiply(U16 a, uint32_t by, U16& high, U16& low) {
    const __m512i factor = _mm512_set1_epi64(by);
    const __m512i even = _mm512_mul_epu32(a.v, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), factor);
    low.v = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    high.v = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
// Turns each square of four lanes: lane 4 i + j of out[k] is lane 4 i + k of w[j].
inline void transpose(const U16 (&w)[4], U16 (&out)[4]) {
    const __m512i a = _mm512_unpacklo_epi32(w[0].v, w[1].v);
    const __m512i b = _mm512_unpacklo_epi32(w[2].v, w[3].v);
    const __m512i c = _mm512_unpackhi_epi32(w[0].v, w[1].v);
    const __m512i d = _mm512_unpackhi_epi32(w[2].v, w[3].v);
    out[0].v = _mm512_unpacklo_epi64(a, b);
    out[1].v = _mm512_unpackhi_epi64(a, b);
    out[2].v = _mm512_unpacklo_epi64(c, d);
    out[3].v = _mm512_unpackhi_epi64(c, d);
}
// The nearest float32 of each.
inline F16 to_float(U16 x) { return {_mm512_cvtepu32_ps(x.v)}; }
// x = mantissa * 2^exponent with the mantissa in [sqrt(1/2), sqrt(2)), of normal positive x.
inline void split(F16 x, F16& mantissa, F16& exponent) {
    const __m512i root = _mm512_set1_epi32(0x3f3504f3);
    const __m512i bits = _mm512_sub_epi32(_mm512_castps_si512(x.v), root);
    exponent.v = _mm512_cvtepi32_ps(_mm512_srai_epi32(bits, 23));
    const __m512i rest = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffff));
    mantissa.v = _mm512_castsi512_ps(_mm512_add_epi32(rest, root));
}

#elif defined(__AVX2__)

struct U16 {
    __m256i a, b;
};
template <int predicate>
inline unsigned compare(F16 x, F16 y) {
    const int a = _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, predicate));
    const int b = _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, predicate));
    return static_cast<unsigned>(a | b << 8);
}
inline unsigned greater(F16 x, F16 y) { return compare<_CMP_GT_OQ>(x, y); }
inline unsigned at_least(F16 x, F16 y) { return compare<_CMP_GE_OQ>(x, y); }
inline unsigned equal(F16 x, F16 y) { return compare<_CMP_EQ_OQ>(x, y); }
inline F16 where_at_least(F16 key, F16 least, F16 x) {
    return {_mm256_and_ps(_mm256_cmp_ps(key.a, least.a, _CMP_GE_OQ), x.a),
            _mm256_and_ps(_mm256_cmp_ps(key.b, least.b, _CMP_GE_OQ), x.b)};
}
inline U16 words(uint32_t x) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(x));
    return {all, all};
}
inline U16 load_words(const uint32_t* p) {
    const auto* at = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline void store(uint32_t* p, U16 x) {
    auto* at = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(at, x.a);
    _mm256_storeu_si256(at + 1, x.b);
}
inline U16 operator+(U16 x, U16 y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline U16 operator^(U16 x, U16 y) {
    return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
inline void multiply(__m256i x, __m256i factor, __m256i& high, __m256i& low) {
    const __m256i even = _mm256_mul_epu32(x, factor);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
inline void multiply(U16 x, uint32_t by, U16& high, U16& low) {
    const __m256i factor = _mm256_set1_epi64x(by);
    multiply(x.a, factor, high.a, low.a);
    multiply(x.b, factor, high.b, low.b);
}
inline void transpose(__m256i w0, __m256i w1, __m256i w2, __m256i w3, __m256i (&out)[4]) {
    const __m256i a = _mm256_unpacklo_epi32(w0, w1), b = _mm256_unpacklo_epi32(w2, w3);
    const __m256i c = _mm256_unpackhi_epi32(w0, w1), d = _mm256_unpackhi_epi32(w2, w3);
    out[0] = _mm256_unpacklo_epi64(a, b);
    out[1] = _mm256_unpackhi_epi64(a, b);
    out[2] = _mm256_unpacklo_epi64(c, d);
    out[3] = _mm256_unpackhi_epi64(c, d);
}
inline void transpose(const U16 (&w)[4], U16 (&out)[4]) {
    __m256i a[4], b[4];
    transpose(w[0].a, w[1].a, w[2].a, w[3].a, a);
    transpose(w[0].b, w[1].b, w[2].b, w[3].b, b);
    for (int k = 0; k < 4; ++k) out[k] = {a[k], b[k]};
}
inline __m256 to_float(__m256i x) {
    // Both halves are exact, so only their sum is rounded.
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
    const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    return _mm256_add_ps(_mm256_mul_ps(high, _mm256_set1_ps(65536.0f)), low);
}
inline F16 to_float(U16 x) { return {to_float(x.a), to_float(x.b)}; }
inline void split(__m256 x, __m256& mantissa, __m256& exponent) {
    const __m256i root = _mm256_set1_epi32(0x3f3504f3);
    const __m256i bits = _mm256_sub_epi32(_mm256_castps_si256(x), root);
    exponent = _mm256_cvtepi32_ps(_mm256_srai_epi32(bits, 23));
    const __m256i rest = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff));
    mantissa = _mm256_castsi256_ps(_mm256_add_epi32(rest, root));
}
inline void split(F16 x, F16& mantissa, F16& exponent) {
    split(x.a, mantissa.a, exponent.a);
    split(x.b, mantissa.b, exponent.b);
}

#else

struct U16 {
    uint32_t v[lanes];
};
template <typename Test>
inline unsigned bits_of(Test test) {
    unsigned bits = 0;
    for (int i = 0; i < lanes; ++i) bits |= static_cast<unsigned>(test(i)) << i;
    return bits;
}
inline unsigned greater(F16 a, F16 b) { return bits_of([&](int i) { return a.v[i] > b.v[i]; }); }
inline unsigned at_least(F16 a, F16 b) { return bits_of([&](int i) { return a.v[i] >= b.v[i]; }); }
inline unsigned equal(F16 a, F16 b) { return bits_of([&](int i) { return a.v[i] == b.v[i]; }); }
inline F16 where_at_least(F16 key, F16 least, F16 x) {
    return each([&](int i) { return key.v[i] >= least.v[i] ? x.v[i] : 0.0f; });
}
template <typename Op>
inline U16 each_word(Op op) {
    U16 out;
    for (int i = 0; i < lanes; ++i) out.v[i] = op(i);
    return out;
}
inline U16 words(uint32_t x) { return each_word([&](int) { return x; }); }
inline U16 load_words(const uint32_t* p) { return each_word([&](int i) { return p[i]; }); }
inline void store(uint32_t* p, U16 x) { std::memcpy(p, x.v, sizeof x.v); }
inline U16 operator+(U16 a, U16 b) { return each_word([&](int i) { return a.v[i] + b.v[i]; }); }
inline U16 operator^(U16 a, U16 b) { return each_word([&](int i) { return a.v[i] ^ b.v[i]; }); }
inline void multiply(U16 a, uint32_t by, U16& high, U16& low) {
    for (int i = 0; i < lanes; ++i) {
        const uint64_t product = uint64_t{a.v[i]} * by;
        high.v[i] = static_cast<uint32_t>(product >> 32);
        low.v[i] = static_cast<uint32_t>(product);
    }
}
inline void transpose(const U16 (&w)[4], U16 (&out)[4]) {
    for (int k = 0; k < 4; ++k)
        for (int i = 0; i < lanes; ++i) out[k].v[i] = w[i % 4].v[i / 4 * 4 + k];
}
inline F16 to_float(U16 x) { return each([&](int i) { return static_cast<float>(x.v[i]); }); }
inline void split(F16 x, F16& mantissa, F16& exponent) {
    for (int i = 0; i < lanes; ++i) {
        int32_t bits;
        std::memcpy(&bits, &x.v[i], 4);
        bits -= 0x3f3504f3;
        exponent.v[i] = static_cast<float>(bits >> 23);
        bits = (bits & 0x7fffff) + 0x3f3504f3;
        std::memcpy(&mantissa.v[i], &bits, 4);
    }
}

#endif

#if !defined(__AVX512F__)
inline int64_t append(float* p, F16 x, unsigned mask) {
    float all[lanes];
    store(all, x);
    int64_t count = 0;
    for (int i = 0; i < lanes; ++i) {
        p[count] = all[i];
        count += mask >> i & 1;
    }
    return count;
}
#endif

// -log1p(-u) of u in (0, 1), a multiple of 2^-33 at least: an exponential number, within 2 ulp.
inline F16 exponential(F16 u) {
    const F16 one = broadcast(1.0f);
    const F16 rest = one - u;
    const F16 lost = (zero() - u) - (rest - one);  // exact: what `rest` was rounded by
    F16 mantissa, exponent;
    split(rest, mantissa, exponent);
    const F16 r = mantissa - one, square = r * r;
    F16 p = broadcast(7.0376836292e-2f);
    p = fma(p, r, broadcast(-1.1514610310e-1f));
    p = fma(p, r, broadcast(1.1676998740e-1f));
    p = fma(p, r, broadcast(-1.2420140846e-1f));
    p = fma(p, r, broadcast(1.4249322787e-1f));
    p = fma(p, r, broadcast(-1.6668057665e-1f));
    p = fma(p, r, broadcast(2.0000714765e-1f));
    p = fma(p, r, broadcast(-2.4999993993e-1f));
    p = fma(p, r, broadcast(3.3333331174e-1f));
    p = p * r * square;
    p = fma(exponent, broadcast(-2.12194440e-4f), p);
    p = fma(square, broadcast(-0.5f), p);
    // log(rest + lost) = log(rest) + lost / rest; 2 - rest is near enough to 1 / rest.
    p = fma(lost, one + u, p);
    return zero() - fma(exponent, broadcast(0.693359375f), r + p);
}

inline F16 exponential(U16 words) {
    const F16 u = (to_float(words) + broadcast(0.5f)) * broadcast(0x1p-32f);
    return exponential(minimum(u, broadcast(1.0f - 0x1p-24f)));
}

// The words of tokens 4 * counter .. 4 * counter + 63: lane i of words k belongs to token 16 k + i.
inline void noise_words(const NoiseKey& key, uint32_t counter, U16 (&out)[4]) {
    // In the order from which `transpose` makes that of tokens.
    alignas(64) static const uint32_t order[lanes] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                      2, 6, 10, 14, 3, 7, 11, 15};
    U16 c[4] = {load_words(order) + words(counter), words(key.position), words(key.step),
                words(key.purpose)};
    uint32_t k0 = key.seed_low, k1 = key.seed_high;
    for (int round = 0; round < 10; ++round) {
        U16 high0, low0, high2, low2;
        multiply(c[0], 0xD2511F53u, high0, low0);
        multiply(c[2], 0xCD9E8D57u, high2, low2);
        c[0] = high2 ^ c[1] ^ words(k0);
        c[2] = high0 ^ c[3] ^ words(k1);
        c[1] = low2;
        c[3] = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    transpose(c, out);
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
