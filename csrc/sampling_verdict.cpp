#include "sampling_verdict.h"

#include <algorithm>

#include "buffer.h"

namespace slipstream {
namespace {

constexpr int64_t padding = -1;

// The processors of a row; false: there is nothing to do.
bool set_processors(Processors& how, const DraftedRows& rows, int64_t row, int64_t request,
                    int64_t offset, const SlotTensors& slots, const Needs& needs) {
    how = Processors{};
    const int64_t slot = rows.slots[request];
    const float* numbers = slots.numbers(slot);
    how.presence = numbers[3];
    how.frequency = numbers[4];
    how.repetition = numbers[5];
    const bool punishes = how.presence != 0.0f || how.frequency != 0.0f || how.repetition != 1.0f;
    if (needs.penalties && punishes) {
        how.output_counts = slots.output_counts + slot * slots.vocab_size;
        how.prompt_mask = slots.prompt_mask + slot * slots.vocab_size;
        how.drafted = rows.draft_tokens + request * rows.most_drafts;
        how.num_drafted = std::min(offset, rows.most_drafts);
    }
    if (needs.bias) how.bias = slots.bias + slot * slots.vocab_size;
    if (needs.min_tokens && slots.num_output(slot) + offset < slots.min_tokens(slot)) {
        how.withheld = slots.stop_ids + slot * slots.num_stop_ids;
        how.num_withheld = slots.num_stop_ids;
    }
    if (rows.allowed) how.allowed = rows.allowed + row * rows.allowed_stride;
    return how.output_counts || how.bias || how.num_withheld || how.allowed;
}

void set_rows(std::vector<Row>& found, const LogitRows& logits, const DraftedRows& rows,
              const SlotTensors& slots, const Needs& needs) {
    const int64_t width = rows.most_drafts + 1;
    found.resize(rows.num_rows);
    float* processed = nullptr;
    if (needs.penalties || needs.bias || needs.min_tokens || rows.allowed)
        processed = static_cast<float*>(
            scratch(Scratch::sampling, rows.num_rows * logits.tokens * sizeof(float)));
    for (int64_t index = 0; index < rows.num_rows; ++index) {
        const bool is_ragged = rows.row_request != nullptr;
        const int64_t request = is_ragged ? rows.row_request[index] : index / width;
        const int64_t offset = is_ragged ? rows.row_offset[index] : index % width;
        Row& row = found[index];
        row.is_used = is_ragged || offset <= rows.num_draft_tokens[request];
        row.logits = logits.data + index * logits.stride;
        row.processed = nullptr;
        set_sampling(row, slots, rows.slots[request], needs, logits.tokens);
        if (processed && set_processors(row.how, rows, index, request, offset, slots, needs))
            row.processed = processed + index * logits.tokens;
    }
}

float draft_probability(const DraftedRows& rows, int64_t request, int64_t place, int64_t token) {
    if (!rows.draft_probs || rows.is_certain(request, place)) return 1.0f;
    int64_t column = token;
    if (const int64_t* first = rows.draft_vocabulary) {
        const int64_t* end = first + rows.probs_width;
        const int64_t* at = std::lower_bound(first, end, token);
        column = at < end && *at == token ? at - first : rows.probs_width;
    }
    if (column < 0 || column >= rows.probs_width) return 0.0f;
    return rows.draft_probs[request * rows.probs_stride + place * rows.probs_place_stride + column];
}

// One number in [0, 1), a multiple of 2^-24.
float uniform(const NoiseKey& key) {
    uint32_t c0 = 0, c1 = key.position, c2 = key.step, c3 = key.purpose;
    uint32_t k0 = key.seed_low, k1 = key.seed_high;
    for (int round = 0; round < 10; ++round) {
        const uint64_t low = uint64_t{c0} * 0xD2511F53u, high = uint64_t{c2} * 0xCD9E8D57u;
        c0 = static_cast<uint32_t>(high >> 32) ^ c1 ^ k0;
        c2 = static_cast<uint32_t>(low >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(high);
        c3 = static_cast<uint32_t>(low);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return static_cast<float>(c0 >> 8) * 0x1p-24f;
}

float acceptance_noise(const DraftedRows& rows, const SlotTensors& slots, int64_t request,
                       int64_t place) {
    const int64_t slot = rows.slots[request];
    return uniform(noise_key(slots.seed(slot), rows.positions[request] + place, slots.steps(slot),
                             accept_noise));
}

// The probability of a token in a row; 0 of what is none.
float probability(const LogitRows& logits, const Row& row, int64_t token) {
    if (token < 0 || token >= logits.tokens) return 0.0f;
    float p;
    sampling_kernels.active().probabilities(row.logits + token, 1, row.distribution, &p);
    return p;
}

bool is_accepted(const LogitRows& logits, const DraftedRows& rows, const SlotTensors& slots,
                 const Row& row, const float* rates, int64_t request, int64_t place) {
    const int64_t token = rows.draft_tokens[request * rows.most_drafts + place];
    if (!rates && !row.is_sampled) return token == row.best.token;
    const float chance = acceptance_noise(rows, slots, request, place);
    if (rates) return chance < rates[request * rows.most_drafts + place];
    // Strict, so that p = 0 is refused even where the other side is 0.
    return chance * draft_probability(rows, request, place, token) < probability(logits, row, token);
}

// The race for the last token of a request, after `accepted` draft tokens.
Race last_race(const DraftedRows& rows, const SlotTensors& slots, const Row& row, int64_t request,
               int64_t accepted) {
    const int64_t slot = rows.slots[request];
    int64_t refused = padding;
    if (accepted < rows.most_drafts && accepted < rows.num_draft_tokens[request])
        refused = rows.draft_tokens[request * rows.most_drafts + accepted];
    Race race{};
    race.row = &row;
    race.removed = padding;
    race.key = noise_key(slots.seed(slot), rows.positions[request] + accepted, slots.steps(slot),
                         refused >= 0 ? residual_noise : target_noise);
    if (refused < 0) return race;
    if (rows.is_certain(request, accepted)) {
        race.removed = refused;
    } else if (rows.draft_probs) {
        race.draft_probs = rows.draft_probs + request * rows.probs_stride +
                           accepted * rows.probs_place_stride;
        race.draft_width = rows.probs_width;
        race.draft_vocabulary = rows.draft_vocabulary;
    }
    return race;
}

// Runs races and writes their winners to tokens[i]; a race without a winner is run again without a
// draft.
void settle(std::vector<Race>& races, std::vector<int64_t*>& tokens, int64_t num_tokens,
            Workspace& space) {
    run_races(races.data(), static_cast<int64_t>(races.size()), num_tokens, space);
    size_t again = 0;
    for (size_t index = 0; index < races.size(); ++index) {
        Race& race = races[index];
        *tokens[index] = race.winner.token;
        // Where p and q are equal up to rounding nothing is left, and p is as good.
        if (race.winner.score > 0.0f || !(race.draft_probs || race.removed >= 0)) continue;
        race.draft_probs = nullptr;
        race.scale = 1.0f;
        race.removed = padding;
        races[again] = race;
        tokens[again++] = tokens[index];
    }
    if (!again) return;
    run_races(races.data(), static_cast<int64_t>(again), num_tokens, space);
    for (size_t index = 0; index < again; ++index) *tokens[index] = races[index].winner.token;
}

// Drafts whose tokens are judged together. What the numbers are, and why:
// slipstream/kernels/reference/block_verification.py.
struct Blocks {
    std::vector<float> weights, masses;  // [R, K + 1], of prefixes
    std::vector<int64_t> lengths;        // [R], -1 of requests that are judged in another way
    std::vector<Race> races;             // whose weights sum up to the masses at `places`
    std::vector<int64_t> places;
    std::vector<float> sums;

    void weigh(const LogitRows& logits, const DraftedRows& rows, const SlotTensors& slots,
               int64_t request, const Row* own);
    int64_t accepted(const DraftedRows& rows, const SlotTensors& slots, int64_t request) const;
};

void Blocks::weigh(const LogitRows& logits, const DraftedRows& rows, const SlotTensors& slots,
                   int64_t request, const Row* own) {
    const int64_t* drafted = rows.draft_tokens + request * rows.most_drafts;
    const int64_t first = request * (rows.most_drafts + 1);
    int64_t& length = lengths[request];
    length = 0;
    while (length < rows.num_draft_tokens[request] && drafted[length] >= 0) ++length;
    float weight = weights[first] = 1.0f;
    for (int64_t place = 0; place < length; ++place) {
        const float p = probability(logits, own[place], drafted[place]);
        const float q = draft_probability(rows, request, place, drafted[place]);
        const bool is_certain = !rows.draft_probs || rows.is_certain(request, place);
        // NaN ends the draft: nothing after it is accepted.
        masses[first + place] = p == p ? weight * (1.0f - p) : weight;
        // Of weights 0 and 1 the prefix is refused and accepted whatever the mass is.
        if (p == p && !is_certain && weight > 0.0f && weight < 1.0f) {
            Race race = last_race(rows, slots, own[place], request, place);
            race.scale = weight;
            races.push_back(race);
            places.push_back(first + place);
        }
        const float reached = weight * p;
        weight = reached > 0.0f ? (reached < q ? reached / q : 1.0f) : 0.0f;
        weights[first + place + 1] = weight;
    }
}

int64_t Blocks::accepted(const DraftedRows& rows, const SlotTensors& slots,
                         int64_t request) const {
    const int64_t first = request * (rows.most_drafts + 1);
    for (int64_t count = lengths[request]; count > 0; --count) {
        const float weight = weights[first + count], mass = masses[first + count];
        float bound = weight;
        if (count < lengths[request] && weight > 0.0f && weight < 1.0f)
            bound = mass / (mass + 1.0f - weight);
        if (acceptance_noise(rows, slots, request, count - 1) < bound) return count;
    }
    return 0;
}

Blocks& weigh_blocks(const LogitRows& logits, const DraftedRows& rows, const SlotTensors& slots,
                     const Needs& needs, Workspace& space) {
    thread_local Blocks found;
    const int64_t width = rows.most_drafts + 1;
    found.lengths.assign(rows.num_requests, padding);
    if (!needs.block) return found;
    found.weights.resize(rows.num_requests * width);
    found.masses.resize(rows.num_requests * width);
    found.races.clear();
    found.places.clear();
    for (int64_t request = 0; request < rows.num_requests; ++request) {
        const int64_t slot = rows.slots[request];
        const Row* own = &space.rows[rows.first(request)];
        if (own->is_sampled && slots.verification(slot) == block_verification)
            found.weigh(logits, rows, slots, request, own);
    }
    const auto count = static_cast<int64_t>(found.races.size());
    found.sums.resize(count);
    sum_weights(found.races.data(), count, logits.tokens, space, found.sums.data());
    for (int64_t index = 0; index < count; ++index)
        found.masses[found.places[index]] = found.sums[index];
    return found;
}

// Coupled requests (batch indices `open`, which is used up): the target's token is sampled at every
// place, and a draft token is accepted if it equals it. Places are sampled one after the other, each
// for all requests together, so that no noise is computed for places after a rejected token.
void follow_samples(std::vector<int64_t>& open, const LogitRows& logits, const DraftedRows& rows,
                    const SlotTensors& slots, const VerdictOut& out, Workspace& space) {
    thread_local std::vector<Race> races;
    const int64_t width = rows.most_drafts + 1;
    for (int64_t place = 0; !open.empty(); ++place) {
        races.assign(open.size(), Race{});
        for (size_t index = 0; index < open.size(); ++index) {
            const int64_t request = open[index], slot = rows.slots[request];
            Race& race = races[index];
            race.row = &space.rows[rows.first(request) + place];
            race.removed = padding;
            race.key = noise_key(slots.seed(slot), rows.positions[request] + place, 0,
                                 target_noise);
        }
        run_races(races.data(), static_cast<int64_t>(races.size()), logits.tokens, space);
        size_t again = 0;
        for (size_t index = 0; index < races.size(); ++index) {
            const int64_t request = open[index], token = races[index].winner.token;
            out.token_ids[request * width + place] = token;
            out.num_tokens[request] = place + 1;
            out.num_accepted[request] = place;
            if (place < rows.num_drafts(request) &&
                rows.draft_tokens[request * rows.most_drafts + place] == token)
                open[again++] = request;
        }
        open.resize(again);
    }
}

}  // namespace

void verify(const LogitRows& logits, const DraftedRows& rows, const SlotTensors& slots,
            const Needs& needs, const float* rates, const VerdictOut& out) {
    thread_local std::vector<Race> races;
    thread_local std::vector<int64_t*> drawn;
    thread_local std::vector<int64_t> open;
    Workspace& space = workspace();
    set_rows(space.rows, logits, rows, slots, needs);
    scan(space.rows, logits.tokens, space);
    const Blocks& blocks = weigh_blocks(logits, rows, slots, needs, space);
    races.clear();
    drawn.clear();
    open.clear();
    const int64_t width = rows.most_drafts + 1;
    for (int64_t request = 0; request < rows.num_requests; ++request) {
        const int64_t first = rows.first(request), drafts = rows.num_drafts(request);
        int64_t* tokens = out.token_ids + request * width;
        for (int64_t place = 0; place < width; ++place)
            out.largest[request * width + place] =
                space.rows[first + std::min(place, drafts)].peak;
        if (needs.coupled && space.rows[first].is_sampled &&
            slots.is_coupled(rows.slots[request])) {
            std::fill(tokens, tokens + width, padding);
            open.push_back(request);
            continue;
        }
        const bool is_block = blocks.lengths[request] >= 0;
        int64_t count = is_block ? blocks.accepted(rows, slots, request) : 0;
        while (!is_block && count < drafts &&
               is_accepted(logits, rows, slots, space.rows[first + count], rates, request, count))
            ++count;
        std::copy_n(rows.draft_tokens + request * rows.most_drafts, count, tokens);
        const Row& last = space.rows[first + count];
        std::fill(tokens + count, tokens + width, padding);
        tokens[count] = last.best.token;
        out.num_tokens[request] = count + 1;
        out.num_accepted[request] = count;
        if (!last.is_sampled) continue;
        races.push_back(last_race(rows, slots, last, request, count));
        if (count < blocks.lengths[request])
            races.back().scale = blocks.weights[request * width + count];
        drawn.push_back(tokens + count);
    }
    if (!races.empty()) settle(races, drawn, logits.tokens, space);
    follow_samples(open, logits, rows, slots, out, space);
}

void find_best_tokens(const LogitRows& logits, int64_t count, float* confidence_out,
                      int64_t* out) {
    Workspace& space = workspace();
    Row row{};
    row.is_used = true;
    space.rows.assign(count, row);
    for (int64_t index = 0; index < count; ++index)
        space.rows[index].logits = logits.data + index * logits.stride;
    scan(space.rows, logits.tokens, space);
    for (int64_t index = 0; index < count; ++index) out[index] = space.rows[index].best.token;
    if (confidence_out) find_confidences(space.rows, logits.tokens, space, confidence_out);
}

void draft(const LogitRows& logits, int64_t count, const int64_t* request_slots,
           const int64_t* positions, const SlotTensors& slots, const Needs& needs,
           float* probs_out, int64_t probs_stride, float* confidence_out,
           const int64_t* vocabulary, int64_t* out) {
    thread_local std::vector<Race> races;
    thread_local std::vector<int64_t*> drawn;
    Workspace& space = workspace();
    Needs wanted = needs;
    wanted.sampling = true;
    space.rows.resize(count);
    for (int64_t index = 0; index < count; ++index) {
        Row& row = space.rows[index];
        row.is_used = true;
        row.logits = logits.data + index * logits.stride;
        row.processed = nullptr;
        set_sampling(row, slots, request_slots[index], wanted, logits.tokens);
    }
    scan(space.rows, logits.tokens, space);
    if (confidence_out) find_confidences(space.rows, logits.tokens, space, confidence_out);
    races.clear();
    drawn.clear();
    for (int64_t index = 0; index < count; ++index) {
        const Row& row = space.rows[index];
        out[index] = row.best.token;
        float* probs = probs_out + index * probs_stride;
        if (!row.is_sampled) {
            std::fill(probs, probs + logits.tokens, 0.0f);
            continue;
        }
        const int64_t slot = request_slots[index];
        Race race{};
        race.row = &row;
        race.removed = padding;
        const bool alike = needs.coupled && slots.is_coupled(slot);
        race.key = noise_key(slots.seed(slot), positions[index], slots.steps(slot),
                             alike ? target_noise : draft_noise);
        race.noise_tokens = alike ? vocabulary : nullptr;
        race.probs_out = probs;
        races.push_back(race);
        drawn.push_back(out + index);
    }
    if (!races.empty()) settle(races, drawn, logits.tokens, space);
}

void commit(int64_t count, const int64_t* request_slots, const int64_t* token_ids, int64_t width,
            const int64_t* num_tokens, const SlotTensors& slots) {
    for (int64_t index = 0; index < count; ++index) {
        const int64_t slot = request_slots[index], given = num_tokens[index];
        slots.steps(slot) += given > 0;
        slots.num_output(slot) += given;
        if (!slots.output_counts) continue;
        int32_t* counts = slots.output_counts + slot * slots.vocab_size;
        for (int64_t place = 0; place < std::min(given, width); ++place) {
            const int64_t token = token_ids[index * width + place];
            if (token >= 0 && token < slots.vocab_size) ++counts[token];
        }
    }
}

}  // namespace slipstream
