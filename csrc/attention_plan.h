// Who attends to what: the work of a pass, cut. Compiled for each level.
//
// The query heads that share a KV head and the rows of a request are folded into one axis, line
// row * groups + head, so that keys and values are read once for all of them. Work is a tile of
// lines times a KV head, and of its context a run of splits; which lines share a tile and which
// splits a run changes no number.
#pragma once

#include "attention_rotate.h"
#include "threads.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Tokens first .. end.
struct Span {
    int64_t first, end;
};

inline int64_t context_of(const AttentionCall& call, int64_t request) {
    const int64_t most = call.rows->table_width * call.cache->block_size;
    const int64_t length = call.rows->context_lens[request];
    return length < 0 ? 0 : length < most ? length : most;
}

// What a row sees; of trees, without regard to ancestors.
inline Span seen_by(const AttentionCall& call, int64_t request, int64_t row) {
    const AttentionRows& rows = *call.rows;
    Span span = {rows.first_seen > 0 ? rows.first_seen : 0, context_of(call, request)};
    const int64_t position = rows.places[row], window = call.shape->window;
    if (window > 0 && span.first < position - window + 1) span.first = position - window + 1;
    int64_t own = rows.tree_tokens ? rows.tree_tokens[row] : position;
    if (rows.last_seen && rows.last_seen[row] > own) own = rows.last_seen[row];
    if ((rows.causal || rows.tree_tokens) && span.end > own + 1) span.end = own + 1;
    if (span.end < span.first) span.end = span.first;
    return span;
}

// Lines of one request; all of them see nothing outside of `span`.
struct LineTile {
    int64_t request, first_line, num_lines;
    Span span;
    int64_t first_split, num_splits;
    int64_t first_part;  // where parts of splits are kept for `fold`; those of KV heads follow
};

struct Plan {
    LineTile* tiles;
    int64_t num_tiles, tile_lines, runs;  // into how many runs a tile's splits are cut
    int64_t num_lines;                    // of a KV head
    int64_t parts;                        // lines of parts that are kept; 0 where runs is 1
    int groups;
};

inline int64_t count_tiles(const AttentionRows& rows, int groups, int64_t tile_lines) {
    int64_t tiles = 0;
    for (int64_t request = 0; request < rows.num_requests; ++request) {
        const int64_t lines = (rows.query_start[request + 1] - rows.query_start[request]) * groups;
        tiles += (lines + tile_lines - 1) / tile_lines;
    }
    return tiles;
}

inline Span seen_by_lines(const AttentionCall& call, int64_t request, int64_t first_line,
                          int64_t num_lines, int groups) {
    Span all = {INT64_MAX, 0};
    const int64_t last = (first_line + num_lines - 1) / groups;
    for (int64_t row = first_line / groups; row <= last; ++row) {
        const Span span = seen_by(call, request, row);
        if (span.first >= span.end) continue;
        if (span.first < all.first) all.first = span.first;
        if (span.end > all.end) all.end = span.end;
    }
    return all.end ? all : Span{0, 0};
}

// Larger tiles read keys less often; there are to be a few for each thread.
constexpr int64_t largest_tile = 256, work_per_thread = 4, most_part_bytes = int64_t{64} << 20;

inline int64_t choose_tile_lines(const AttentionCall& call, int groups) {
    const int64_t enough = num_threads() > 1 ? num_threads() * work_per_thread : 1;
    int64_t tile_lines = largest_tile;
    while (tile_lines > most_lines &&
           count_tiles(*call.rows, groups, tile_lines) * call.shape->num_kv_heads < enough)
        tile_lines /= 2;
    return tile_lines;
}

// Fills `plan.tiles`, whose memory has room for the tiles that were counted before.
inline void fill_plan(const AttentionCall& call, int64_t padded_dim, Plan& plan) {
    const AttentionRows& rows = *call.rows;
    int64_t count = 0, most_splits = 1, parts = 0;
    for (int64_t request = 0; request < rows.num_requests; ++request) {
        const int64_t end = rows.query_start[request + 1] * plan.groups;
        for (int64_t line = rows.query_start[request] * plan.groups; line < end;
             line += plan.tile_lines) {
            LineTile& tile = plan.tiles[count++];
            tile.request = request;
            tile.first_line = line;
            tile.num_lines = end - line < plan.tile_lines ? end - line : plan.tile_lines;
            tile.span = seen_by_lines(call, request, line, tile.num_lines, plan.groups);
            tile.first_split = tile.span.first / split_tokens;
            tile.num_splits = (tile.span.end + split_tokens - 1) / split_tokens - tile.first_split;
            tile.first_part = parts;
            parts += tile.num_splits * tile.num_lines * call.shape->num_kv_heads;
            if (tile.num_splits > most_splits) most_splits = tile.num_splits;
        }
    }
    const int64_t work = count * call.shape->num_kv_heads;
    const int64_t enough = num_threads() > 1 ? num_threads() * work_per_thread : 1;
    plan.runs = 1;
    if (work && work < enough && parts * (padded_dim + 2) * 4 <= most_part_bytes)
        plan.runs = (enough + work - 1) / work < most_splits ? (enough + work - 1) / work : most_splits;
    plan.parts = plan.runs > 1 ? parts : 0;
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
