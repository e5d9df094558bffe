// What happens to rows before they attend: norms, rotation, storing. Compiled for each level.
#pragma once

#include "attention_pack.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// One head of one row, `out` [D] float32: normed where there is a weight, or without one where
// `always` says so, and then rounded to its type.
template <typename Number>
inline void norm_head(const Number* x, const Number* weight, int head_dim, float eps, float* out,
                      bool always = false) {
    if (!weight && !always) {
        for (int d = 0; d < head_dim; d += lanes)
            store_some(out + d, load_some(x + d, head_dim - d), head_dim - d);
        return;
    }
    F16 squares[2] = {zero(), zero()};
    for (int d = 0; d < head_dim; d += lanes) {
        const F16 part = load_some(x + d, head_dim - d);
        F16& sums = squares[d / lanes % 2];
        sums = fma(part, part, sums);
    }
    const float mean = sum(squares[0] + squares[1]) / static_cast<float>(head_dim);
    const F16 factor = broadcast(1.0f / __builtin_sqrtf(mean + eps));
    for (int d = 0; d < head_dim; d += lanes) {
        F16 part = load_some(x + d, head_dim - d) * factor;
        if (weight) part = part * load_some(weight + d, head_dim - d);
        store_some(out + d, rounded<Number>(part), head_dim - d);
    }
}

// Rotary embedding of the first `rotary_dim` numbers, half-split layout (Su et al. 2021), in place;
// rounded to the type.
template <typename Number>
inline void rotate_head(float* x, const float* cos_sin, int rotary_dim) {
    const int half = rotary_dim / 2;
    for (int d = 0; d < half; d += lanes) {
        const int count = half - d;
        const F16 first = load_some(x + d, count), second = load_some(x + half + d, count);
        const F16 cos = load_some(cos_sin + d, count), sin = load_some(cos_sin + half + d, count);
        store_some(x + d, rounded<Number>(first * cos - second * sin), count);
        store_some(x + half + d, rounded<Number>(second * cos + first * sin), count);
    }
}

// A head's numbers to the cache.
inline void put_head(const float* x, int head_dim, CacheType type, char* to) {
    if (type == CacheType::i8) {
        F16 most = zero();
        for (int d = 0; d < head_dim; d += lanes) {
            const F16 part = load_some(x + d, head_dim - d);
            most = maximum(most, maximum(part, zero() - part));
        }
        const float bound = largest(most), scale = bound / 127.0f;
        const F16 by = broadcast(scale > 0.0f ? scale : 1.0f), most_stored = broadcast(127.0f);
        for (int d = 0; d < head_dim; d += lanes) {
            float numbers[lanes];
            const F16 nearest = round(load_some(x + d, head_dim - d) / by);
            store(numbers, minimum(maximum(nearest, zero() - most_stored), most_stored));
            const int count = head_dim - d < lanes ? head_dim - d : lanes;
            for (int i = 0; i < count; ++i) to[d + i] = static_cast<char>(static_cast<int>(numbers[i]));
        }
        std::memcpy(to + head_dim, &scale, 4);
        return;
    }
    for (int d = 0; d < head_dim; d += lanes) {
        const F16 part = load_some(x + d, head_dim - d);
        if (type == CacheType::bf16) store_some(reinterpret_cast<bf16*>(to) + d, part, head_dim - d);
        else store_some(reinterpret_cast<float*>(to) + d, part, head_dim - d);
    }
}

inline int number_bytes(CacheType type) {
    return type == CacheType::f32 ? 4 : type == CacheType::bf16 ? 2 : 1;
}

// Where the heads of a slot begin, in bytes; -1 where nothing is to be stored.
inline int64_t slot_offset(const CacheView& cache, int64_t slot) {
    if (slot < 0 || slot >= cache.num_blocks * cache.block_size) return -1;
    return (slot / cache.block_size * cache.block_stride +
            slot % cache.block_size * cache.token_stride) *
           number_bytes(cache.type);
}

// A position, brought into the tables where it is outside.
inline int64_t within_tables(int64_t num_positions, int64_t position) {
    return position < 0 ? 0 : position < num_positions ? position : num_positions - 1;
}

inline const float* cos_sin_at(const AttentionShape& shape, int64_t position) {
    return shape.cos_sin + within_tables(shape.num_positions, position) * shape.rotary_dim;
}

inline float query_scale_at(const AttentionShape& shape, int64_t position) {
    return shape.query_scales ? shape.query_scales[within_tables(shape.num_positions, position)]
                              : 1.0f;
}

// Keys and values of one row, kv [2 Hk D], to its slot.
template <typename Number>
inline void store_row(const AttentionCall& call, int64_t row, const Number* kv) {
    const AttentionShape& shape = *call.shape;
    const CacheView& cache = *call.cache;
    const int64_t offset = slot_offset(cache, call.rows->slots[row]);
    if (offset < 0) return;
    const int64_t head_bytes = cache.head_stride * number_bytes(cache.type);
    const float* cos_sin = cos_sin_at(shape, call.rows->positions[row]);
    const auto* weight = static_cast<const Number*>(shape.key_norm);
    alignas(64) float head[most_head_dim];
    for (int h = 0; h < shape.num_kv_heads; ++h) {
        const Number* key = kv + static_cast<int64_t>(h) * shape.head_dim;
        const Number* value = key + static_cast<int64_t>(shape.num_kv_heads) * shape.head_dim;
        norm_head(key, weight, shape.head_dim, shape.norm_eps, head);
        rotate_head<Number>(head, cos_sin, shape.rotary_dim);
        const int64_t at = offset + h * head_bytes;
        put_head(head, shape.head_dim, cache.type, static_cast<char*>(cache.keys) + at);
        norm_head<Number>(value, nullptr, shape.head_dim, shape.norm_eps, head,
                          shape.norms_values);
        put_head(head, shape.head_dim, cache.type, static_cast<char*>(cache.values) + at);
    }
}

// The queries of one row [Hq D] -> lines row * groups .. of each KV head's lines, [Hk, lines, padded
// D], with zeros after D.
template <typename Mode, typename Number>
inline void prepare_queries(const AttentionCall& call, int64_t row, const Number* x,
                            typename Mode::Number* queries, int64_t lines_of_head,
                            int64_t padded_dim) {
    const AttentionShape& shape = *call.shape;
    const int groups = shape.num_heads / shape.num_kv_heads;
    const float* cos_sin = cos_sin_at(shape, call.rows->positions[row]);
    const auto* weight = static_cast<const Number*>(shape.query_norm);
    alignas(64) float head[most_head_dim + 32];
    for (int h = 0; h < shape.num_heads; ++h) {
        norm_head(x + static_cast<int64_t>(h) * shape.head_dim, weight, shape.head_dim,
                  shape.norm_eps, head);
        rotate_head<Number>(head, cos_sin, shape.rotary_dim);
        for (int64_t d = shape.head_dim; d < padded_dim; ++d) head[d] = 0.0f;
        typename Mode::Number* to =
            queries + (h / groups * lines_of_head + row * groups + h % groups) * padded_dim;
        for (int64_t d = 0; d < padded_dim; d += lanes) Mode::put(to + d, load(head + d));
    }
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
