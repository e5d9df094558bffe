// Numbers of 16 bits with 5 of exponent. For files that are compiled once: see levels.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace slipstream {

// To the nearest float16, ties to even; what is too large becomes the largest.
inline uint16_t to_float16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    const int exponent = static_cast<int>(bits >> 23 & 0xff) - 127 + 15;
    const uint32_t mantissa = bits & 0x7fffff;
    if (exponent >= 31) return static_cast<uint16_t>(sign | 0x7bff);
    if (exponent <= 0) {
        if (exponent < -10) return static_cast<uint16_t>(sign);
        const uint32_t full = mantissa | 0x800000;
        const int shift = 14 - exponent;
        const uint32_t half = 1u << (shift - 1), kept = full >> shift, rest = full & ((1u << shift) - 1);
        return static_cast<uint16_t>(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
    }
    const uint32_t kept = static_cast<uint32_t>(exponent) << 10 | mantissa >> 13;
    const uint32_t rest = mantissa & 0x1fff;
    return static_cast<uint16_t>(sign | (kept + (rest > 0x1000 || (rest == 0x1000 && (kept & 1)))));
}

// Of a finite number.
inline float from_float16(uint16_t half) {
    const int exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    const float size = exponent ? std::ldexp(static_cast<float>(mantissa | 0x400), exponent - 25)
                                : std::ldexp(static_cast<float>(mantissa), -24);
    return half & 0x8000 ? -size : size;
}

}  // namespace slipstream
