// One tile of lines over one part of its context. Compiled for each level.
#pragma once

#include "attention_plan.h"
#include "attention_stored.h"
#include "attention_tiles.h"
#include "attention_weights.h"
#include "buffer.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Memory of one task, in this thread's own.
template <typename Mode>
struct Bench {
    using Number = typename Mode::Number;

    int64_t padded_dim, tile_lines;
    bool keeps_keys;  // of a whole split: several groups of lines take them
    char *keys, *values;
    float *scores, *part, *state, *key_scales, *value_scales;
    float *largest, *sums;  // of `state`, by line
    Number* weights;
    int64_t *offsets, *next_offsets;

    static constexpr int64_t weight_bytes = line_tokens * sizeof(Number);  // of a line

    Bench(int64_t padded_dim, int64_t tile_lines)
        : padded_dim(padded_dim), tile_lines(tile_lines), keeps_keys(tile_lines > most_lines) {
        const int64_t lines = round_up(tile_lines, most_lines);
        const int64_t sizes[] = {
            (keeps_keys ? split_tokens : block_tokens) * padded_dim * int64_t{sizeof(Number)},
            padded_dim * split_tokens * int64_t{sizeof(Number)},
            most_lines * line_tokens * 4,
            most_lines * weight_bytes,
            most_lines * padded_dim * 4,
            lines * padded_dim * 4,
            lines * 4,
            lines * 4,
            split_tokens * 4,
            split_tokens * 4,
            split_tokens * 8,
            block_tokens * 8,
        };
        int64_t bytes = 0;
        for (const int64_t size : sizes) bytes += round_up(size, 64);
        char* memory = static_cast<char*>(scratch(Scratch::attention, bytes));
        int index = 0;
        const auto take = [&] {
            char* taken = memory;
            memory += round_up(sizes[index++], 64);
            return taken;
        };
        keys = take();
        values = take();
        scores = reinterpret_cast<float*>(take());
        weights = reinterpret_cast<Number*>(take());
        part = reinterpret_cast<float*>(take());
        state = reinterpret_cast<float*>(take());
        largest = reinterpret_cast<float*>(take());
        sums = reinterpret_cast<float*>(take());
        key_scales = reinterpret_cast<float*>(take());
        value_scales = reinterpret_cast<float*>(take());
        offsets = reinterpret_cast<int64_t*>(take());
        next_offsets = reinterpret_cast<int64_t*>(take());
    }

    int64_t panel_stride() const { return padded_dim / (lanes * Mode::in_lane) * tile_bytes; }
    int64_t value_stride() const { return padded_dim / lanes * tile_bytes; }
    LineState line(int64_t index) const {
        return {largest + index, sums + index, state + index * padded_dim};
    }
};

// Where `count` tokens from `start` on are, in bytes after a head's first; -1 where there is none.
inline void locate(const AttentionCall& call, int64_t request, int64_t start, int64_t count,
                   int64_t* offsets) {
    const CacheView& cache = *call.cache;
    const int64_t bytes = number_bytes(cache.type), left = context_of(call, request) - start;
    const int32_t* table = call.rows->block_tables + request * call.rows->table_stride;
    const int64_t stride = cache.token_stride * bytes, last = left < count ? left : count;
    for (int64_t i = 0; i < count; ++i) offsets[i] = -1;
    for (int64_t i = call.rows->first_seen > start ? call.rows->first_seen - start : 0; i < last;) {
        const int64_t index = (start + i) / cache.block_size, block = table[index];
        const int64_t begin = index * cache.block_size - start, end = begin + cache.block_size;
        const int64_t at = block * cache.block_stride * bytes;
        const int64_t stop = end < last ? end : last;
        if (block >= 0 && block < cache.num_blocks)
            for (int64_t token = i; token < stop; ++token)
                offsets[token] = at + (token - begin) * stride;
        i = stop;
    }
}

// What a task reads next: a split of the same tile for a KV head; none if the split is negative.
struct Upcoming {
    int64_t split, kv_head;
};

// Lines of a tile that are multiplied at once, and blocks of the split that they see any of.
struct LineGroup {
    int64_t first, count;  // lines, in the tile
    int64_t begin, end;    // tokens, in the split; whole blocks
};

inline LineGroup group_of(const AttentionCall& call, const Plan& plan, const LineTile& tile,
                          int64_t split, int64_t first) {
    const int64_t left = tile.num_lines - first, start = split * split_tokens;
    LineGroup group = {first, left < most_lines ? left : most_lines, 0, 0};
    const Span span =
        tile.num_lines <= most_lines
            ? tile.span
            : seen_by_lines(call, tile.request, tile.first_line + first, group.count, plan.groups);
    const int64_t begin = span.first - start, end = span.end - start;
    if (begin >= split_tokens || end <= 0) return group;
    group.begin = begin > 0 ? begin / block_tokens * block_tokens : 0;
    group.end = end < split_tokens ? round_up(end, block_tokens) : int64_t{split_tokens};
    return group;
}

// Scores of tokens of a tree that a row does not descend from.
inline void hide_others(const AttentionRows& rows, int64_t request, int64_t row, int64_t start,
                        int64_t first, int64_t end, float* scores) {
    const int64_t ancestors = rows.tree_ancestors[row], root = rows.tree_starts[request] - start;
    if (ancestors == -1) return;
    for (int64_t t = root > first ? root : first; t < end; ++t) {
        const int64_t bit = t - root < 63 ? t - root : 63;
        if (!(ancestors >> bit & 1)) scores[t] = unseen_score;
    }
}

template <typename Mode>
struct PartWork {
    using Number = typename Mode::Number;

    const AttentionCall& call;
    const Plan& plan;
    const Number* queries;  // of the KV head: [lines, padded D]
    const LineTile& tile;
    int64_t kv_head;
    const Bench<Mode>& bench;
    AttentionUnit& unit;

    // All lines of the tile over one split; take(line, part, values) gets what came of each.
    template <typename Take>
    void run(int64_t split, const Upcoming& next, Take&& take) {
        const LineGroup whole = widest(split);
        if (whole.begin >= whole.end) return;
        locate(call, tile.request, split * split_tokens, split_tokens, bench.offsets);
        const StoredTokens keys = stored(call.cache->keys, kv_head, bench.offsets);
        const StoredTokens values = stored(call.cache->values, kv_head, bench.offsets);
        if (takes_stored_keys())
            score_stored(whole, keys, values);
        else if (takes_stored())
            score_few(whole, keys, values);
        else if (bench.keeps_keys)
            for (int64_t t = whole.begin; t < whole.end; t += block_tokens)
                pack_keys<Mode>(keys, t, whole.end, keys_at(t), bench.panel_stride());
        else
            score_in_passing(whole, keys, values);
        if (!takes_stored())
            pack_values<Mode>(values, whole.begin, whole.end, values_at(whole.begin),
                              bench.value_stride());
        if (!bench.keeps_keys) prefetch_start(next);
        read_scales(keys, values, whole);
        for (int64_t first = 0; first < tile.num_lines; first += most_lines) {
            const LineGroup group = group_of(call, plan, tile, split, first);
            if (group.begin >= group.end) continue;
            if (bench.keeps_keys) score(group, group.begin, group.end);
            finish(split, group, values, take);
        }
    }

  private:
    LineGroup widest(int64_t split) const {
        LineTile all = tile;
        all.num_lines = 1;  // the tile's own span
        LineGroup group = group_of(call, plan, all, split, 0);
        group.count = tile.num_lines;
        return group;
    }

    StoredTokens stored(const void* cached, int64_t head, const int64_t* offsets) const {
        const CacheView& cache = *call.cache;
        return {static_cast<const char*>(cached) + head * cache.head_stride * number_bytes(cache.type),
                offsets, cache.type, call.shape->head_dim};
    }
    // Fetches the first keys of what is read next: one that waits for its first bytes again and again
    // has half of the memory's bandwidth.
    void prefetch_start(const Upcoming& next) {
        if (next.split < 0) return;
        const LineGroup group = widest(next.split);
        if (group.begin >= group.end) return;
        locate(call, tile.request, next.split * split_tokens + group.begin, block_tokens,
               bench.next_offsets);
        const StoredTokens keys = stored(call.cache->keys, next.kv_head, bench.next_offsets);
        for (int i = 0; i < block_tokens; ++i) keys.prefetch(i);
    }
    char* keys_at(int64_t token) const {
        return bench.keys + (bench.keeps_keys ? token / lanes * bench.panel_stride() : 0);
    }
    char* values_at(int64_t token) const {
        return bench.values + token / (tile_steps * Mode::in_lane) * bench.value_stride();
    }

    // The matrix unit takes keys as they are stored where panels are whole pages or parts of one.
    bool takes_stored_keys() const {
        return has_matrix_unit && Mode::in_lane == 2 && call.cache->type == CacheType::bf16 &&
               tile.num_lines <= 16 && call.shape->head_dim % 32 == 0 &&
               call.cache->block_size % lanes == 0;
    }

    // Few queries are the right factor then, and scores are transposed instead of keys. Entries of
    // tokens that are not stored are scored too, and masked later. What is read next is fetched
    // meanwhile: the next block, and after the last the first values.
    void score_stored(const LineGroup& group, const StoredTokens& keys, const StoredTokens& values) {
        const int64_t tiles = bench.padded_dim / 32, stride = call.cache->token_stride * 2;
        turn_queries(tiles);
        for (int64_t t = group.begin; t < group.end; t += block_tokens) {
            Panels panels, ahead;
            if (!find_panels(keys, t, stride, panels)) continue;
            const int64_t next = t + block_tokens;
            const bool is_last = next == group.end;
            if (!find_panels(is_last ? values : keys, is_last ? group.begin : next, stride, ahead))
                ahead = panels;
            alignas(64) float turned[4 * lanes * lanes];
            unit.score_stored(panels, ahead, stride, bench.keys, tiles, turned);
            for (int panel = 0; panel < 4; ++panel) {
                F16 square[lanes];
                for (int i = 0; i < lanes; ++i) square[i] = load(turned + (panel * lanes + i) * lanes);
                transpose(square);
                for (int64_t i = 0; i < group.count; ++i)
                    store(bench.scores + i * line_tokens + t + panel * lanes, square[i]);
            }
        }
    }

    // Queries as the right factor, in the place of keys.
    void turn_queries(int64_t tiles) {
        const char* lines = reinterpret_cast<const char*>(queries + tile.first_line * bench.padded_dim);
        for (int64_t at = 0; at < tiles; ++at) {
            F16 square[lanes];
            for (int i = 0; i < lanes; ++i)
                std::memcpy(&square[i], lines + i * bench.padded_dim * 2 + at * 64, 64);
            transpose(square);
            for (int i = 0; i < lanes; ++i)
                std::memcpy(bench.keys + at * tile_bytes + i * 64, &square[i], 64);
        }
    }

    // Where the panels of the block of token `first` begin; one without tokens is taken for another.
    bool find_panels(const StoredTokens& tokens, int64_t first, int64_t stride,
                     Panels& panels) const {
        const char* any = nullptr;
        for (int panel = 0; panel < 4; ++panel) {
            const char*& at = panels.at[panel];
            at = nullptr;
            for (int i = 0; i < lanes && !at; ++i)
                if (tokens.offsets[first + panel * lanes + i] >= 0)
                    at = tokens.at(first + panel * lanes + i) - i * stride;
            if (at) any = at;
        }
        for (const char*& at : panels.at)
            if (!at) at = any;
        return any != nullptr;
    }

    void score_in_passing(const LineGroup& group, const StoredTokens& keys,
                          const StoredTokens& values) {
        for (int64_t t = group.begin; t < group.end; t += block_tokens) {
            if (t + block_tokens == group.end)
                for (int i = 0; i < block_tokens; ++i) values.prefetch(group.begin + i);
            pack_keys<Mode>(keys, t, group.end, keys_at(t), bench.panel_stride());
            score(group, t, t + block_tokens);
        }
    }

    void score(const LineGroup& group, int64_t begin, int64_t end) {
        Product product;
        product.lines = static_cast<int>(group.count);
        product.a = queries + (tile.first_line + group.first) * bench.padded_dim;
        product.a_stride = bench.padded_dim * sizeof(Number);
        product.b = keys_at(begin);
        product.panel_stride = bench.panel_stride();
        product.tile_stride = tile_bytes;
        product.tiles = bench.padded_dim / (lanes * Mode::in_lane);
        product.panels = (end - begin) / lanes;
        product.out = bench.scores + begin;
        product.out_stride = line_tokens;
        unit.template multiply<Mode>(product);
    }

    void read_scales(const StoredTokens& keys, const StoredTokens& values, const LineGroup& group) {
        if (call.cache->type != CacheType::i8) return;
        for (int64_t t = group.begin; t < group.end; ++t) {
            bench.key_scales[t] = keys.scale(t);
            bench.value_scales[t] = values.scale(t);
        }
    }

    void multiply_values(const LineGroup& group) {
        Product product;
        product.lines = static_cast<int>(group.count);
        product.a = bench.weights + group.begin;
        product.a_stride = bench.weight_bytes;
        product.b = values_at(group.begin);
        product.panel_stride = tile_bytes;
        product.tile_stride = bench.value_stride();
        product.tiles = (group.end - group.begin) / (tile_steps * Mode::in_lane);
        product.panels = bench.padded_dim / lanes;
        product.out = bench.part;
        product.out_stride = bench.padded_dim;
        unit.template multiply<Mode>(product);
    }

    // Few lines take keys and values as they are stored.
    bool takes_stored() const {
        return Mode::in_lane == 1 && tile.num_lines <= few_lines;
    }

    // f(number of the stored type)
    template <typename F>
    void with_stored_type(F&& f) const {
        if (call.cache->type == CacheType::i8) f(int8_t{});
        else if (call.cache->type == CacheType::bf16) f(bf16{});
        else f(float{});
    }

    void score_few(const LineGroup& group, const StoredTokens& keys, const StoredTokens& values) {
        if constexpr (Mode::in_lane == 1)
            for (int64_t t = group.begin; t < group.end; t += block_tokens) {
                if (t + block_tokens == group.end)
                    for (int i = 0; i < block_tokens; ++i) values.prefetch(group.begin + i);
                const FewLines lines = {static_cast<int>(group.count),
                                        queries + tile.first_line * bench.padded_dim,
                                        bench.padded_dim, bench.scores + t, line_tokens};
                with_stored_type([&](auto number) {
                    score_block<decltype(number)>(keys, t, group.end, lines);
                });
            }
    }

    void add_few(const LineGroup& group, const StoredTokens& values) {
        if constexpr (Mode::in_lane == 1) {
            std::memset(bench.part, 0, group.count * bench.padded_dim * sizeof(float));
            for (int64_t t = group.begin; t < group.end; t += block_tokens) {
                const FewLines lines = {static_cast<int>(group.count), bench.weights + t,
                                        line_tokens, bench.part, bench.padded_dim};
                with_stored_type([&](auto number) {
                    add_value_block<decltype(number)>(values, t, group.end,
                                                      static_cast<int>(bench.padded_dim), lines);
                });
            }
        }
    }

    // Scores of a group to weights, and those times the values.
    template <typename Take>
    void finish(int64_t split, const LineGroup& group, const StoredTokens& values, Take&& take) {
        const bool is_i8 = call.cache->type == CacheType::i8;
        const int64_t start = split * split_tokens;
        const float softcap = call.shape->softcap;
        const float scale = (softcap > 0.0f ? 1.0f : call.shape->scale) * log2_e;
        PartOfLine parts[most_lines];
        for (int64_t i = 0; i < group.count; ++i) {
            float* scores = bench.scores + i * line_tokens;
            const int64_t row = (tile.first_line + group.first + i) / plan.groups;
            const Span span = seen_by(call, tile.request, row);
            if (is_i8)
                for (int64_t t = group.begin; t < group.end; t += lanes)
                    store(scores + t, load(scores + t) * load(bench.key_scales + t));
            if (softcap > 0.0f)
                cap(scores, group.begin, group.end, call.shape->scale, softcap);
            const ScoreLine line = {scores, span.first - start, span.end - start,
                                    scale * query_scale_at(*call.shape, call.rows->positions[row]),
                                    is_i8 ? bench.value_scales : nullptr};
            if (call.rows->tree_ancestors)
                hide_others(*call.rows, tile.request, row, start, group.begin,
                            line.last < group.end ? line.last : group.end, scores);
            parts[i] = weigh<Mode>(line, group.begin, group.end, bench.weights + i * line_tokens);
        }
        if (takes_stored()) add_few(group, values);
        else multiply_values(group);
        for (int64_t i = 0; i < group.count; ++i)
            take(group.first + i, parts[i], bench.part + i * bench.padded_dim);
    }
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
