// Products of few lines with cached keys and values as they are stored. Compiled for each level.
//
// For many lines keys and values are turned into right factors once (attention_pack.h); for few that
// takes longer than the products. Factors are multiplied and added in the same order as there, so
// results have the same bits.
#pragma once

#include "attention_pack.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// A register's numbers of 4 bytes; bfloat16 numbers are two to a register's number.
template <typename Stored>
constexpr int stored_together = sizeof(Stored) == 2 ? 2 : 1;

// 16 keys' numbers from d on, turned: to[i, token], as they are stored or (int8) as float32.
template <typename Stored>
inline void turn_keys(const char* const (&rows)[lanes], int d, int head_dim, float* to) {
    constexpr int whole = lanes * stored_together<Stored>;
    if constexpr (sizeof(Stored) == 1) {
        F16 square[lanes];
        for (int i = 0; i < lanes; ++i) square[i] = lanes_at<Floats, Stored>(rows[i], d, head_dim);
        transpose(square);
        for (int i = 0; i < lanes; ++i) store(to + i * lanes, square[i]);
    } else if (d + whole <= head_dim) {
        transpose_rows(rows, d * sizeof(Stored), to);
    } else {
        Stored rest[lanes][whole] = {};
        const char* padded[lanes];
        for (int i = 0; i < lanes; ++i) {
            std::memcpy(rest[i], rows[i] + d * sizeof(Stored), (head_dim - d) * sizeof(Stored));
            padded[i] = reinterpret_cast<const char*>(rest[i]);
        }
        transpose_rows(padded, 0, to);
    }
}

// One of the numbers that lie together in each lane, as float32.
template <typename Stored>
inline F16 one_of(F16 x, [[maybe_unused]] int which) {
    if constexpr (stored_together<Stored> == 1) return x;
#if defined(__AVX512F__)
    const __m512i bits = _mm512_castps_si512(x.v);
    return {_mm512_castsi512_ps(which ? _mm512_and_si512(bits, _mm512_set1_epi32(-65536))
                                      : _mm512_slli_epi32(bits, 16))};
#elif defined(__AVX2__)
    const __m256i a = _mm256_castps_si256(x.a), b = _mm256_castps_si256(x.b);
    const __m256i upper = _mm256_set1_epi32(-65536);
    if (which)
        return {_mm256_castsi256_ps(_mm256_and_si256(a, upper)),
                _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
#else
    return each([&](int i) {
        uint32_t bits;
        std::memcpy(&bits, &x.v[i], 4);
        bits = which ? bits & 0xffff0000u : bits << 16;
        float wide;
        std::memcpy(&wide, &bits, 4);
        return wide;
    });
#endif
}

// Lines of queries and of their results.
struct FewLines {
    int count;
    const float* from;
    int64_t from_stride;
    float* to;
    int64_t to_stride;
};

constexpr int panels = block_tokens / lanes;

// Panels whose sums fit into the registers, for R lines: with few sums, each addition would wait for
// the one before.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int panels_of_scores(int lines) { return lines <= 2 ? 2 : 1; }
#else
constexpr int panels_of_scores(int) { return 4; }
#endif

// Adds the products of R queries' numbers with `count` lanes' of each token's: squares[panel].
template <typename Stored, int R>
inline void add_scores(const float (&squares)[panels][lanes * lanes], int count,
                       const float* queries, int64_t stride, float* to, int64_t to_stride) {
    constexpr int together = stored_together<Stored>, P = panels_of_scores(R);
    for (int panel = 0; panel < panels; panel += P, to += P * lanes) {
        F16 sums[R][P];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) sums[r][p] = load(to + r * to_stride + p * lanes);
        for (int i = 0; i < count; ++i)
#pragma GCC unroll 2
            for (int which = 0; which < together; ++which) {
                F16 keys[P];
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p)
                    keys[p] = one_of<Stored>(load(squares[panel + p] + i * lanes), which);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const F16 factor = broadcast(queries[r * stride + i * together + which]);
#pragma GCC unroll 4
                    for (int p = 0; p < P; ++p) sums[r][p] = fma(factor, keys[p], sums[r][p]);
                }
            }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) store(to + r * to_stride + p * lanes, sums[r][p]);
    }
}

// Adds the products of R lines' weights with the values of tokens, in columns d .. d + 16 P.
template <typename Stored, int R, int P>
inline void add_values(const char* const (&rows)[block_tokens], int head_dim, int d,
                       const float* weights, int64_t stride, float* to, int64_t to_stride) {
    F16 sums[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[r][p] = load(to + r * to_stride + d + p * lanes);
    for (int t = 0; t < block_tokens; ++t) {
        F16 values[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
            values[p] = lanes_at<Floats, Stored>(rows[t], d + p * lanes, head_dim);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F16 weight = broadcast(weights[r * stride + t]);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) sums[r][p] = fma(weight, values[p], sums[r][p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) store(to + r * to_stride + d + p * lanes, sums[r][p]);
}

// Calls work.of<R>(line) for all lines, R at once: as many as registers have room for.
template <typename Work>
inline void for_few_lines(int count, Work&& work) {
    const int parts = (count + lines_at_once - 1) / lines_at_once;
    for (int part = 0; part < parts; ++part) {
        const int line = count * part / parts;
        switch (count * (part + 1) / parts - line) {
            case 1: work.template of<1>(line); break;
            case 2: work.template of<2>(line); break;
            case 3: work.template of<3>(line); break;
            case 4: work.template of<4>(line); break;
            case 5: work.template of<(lines_at_once < 5 ? 1 : 5)>(line); break;
            default: work.template of<(lines_at_once < 6 ? 1 : 6)>(line);
        }
    }
}

template <typename Stored>
struct ScoreWork {
    const float (&squares)[panels][lanes * lanes];
    const FewLines& lines;
    int d, count;

    template <int R>
    void of(int line) const {
        add_scores<Stored, R>(squares, count, lines.from + line * lines.from_stride + d, lines.from_stride,
                              lines.to + line * lines.to_stride, lines.to_stride);
    }
};

// Scores of the tokens first .. first + 64 of a part that ends at `end`: lines.to[line, token].
template <typename Stored>
inline void score_block(const StoredTokens& tokens, int64_t first, int64_t end,
                        const FewLines& lines) {
    constexpr int together = stored_together<Stored>;
    const char* rows[panels][lanes];
    for (int panel = 0; panel < panels; ++panel)
        for (int i = 0; i < lanes; ++i) {
            const int64_t token = first + panel * lanes + i;
            if (token + block_tokens < end) tokens.prefetch(token + block_tokens);
            rows[panel][i] = tokens.at(token);
        }
    for (int line = 0; line < lines.count; ++line)
        for (int t = 0; t < block_tokens; t += lanes)
            store(lines.to + line * lines.to_stride + t, zero());
    for (int d = 0; d < tokens.head_dim; d += lanes * together) {
        alignas(64) float squares[panels][lanes * lanes];
        for (int panel = 0; panel < panels; ++panel)
            turn_keys<Stored>(rows[panel], d, tokens.head_dim, squares[panel]);
        const int left = (tokens.head_dim - d) / together;
        for_few_lines(lines.count, ScoreWork<Stored>{squares, lines, d, left < lanes ? left : lanes});
    }
}

template <typename Stored>
struct ValueWork {
    const char* const (&rows)[block_tokens];
    int head_dim, columns;
    const FewLines& lines;

    template <int R>
    void of(int line) const {
        constexpr int P = panels_at_once(R);
        const float* weights = lines.from + line * lines.from_stride;
        float* to = lines.to + line * lines.to_stride;
        int d = 0;
        for (; d + P * lanes <= columns; d += P * lanes)
            add_values<Stored, R, P>(rows, head_dim, d, weights, lines.from_stride, to,
                                     lines.to_stride);
        for (; d < columns; d += lanes)
            add_values<Stored, R, 1>(rows, head_dim, d, weights, lines.from_stride, to,
                                     lines.to_stride);
    }
};

// Adds the weighted values of the tokens first .. first + 64 of a part that ends at `end`:
// lines.from[line, token], lines.to[line, column].
template <typename Stored>
inline void add_value_block(const StoredTokens& tokens, int64_t first, int64_t end, int columns,
                            const FewLines& lines) {
    const char* rows[block_tokens];
    for (int i = 0; i < block_tokens; ++i) {
        if (first + block_tokens + i < end) tokens.prefetch(first + block_tokens + i);
        rows[i] = tokens.at(first + i);
    }
    for_few_lines(lines.count, ValueWork<Stored>{rows, tokens.head_dim, columns, lines});
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
