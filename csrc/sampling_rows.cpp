#include "sampling_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "sampling_select.h"
#include "threads.h"

namespace slipstream {

ByLevel<SamplingKernels> sampling_kernels;

namespace {

constexpr float smallest_temperature = 1e-5f;  // as in sampling/logits.py
constexpr float endless = std::numeric_limits<float>::infinity(), no_limit = -endless;

// Fewer are done sooner by one thread than another is woken.
constexpr int64_t few_tokens = 2 * slice_tokens;

// As `parallel_for`, for tasks that together read `all_tokens` logits.
template <typename Work>
void spread(int64_t tasks, int64_t all_tokens, Work&& work) {
    if (all_tokens > few_tokens) return parallel_for(tasks, work);
    for (int64_t task = 0; task < tasks; ++task) work(task);
}

int64_t slice_size(int64_t first, int64_t tokens) { return std::min(slice_tokens, tokens - first); }

bool limits_top_k(const Row& row, int64_t tokens) { return row.top_k > 0 && row.top_k < tokens; }

bool is_cut_off(const Row& row, int64_t tokens) {
    return row.is_used && row.is_sampled && (limits_top_k(row, tokens) || row.top_p < 1.0f);
}

void set_total(Row& row, double total) {
    row.distribution.scale = 1.0f / static_cast<float>(std::max(total, 1.0));
}

int64_t total_mass(const float* weights, int64_t count) {
    int64_t mass = 0;
    for (int64_t i = 0; i < count; ++i) mass += mass_of(weights[i]);
    return mass;
}

int64_t wanted_mass(int64_t mass, float top_p) {
    const double wanted = std::ceil(static_cast<double>(mass) * static_cast<double>(top_p));
    return std::max<int64_t>(static_cast<int64_t>(wanted), 1);
}

// No kept logit is below it: from the largest of each group alone. `values` is for `groups` floats.
float bound_of(const Row& row, int64_t groups, bool by_top_k, int64_t wanted, float* values) {
    const auto& kernels = sampling_kernels.active();
    std::copy(row.groups, row.groups + groups, values);
    if (by_top_k)  // k groups hold k tokens that reach the k-th largest
        return row.top_k <= groups ? kth_largest(values, groups, row.top_k) : no_limit;
    kernels.weigh(values, groups, row.distribution);
    const int64_t kept = kernels.keep(values, groups, row.distribution.lowest_weight, endless);
    if (total_mass(values, kept) < wanted) return no_limit;
    const float weight = mass_threshold(values, kept, wanted);
    std::copy(row.groups, row.groups + groups, values);
    kernels.weigh(values, groups, row.distribution);
    float bound = row.distribution.largest;
    for (int64_t i = 0; i < groups; ++i)
        if (values[i] >= weight) bound = std::min(bound, row.groups[i]);
    return bound;
}

// The thresholds of top_k and top_p. `total`: of all weights that min_p leaves, without a top_k.
void cut_off(Row& row, int64_t tokens, double total) {
    thread_local std::vector<float> memory;
    const int64_t needed = 2 * tokens + slack;  // a list, and a copy of it
    if (static_cast<int64_t>(memory.size()) < needed) memory.resize(needed);
    float* values = memory.data();
    const auto& kernels = sampling_kernels.active();
    Distribution& found = row.distribution;
    const bool by_top_k = limits_top_k(row, tokens);
    const auto all = static_cast<int64_t>(total * mass_units);
    int64_t wanted = by_top_k ? 0 : wanted_mass(all, row.top_p);
    const float bound = bound_of(row, num_groups(tokens), by_top_k, wanted, values);
    int64_t count = kernels.gather(row.logits, tokens, row.groups, bound, values);
    if (by_top_k && count >= row.top_k) {
        found.lowest_logit = kth_largest(values, count, row.top_k);
        count = kernels.keep(values, count, found.lowest_logit, endless);
    }
    kernels.weigh(values, count, found);
    count = kernels.keep(values, count, row.min_p, endless);
    if (by_top_k) wanted = wanted_mass(total_mass(values, count), row.top_p);
    if (row.top_p < 1.0f && count) {
        std::copy(values, values + count, values + count);
        const float threshold = mass_threshold(values + count, count, wanted);
        found.lowest_weight = std::max(found.lowest_weight, threshold);
        count = kernels.keep(values, count, threshold, endless);
    }
    set_total(row, static_cast<double>(total_mass(values, count)) / mass_units);
}

// NaN if one of them is.
float larger(float a, float b) { return b > a || b != b ? b : a; }

void find_best(std::vector<Row>& rows, int64_t tokens, Workspace& space) {
    const auto& kernels = sampling_kernels.active();
    const int64_t slices = num_slices(tokens), count = static_cast<int64_t>(rows.size());
    space.bests.resize(count * slices);
    space.peaks.resize(count * slices);
    Best* bests = space.bests.data();
    float* peaks = space.peaks.data();
    spread(count * slices, count * tokens / 4, [&](int64_t task) {
        Row& row = rows[task / slices];
        if (!row.is_used) return;
        const int64_t first = task % slices * slice_tokens, size = slice_size(first, tokens);
        float* groups = row.groups ? row.groups + first / group_tokens : nullptr;
        bests[task] = kernels.largest(row.logits + first, size, groups, &peaks[task]);
        if (row.processed) {
            float processed;
            kernels.process(row.how, row.logits, first, size, row.processed);
            bests[task] = kernels.largest(row.processed + first, size, groups, &processed);
        }
        bests[task].token += first;
    });
    for (int64_t index = 0; index < count; ++index) {
        Row& row = rows[index];
        if (!row.is_used) continue;
        if (row.processed) row.logits = row.processed;
        row.best = bests[index * slices];
        row.peak = peaks[index * slices];
        for (int64_t slice = 1; slice < slices; ++slice) {
            const Best& best = bests[index * slices + slice];
            if (best.score > row.best.score) row.best = best;
            row.peak = larger(row.peak, peaks[index * slices + slice]);
        }
        row.distribution.largest = row.best.score == no_limit ? 0.0f : row.best.score;
    }
}

// The weights of tokens [first, first + size) in a race.
void weigh(const Race& race, int64_t first, int64_t size, float* weights) {
    const auto& kernels = sampling_kernels.active();
    kernels.probabilities(race.row->logits + first, size, race.row->distribution, weights);
    if (race.scale != 1.0f)
        for (int64_t i = 0; i < size; ++i) weights[i] *= race.scale;
    if (race.draft_probs && race.draft_vocabulary) {
        const int64_t* token = race.draft_vocabulary;
        const int64_t* end = token + race.draft_width;
        for (token = std::lower_bound(token, end, first); token < end && *token < first + size;
             ++token) {
            float& weight = weights[*token - first];
            const float rest = weight - race.draft_probs[token - race.draft_vocabulary];
            weight = std::max(rest, 0.0f);
        }
    } else if (race.draft_probs && race.draft_width > first) {
        kernels.subtract(weights, race.draft_probs + first,
                         std::min(size, race.draft_width - first));
    }
    if (race.removed >= first && race.removed < first + size) weights[race.removed - first] = 0.0f;
}

// How many tokens there are noise for, of `columns` columns.
int64_t num_raced(const Race& race, int64_t columns) {
    return race.noise_tokens ? race.noise_tokens[columns - 1] + 1 : columns;
}

// The weights of a race's columns by their tokens, of the tokens [first, first + size) to `out`.
void spread_columns(const Race& race, int64_t columns, int64_t first, int64_t size, float* out) {
    const int64_t* ids = race.noise_tokens;
    const int64_t begin = std::lower_bound(ids, ids + columns, first) - ids;
    const int64_t end = std::lower_bound(ids, ids + columns, first + size) - ids;
    std::fill(out, out + size, 0.0f);
    if (begin == end) return;
    sampling_kernels.active().probabilities(race.row->logits + begin, end - begin,
                                            race.row->distribution, race.probs_out + begin);
    for (int64_t column = begin; column < end; ++column)
        out[ids[column] - first] = race.probs_out[column];
}

}  // namespace

Workspace& workspace() {
    thread_local Workspace own;
    return own;
}

void set_sampling(Row& row, const SlotTensors& slots, int64_t slot, const Needs& needs,
                  int64_t tokens) {
    const float temperature = slots.temperature(slot);
    row.is_sampled = needs.sampling && temperature > 0.0f;
    row.top_k = needs.top_k ? slots.top_k(slot) : tokens;
    row.top_p = needs.top_p ? slots.top_p(slot) : 1.0f;
    row.min_p = needs.min_p ? slots.min_p(slot) : 0.0f;
    const float inverse = 1.0f / std::max(temperature, smallest_temperature);
    row.distribution = {0.0f, inverse, no_limit, row.min_p, 1.0f};
}

void scan(std::vector<Row>& rows, int64_t tokens, Workspace& space) {
    const auto& kernels = sampling_kernels.active();
    const int64_t slices = num_slices(tokens), groups = num_groups(tokens);
    int64_t cut = 0;
    for (const Row& row : rows) cut += is_cut_off(row, tokens);
    space.groups.resize(cut * groups);
    cut = 0;
    for (Row& row : rows)
        row.groups = is_cut_off(row, tokens) ? space.groups.data() + cut++ * groups : nullptr;
    find_best(rows, tokens, space);
    // Which rows need the sum of all weights, and which are cut off.
    auto& list = space.list;
    list.clear();
    for (size_t index = 0; index < rows.size(); ++index)
        if (rows[index].is_used && rows[index].is_sampled) list.push_back(index);
    const auto sampled = static_cast<int64_t>(list.size());
    if (!sampled) return;
    space.sums.assign(sampled * slices, 0.0f);
    float* sums = space.sums.data();
    spread(sampled * slices, sampled * tokens, [&](int64_t task) {
        const Row& row = rows[list[task / slices]];
        if (limits_top_k(row, tokens)) return;
        const int64_t first = task % slices * slice_tokens;
        sums[task] = kernels.sum_weights(row.logits + first, slice_size(first, tokens),
                                         row.distribution);
    });
    spread(sampled, cut * tokens, [&](int64_t task) {
        Row& row = rows[list[task]];
        double total = 0.0;
        for (int64_t slice = 0; slice < slices; ++slice) total += sums[task * slices + slice];
        if (row.groups) cut_off(row, tokens, total);
        else set_total(row, total);
    });
}

void find_confidences(const std::vector<Row>& rows, int64_t tokens, Workspace& space, float* out) {
    const auto& kernels = sampling_kernels.active();
    const int64_t slices = num_slices(tokens), count = static_cast<int64_t>(rows.size());
    space.sums.assign(count * slices, 0.0f);
    float* sums = space.sums.data();
    spread(count * slices, count * tokens, [&](int64_t task) {
        const Row& row = rows[task / slices];
        const int64_t first = task % slices * slice_tokens;
        const Distribution plain = {row.distribution.largest, 1.0f, no_limit, 0.0f, 1.0f};
        sums[task] = kernels.sum_weights(row.logits + first, slice_size(first, tokens), plain);
    });
    for (int64_t index = 0; index < count; ++index) {
        double total = 0.0;
        for (int64_t slice = 0; slice < slices; ++slice) total += sums[index * slices + slice];
        out[index] = 1.0f / static_cast<float>(std::max(total, 1.0));
    }
}

void run_races(Race* races, int64_t count, int64_t tokens, Workspace& space) {
    const auto& kernels = sampling_kernels.active();
    int64_t most = tokens;
    for (int64_t index = 0; index < count; ++index)
        most = std::max(most, num_raced(races[index], tokens));
    const int64_t slices = num_slices(most);
    space.bests.assign(count * slices, Best{0.0f, 0});
    Best* bests = space.bests.data();
    spread(count * slices, count * most, [&](int64_t task) {
        const Race& race = races[task / slices];
        const int64_t first = task % slices * slice_tokens;
        const int64_t size = slice_size(first, num_raced(race, tokens));
        if (size <= 0) return;
        float own[slice_tokens];
        if (race.noise_tokens) {
            spread_columns(race, tokens, first, size, own);
            bests[task] = kernels.race(own, first, size, race.key);
            return;
        }
        float* weights = race.probs_out ? race.probs_out + first : own;
        weigh(race, first, size, weights);
        bests[task] = kernels.race(weights, first, size, race.key);
    });
    for (int64_t index = 0; index < count; ++index) {
        Best& winner = races[index].winner;
        winner = bests[index * slices];
        for (int64_t slice = 1; slice < slices; ++slice)
            if (bests[index * slices + slice].score > winner.score)
                winner = bests[index * slices + slice];
        if (const int64_t* ids = races[index].noise_tokens)  // 0 where no token has a weight
            winner.token = std::lower_bound(ids, ids + tokens - 1, winner.token) - ids;
    }
}

void sum_weights(const Race* races, int64_t count, int64_t tokens, Workspace& space, float* out) {
    const int64_t slices = num_slices(tokens);
    space.sums.resize(count * slices);
    float* sums = space.sums.data();
    spread(count * slices, count * tokens, [&](int64_t task) {
        const int64_t first = task % slices * slice_tokens, size = slice_size(first, tokens);
        float weights[slice_tokens];
        weigh(races[task / slices], first, size, weights);
        sums[task] = sampling_kernels.active().sum_reaching(weights, size, 0.0f);
    });
    for (int64_t index = 0; index < count; ++index) {
        double total = 0.0;
        for (int64_t slice = 0; slice < slices; ++slice) total += sums[index * slices + slice];
        out[index] = static_cast<float>(total);
    }
}

}  // namespace slipstream
