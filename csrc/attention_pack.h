// Cached keys and values as right factors of products. Compiled for each level.
#pragma once

#include "attention_mode.h"
#include "transpose.h"

namespace slipstream::SLIPSTREAM_LEVEL {

constexpr int most_head_dim = 576;
alignas(64) inline constexpr char nothing[most_head_dim * 4] = {};

// Heads of tokens that are to be read: where each is, in bytes after a head's first; -1 for tokens
// that are not stored, which count as zeros.
struct StoredTokens {
    const char* base;
    const int64_t* offsets;
    CacheType type;
    int head_dim;

    const char* at(int64_t token) const {
        return offsets[token] < 0 ? nothing : base + offsets[token];
    }
    // Into the second cache. Always inlined: gcc drops functions that only prefetch.
    __attribute__((always_inline)) void prefetch(int64_t token) const {
        if (offsets[token] < 0) return;
        const char* row = base + offsets[token];
        const int bytes = head_dim * (type == CacheType::f32 ? 4 : type == CacheType::bf16 ? 2 : 1);
        for (int at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    }
    // Of int8 numbers; 1 of others.
    float scale(int64_t token) const {
        if (type != CacheType::i8) return 1.0f;
        float scale;
        std::memcpy(&scale, at(token) + head_dim, 4);
        return scale;
    }
};

inline F16 load(const int8_t* p) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
#else
    float wide[lanes];
    for (int i = 0; i < lanes; ++i) wide[i] = static_cast<float>(p[i]);
    return load(wide);
#endif
}

// 16 lanes of numbers, as the mode multiplies them.
template <typename Mode, typename Stored>
struct Lanes {
    static F16 at(const Stored* p) { return load(p); }
};

#if defined(__AVX512BF16__)
template <>
struct Lanes<Pairs, bf16> {
    static F16 at(const bf16* p) { return {_mm512_loadu_ps(p)}; }
};

template <>
struct Lanes<Pairs, int8_t> {
    // Integers below 256 are bf16 numbers: nothing is rounded.
    static F16 at(const int8_t* p) {
        const __m512bh both = _mm512_cvtne2ps_pbh(load(p + lanes).v, load(p).v);
        F16 bits;
        std::memcpy(&bits, &both, 64);
        return bits;
    }
};
#endif

// The lanes from number d on, zeros after the head's last number.
template <typename Mode, typename Stored>
inline F16 lanes_at(const char* row, int d, int head_dim) {
    constexpr int whole = lanes * Mode::in_lane;
    const auto* numbers = reinterpret_cast<const Stored*>(row) + d;
    if (d + whole <= head_dim) return Lanes<Mode, Stored>::at(numbers);
    Stored padded[whole] = {};
    if (d < head_dim) std::memcpy(padded, numbers, (head_dim - d) * sizeof(Stored));
    return Lanes<Mode, Stored>::at(padded);
}

// Keys of 16 tokens, first .. -> tiles one after the other along D.
template <typename Mode, typename Stored>
inline void pack_key_panel(const StoredTokens& tokens, int64_t first, char* to) {
    constexpr int whole = lanes * Mode::in_lane;
    const char* rows[lanes];
    for (int i = 0; i < lanes; ++i) rows[i] = tokens.at(first + i);
    for (int d = 0; d < tokens.head_dim; d += whole, to += tile_bytes) {
        F16 square[lanes];
        if (d + whole <= tokens.head_dim) {
#pragma GCC unroll 16
            for (int i = 0; i < lanes; ++i)
                square[i] = Lanes<Mode, Stored>::at(reinterpret_cast<const Stored*>(rows[i]) + d);
        } else {
            for (int i = 0; i < lanes; ++i)
                square[i] = lanes_at<Mode, Stored>(rows[i], d, tokens.head_dim);
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) store(reinterpret_cast<float*>(to + i * 64), square[i]);
    }
}

// Values of the tokens of one tile, first .. -> tiles of 16 columns one behind the other. For pairs,
// 32 columns are dealt out over two tiles in the order of `unpack` (see `in_order`).
template <typename Mode, typename Stored>
inline void pack_value_tile(const StoredTokens& tokens, int64_t first, char* to) {
    for (int step = 0; step < tile_steps; ++step, to += 64) {
        if constexpr (Mode::in_lane == 1) {
            const char* row = tokens.at(first + step);
            for (int d = 0; d < tokens.head_dim; d += lanes)
                store(reinterpret_cast<float*>(to + d / lanes * tile_bytes),
                      lanes_at<Mode, Stored>(row, d, tokens.head_dim));
        } else {
#if defined(__AVX512BF16__)
            const char *even = tokens.at(first + 2 * step), *odd = tokens.at(first + 2 * step + 1);
            for (int d = 0; d < tokens.head_dim; d += 2 * lanes) {
                const __m512i a =
                    _mm512_castps_si512(lanes_at<Mode, Stored>(even, d, tokens.head_dim).v);
                const __m512i b =
                    _mm512_castps_si512(lanes_at<Mode, Stored>(odd, d, tokens.head_dim).v);
                char* pair = to + d / lanes * tile_bytes;
                _mm512_storeu_si512(pair, _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(pair + tile_bytes, _mm512_unpackhi_epi16(a, b));
            }
#endif
        }
    }
}

// 32 columns of a sum from the order that `pack_value_tile` leaves them in.
template <typename Mode>
inline void in_order([[maybe_unused]] F16& a, [[maybe_unused]] F16& b) {
    if constexpr (Mode::in_lane == 2) {
#if defined(__AVX512F__)
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        const __m512 low = a.v, high = b.v;
        a.v = _mm512_permutex2var_ps(low, first, high);
        b.v = _mm512_permutex2var_ps(low, second, high);
#endif
    }
}

// Tokens are fetched ahead so far: what one core can have under way.
constexpr int ahead_tokens = 32;

template <typename Mode, typename Stored>
inline void pack_keys_of(const StoredTokens& tokens, int64_t first, int64_t end, char* to,
                         int64_t panel_stride) {
    for (int64_t panel = first; panel < first + block_tokens; panel += lanes, to += panel_stride) {
        for (int i = 0; i < lanes; ++i)
            if (panel + ahead_tokens + i < end) tokens.prefetch(panel + ahead_tokens + i);
        pack_key_panel<Mode, Stored>(tokens, panel, to);
    }
}

template <typename Mode, typename Stored>
inline void pack_values_of(const StoredTokens& tokens, int64_t first, int64_t end, char* to,
                           int64_t tile_stride) {
    constexpr int in_tile = tile_steps * Mode::in_lane;
    for (int64_t tile = first; tile < end; tile += in_tile, to += tile_stride) {
        for (int i = 0; i < in_tile; ++i)
            if (tile + ahead_tokens + i < end) tokens.prefetch(tile + ahead_tokens + i);
        pack_value_tile<Mode, Stored>(tokens, tile, to);
    }
}

// Keys of the block from token `first` on, of a part that ends at `end`.
template <typename Mode>
inline void pack_keys(const StoredTokens& tokens, int64_t first, int64_t end, char* to,
                      int64_t panel_stride) {
    if (tokens.type == CacheType::i8)
        pack_keys_of<Mode, int8_t>(tokens, first, end, to, panel_stride);
    else if (tokens.type == CacheType::bf16)
        pack_keys_of<Mode, bf16>(tokens, first, end, to, panel_stride);
    else if constexpr (Mode::in_lane == 1)
        pack_keys_of<Mode, float>(tokens, first, end, to, panel_stride);
}

// Values of tokens first .. end.
template <typename Mode>
inline void pack_values(const StoredTokens& tokens, int64_t first, int64_t end, char* to,
                        int64_t tile_stride) {
    if (tokens.type == CacheType::i8)
        pack_values_of<Mode, int8_t>(tokens, first, end, to, tile_stride);
    else if (tokens.type == CacheType::bf16)
        pack_values_of<Mode, bf16>(tokens, first, end, to, tile_stride);
    else if constexpr (Mode::in_lane == 1)
        pack_values_of<Mode, float>(tokens, first, end, to, tile_stride);
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
