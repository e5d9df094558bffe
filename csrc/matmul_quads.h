// Sums of small integers: two or four columns of sixteen rows at once. Compiled for each level.
#pragma once

#include "simd.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// What integer weights meet: digits are bytes where an instruction adds four products to a sum, and
// else words, of which it adds two. Two digits of a row that fit into a word may be joined in it.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
using Digit = int16_t;
#else
using Digit = int8_t;
#endif
constexpr bool takes_words = sizeof(Digit) == 2;
// Quads of bytes are multiplied in this many parts, each by four bytes of digits.
constexpr int quad_parts = sizeof(Digit);

// Four bytes of digits. One load each: the compiler would merge two loads, and split the result.
inline int32_t digits_at(const Digit* p) {
    int32_t digits;
    std::memcpy(&digits, p, 4);
    return digits;
}

// Unsigned bytes: four of each of 16 lanes.
#if defined(__AVX512VNNI__)

struct Quads {
    __m512i v;
};
inline Quads load_quads(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_quads(void* p, Quads x) { _mm512_storeu_si512(p, x.v); }
inline Quads low_halves(Quads x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Quads high_halves(Quads x) { return low_halves({_mm512_srli_epi16(x.v, 4)}); }
// Bytes of four bits, and above them the two at bits 2 n of `upper`, for n below 4.
template <int n>
inline Quads with_upper(Quads halves, Quads upper) {
    const __m512i at_four = n < 2 ? _mm512_slli_epi16(upper.v, n < 2 ? 4 - 2 * n : 0)
                                  : _mm512_srli_epi16(upper.v, n < 2 ? 0 : 2 * n - 4);
    // halves or (at_four and 0x30)
    return {_mm512_ternarylogic_epi32(halves.v, at_four, _mm512_set1_epi8(0x30), 0xf8)};
}
// Bytes of a table of sixteen, by the low and by the high halves of bytes.
inline __m512i table_of(const uint8_t* bytes) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
#if defined(__AVX512VBMI__)
// Of each index six bits count, for a table that is there four times.
inline Quads look_up_low(const uint8_t* table, Quads x) {
    return {_mm512_permutexvar_epi8(x.v, table_of(table))};
}
inline Quads look_up_high(const uint8_t* table, Quads x) {
    return {_mm512_permutexvar_epi8(_mm512_srli_epi16(x.v, 4), table_of(table))};
}
#else
inline Quads look_up_low(const uint8_t* table, Quads x) {
    return {_mm512_shuffle_epi8(table_of(table), low_halves(x).v)};
}
inline Quads look_up_high(const uint8_t* table, Quads x) {
    return {_mm512_shuffle_epi8(table_of(table), high_halves(x).v)};
}
#endif
// A part of quads: what digits of four bytes are multiplied by. Here it is the quads themselves.
template <int part>
inline Quads part_of(Quads x) {
    return x;
}
// sum += a part of quads times digits.
inline I16 add_part(I16 sum, Quads part, int32_t digits) {
    return {_mm512_dpbusd_epi32(sum.v, part.v, _mm512_set1_epi32(digits))};
}

#elif defined(__AVX2__)

struct Quads {
    __m256i a, b;
};
inline Quads load_quads(const void* p) {
    const auto* words = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
inline void store_quads(void* p, Quads x) {
    auto* words = static_cast<__m256i*>(p);
    _mm256_storeu_si256(words, x.a);
    _mm256_storeu_si256(words + 1, x.b);
}
inline __m256i low_halves(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline __m256i high_halves(__m256i x) { return low_halves(_mm256_srli_epi16(x, 4)); }
inline Quads low_halves(Quads x) { return {low_halves(x.a), low_halves(x.b)}; }
inline Quads high_halves(Quads x) { return {high_halves(x.a), high_halves(x.b)}; }
template <int n>
inline __m256i with_upper(__m256i halves, __m256i upper) {
    const __m256i at_four = n < 2 ? _mm256_slli_epi16(upper, n < 2 ? 4 - 2 * n : 0)
                                  : _mm256_srli_epi16(upper, n < 2 ? 0 : 2 * n - 4);
    return _mm256_or_si256(halves, _mm256_and_si256(at_four, _mm256_set1_epi8(0x30)));
}
template <int n>
inline Quads with_upper(Quads halves, Quads upper) {
    return {with_upper<n>(halves.a, upper.a), with_upper<n>(halves.b, upper.b)};
}
inline Quads look_up(const uint8_t* table, Quads indices) {
    const __m256i entries =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(entries, indices.a), _mm256_shuffle_epi8(entries, indices.b)};
}
inline Quads look_up_low(const uint8_t* table, Quads x) { return look_up(table, low_halves(x)); }
inline Quads look_up_high(const uint8_t* table, Quads x) { return look_up(table, high_halves(x)); }
// Bytes 0 and 2 of each lane as words, or bytes 1 and 3.
template <int part>
inline Quads part_of(Quads x) {
    if constexpr (part) return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)};
    const __m256i low = _mm256_set1_epi16(255);
    return {_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)};
}
inline I16 add_part(I16 sum, Quads part, int32_t digits) {
    const __m256i factor = _mm256_set1_epi32(digits);
    sum.a = _mm256_add_epi32(sum.a, _mm256_madd_epi16(part.a, factor));
    sum.b = _mm256_add_epi32(sum.b, _mm256_madd_epi16(part.b, factor));
    // One chain, in registers: else the compiler keeps all products and adds them as a tree.
    __asm__("" : "+x"(sum.a), "+x"(sum.b));
    return sum;
}

#else

struct Quads {
    uint8_t v[4 * lanes];
};
template <typename Op>
inline Quads each_byte(Op op) {
    Quads out;
    for (int i = 0; i < 4 * lanes; ++i) out.v[i] = static_cast<uint8_t>(op(i));
    return out;
}
inline Quads load_quads(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    return each_byte([&](int i) { return bytes[i]; });
}
inline void store_quads(void* p, const Quads& x) { std::memcpy(p, x.v, sizeof x.v); }
inline Quads low_halves(Quads x) {
    return each_byte([&](int i) { return x.v[i] & 15; });
}
inline Quads high_halves(Quads x) {
    return each_byte([&](int i) { return x.v[i] >> 4; });
}
template <int n>
inline Quads with_upper(Quads halves, Quads upper) {
    return each_byte([&](int i) { return halves.v[i] | (upper.v[i] >> 2 * n & 3) << 4; });
}
inline Quads look_up_low(const uint8_t* table, Quads x) {
    return each_byte([&](int i) { return table[x.v[i] & 15]; });
}
inline Quads look_up_high(const uint8_t* table, Quads x) {
    return each_byte([&](int i) { return table[x.v[i] >> 4]; });
}
template <int part>
inline Quads part_of(Quads x) {
    return x;
}
inline I16 add_part(I16 sum, Quads part, int32_t digits) {
    int8_t factors[4];
    std::memcpy(factors, &digits, 4);
    for (int lane = 0; lane < lanes; ++lane)
        for (int i = 0; i < 4; ++i) sum.v[lane] += part.v[lane * 4 + i] * factors[i];
    return sum;
}

#endif

}  // namespace slipstream::SLIPSTREAM_LEVEL
