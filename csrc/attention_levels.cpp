// Attention. Compiled once for each level of instructions.
#include "attention.h"

#include "attention_part.h"

namespace slipstream::SLIPSTREAM_LEVEL {
namespace {

template <typename Number>
void store_rows(const AttentionCall& call) {
    const auto* x = static_cast<const Number*>(call.x);
    for_rows(call.rows->num_rows, call.x_stride,
             [&](int64_t row) { store_row(call, row, x + row * call.x_stride); });
}

void run_store(const AttentionCall& call) {
    if (call.x_is_bf16) store_rows<bf16>(call);
    else store_rows<float>(call);
}

// A line's values over its sum of weights, to its row and head; zeros where it saw nothing.
template <typename Mode, typename Number>
void put_line(const AttentionCall& call, const Plan& plan, int64_t line, int64_t kv_head,
              const LineState& state) {
    const int head_dim = call.shape->head_dim;
    const int64_t head = kv_head * plan.groups + line % plan.groups;
    Number* out = static_cast<Number*>(call.out) + line / plan.groups * call.out_stride +
                  head * head_dim;
    const float* sinks = call.shape->sinks;
    const F16 factor = broadcast(share_of_values(state, sinks ? sinks + head : nullptr));
    for (int d = 0; d < head_dim; d += lanes * Mode::in_lane) {
        F16 parts[2] = {load(state.values + d)};
        if (Mode::in_lane == 2) {
            parts[1] = load(state.values + d + lanes);
            in_order<Mode>(parts[0], parts[1]);
        }
        for (int i = 0; i < Mode::in_lane; ++i)
            store_some(out + d + i * lanes, parts[i] * factor, head_dim - d - i * lanes);
    }
}

// What splits left of a line where they were worked on apart: first the values [padded D], then
// largest score and sum.
struct KeptParts {
    float* memory;
    int64_t padded_dim;

    float* at(const LineTile& tile, int64_t kv_head, int64_t split, int64_t line) const {
        const int64_t index =
            tile.first_part + (kv_head * tile.num_splits + split) * tile.num_lines + line;
        return memory + index * (padded_dim + 2);
    }
};

template <typename Mode, typename Number>
struct Pass {
    const AttentionCall& call;
    const Plan& plan;
    int64_t padded_dim;
    const typename Mode::Number* queries;
    KeptParts kept;

    const typename Mode::Number* queries_of(int64_t kv_head) const {
        return queries + kv_head * plan.num_lines * padded_dim;
    }

    // What is read after a split of a tile, by this task or by the next.
    Upcoming after(const LineTile& tile, int64_t split, int64_t kv_head) const {
        if (split + 1 < tile.num_splits) return {tile.first_split + split + 1, kv_head};
        return {kv_head + 1 < call.shape->num_kv_heads ? tile.first_split : -1, kv_head + 1};
    }

    // A tile and KV head over its whole context.
    void run_tile(int64_t index) const {
        const LineTile& tile = plan.tiles[index / call.shape->num_kv_heads];
        const int64_t kv_head = index % call.shape->num_kv_heads;
        const Bench<Mode> bench(padded_dim, tile.num_lines);
        AttentionUnit unit;
        PartWork<Mode> work{call, plan, queries_of(kv_head), tile, kv_head, bench, unit};
        for (int64_t line = 0; line < tile.num_lines; ++line) forget(bench.line(line), padded_dim);
        for (int64_t split = 0; split < tile.num_splits; ++split)
            work.run(tile.first_split + split, after(tile, split, kv_head),
                     [&](int64_t line, const PartOfLine& part, const float* values) {
                         fold(bench.line(line), part, values, padded_dim);
                     });
        for (int64_t line = 0; line < tile.num_lines; ++line)
            put_line<Mode, Number>(call, plan, tile.first_line + line, kv_head, bench.line(line));
    }

    // A run of a tile's splits, which are kept.
    void run_parts(int64_t index) const {
        const int64_t run = index % plan.runs, kv_head = index / plan.runs % call.shape->num_kv_heads;
        const LineTile& tile = plan.tiles[index / plan.runs / call.shape->num_kv_heads];
        const int64_t end = tile.num_splits * (run + 1) / plan.runs;
        const Bench<Mode> bench(padded_dim, tile.num_lines);
        AttentionUnit unit;
        PartWork<Mode> work{call, plan, queries_of(kv_head), tile, kv_head, bench, unit};
        for (int64_t split = tile.num_splits * run / plan.runs; split < end; ++split) {
            for (int64_t line = 0; line < tile.num_lines; ++line)
                kept.at(tile, kv_head, split, line)[padded_dim] = no_score;
            work.run(tile.first_split + split, after(tile, split, kv_head),
                     [&](int64_t line, const PartOfLine& part, const float* values) {
                         float* to = kept.at(tile, kv_head, split, line);
                         std::memcpy(to, values, padded_dim * sizeof(float));
                         to[padded_dim] = part.largest;
                         to[padded_dim + 1] = part.sum;
                     });
        }
    }

    void fold_parts(int64_t index) const {
        const LineTile& tile = plan.tiles[index / call.shape->num_kv_heads];
        const int64_t kv_head = index % call.shape->num_kv_heads;
        const Bench<Mode> bench(padded_dim, 1);
        const LineState state = bench.line(0);
        for (int64_t line = 0; line < tile.num_lines; ++line) {
            forget(state, padded_dim);
            for (int64_t split = 0; split < tile.num_splits; ++split) {
                const float* part = kept.at(tile, kv_head, split, line);
                fold(state, {part[padded_dim], part[padded_dim + 1]}, part, padded_dim);
            }
            put_line<Mode, Number>(call, plan, tile.first_line + line, kv_head, state);
        }
    }
};

// Rows after those of the last request belong to no request.
template <typename Number>
void clear_rest(const AttentionCall& call) {
    const int64_t columns = static_cast<int64_t>(call.shape->num_heads) * call.shape->head_dim;
    const int64_t used = call.rows->query_start[call.rows->num_requests];
    for (int64_t row = used; row < call.rows->num_rows; ++row)
        std::memset(static_cast<Number*>(call.out) + row * call.out_stride, 0,
                    columns * sizeof(Number));
}

template <typename Mode, typename Number>
void attend_in(const AttentionCall& call) {
    const AttentionShape& shape = *call.shape;
    const AttentionRows& rows = *call.rows;
    Plan plan{};
    plan.groups = shape.num_heads / shape.num_kv_heads;
    plan.num_lines = rows.num_rows * plan.groups;
    plan.tile_lines = choose_tile_lines(call, plan.groups);
    plan.num_tiles = count_tiles(rows, plan.groups, plan.tile_lines);
    const int64_t padded_dim = round_up(shape.head_dim, lanes * Mode::in_lane);
    // Products read up to 31 lines past the last.
    const int64_t query_bytes = round_up(
        (shape.num_kv_heads * plan.num_lines + most_lines) * padded_dim * sizeof(typename Mode::Number),
        64);
    char* memory = static_cast<char*>(
        scratch(Scratch::input, query_bytes + plan.num_tiles * sizeof(LineTile)));
    auto* queries = reinterpret_cast<typename Mode::Number*>(memory);
    plan.tiles = reinterpret_cast<LineTile*>(memory + query_bytes);
    fill_plan(call, padded_dim, plan);
    const auto* x = static_cast<const Number*>(call.x);
    const int64_t query_columns = static_cast<int64_t>(shape.num_heads) * shape.head_dim;
    for_rows(rows.num_rows, call.x_stride, [&](int64_t row) {
        const Number* from = x + row * call.x_stride;
        prepare_queries<Mode>(call, row, from, queries, plan.num_lines, padded_dim);
        if (!call.is_stored) store_row(call, row, from + query_columns);
    });
    KeptParts kept = {nullptr, padded_dim};
    if (plan.parts)
        kept.memory = static_cast<float*>(
            scratch(Scratch::sums, plan.parts * (padded_dim + 2) * sizeof(float)));
    const Pass<Mode, Number> pass{call, plan, padded_dim, queries, kept};
    const int64_t work = plan.num_tiles * shape.num_kv_heads;
    if (plan.runs == 1) {
        parallel_for(work, [&](int64_t index) { pass.run_tile(index); });
    } else {
        parallel_for(work * plan.runs, [&](int64_t index) { pass.run_parts(index); });
        parallel_for(work, [&](int64_t index) { pass.fold_parts(index); });
    }
    clear_rest<Number>(call);
}

void require_rows_in_order(const AttentionRows& rows) {
    int64_t before = 0;
    for (int64_t request = 0; request <= rows.num_requests; ++request) {
        const int64_t start = rows.query_start[request];
        if (start < before || start > rows.num_rows || (request == 0 && start))
            throw_of_query_start();
        before = start;
    }
}

void run_attend(const AttentionCall& call) {
    if (!call.rows->num_rows) return;
    require_rows_in_order(*call.rows);
    if (!call.x_is_bf16) return attend_in<Floats, float>(call);
#if defined(__AVX512BF16__)
    attend_in<Pairs, bf16>(call);
#else
    attend_in<Floats, bf16>(call);
#endif
}

const AttentionKernels attention_here = {run_attend, run_store};
const bool attention_entered = attention_kernels.enter(this_level, &attention_here);

}  // namespace
}  // namespace slipstream::SLIPSTREAM_LEVEL
