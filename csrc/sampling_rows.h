// Rows of logits on their way to a token: what verification and drafting share.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling.h"

namespace slipstream {

// `Verification` of core/verification.py.
constexpr int64_t coupled_verification = 1, block_verification = 2;

// The state of all slots; shapes as in `SamplingSlots` of sampling.py, null where there is
// none. `ints` and `floats` have a stride, the others are dense.
struct SlotTensors {
    int64_t num_slots;
    int64_t* ints;
    int64_t ints_stride;
    const float* floats;
    int64_t floats_stride;
    const int64_t* stop_ids;
    int64_t num_stop_ids;
    int32_t* output_counts;
    const uint8_t* prompt_mask;
    const float* bias;
    int64_t vocab_size;

    int64_t top_k(int64_t slot) const { return ints[slot * ints_stride]; }
    int64_t seed(int64_t slot) const { return ints[slot * ints_stride + 1]; }
    int64_t& steps(int64_t slot) const { return ints[slot * ints_stride + 2]; }
    int64_t min_tokens(int64_t slot) const { return ints[slot * ints_stride + 3]; }
    int64_t& num_output(int64_t slot) const { return ints[slot * ints_stride + 4]; }
    int64_t verification(int64_t slot) const { return ints[slot * ints_stride + 6]; }
    bool is_coupled(int64_t slot) const { return verification(slot) == coupled_verification; }
    const float* numbers(int64_t slot) const { return floats + slot * floats_stride; }
    float temperature(int64_t slot) const { return numbers(slot)[0]; }
    float top_p(int64_t slot) const { return numbers(slot)[1]; }
    float min_p(int64_t slot) const { return numbers(slot)[2]; }
};

// What any request of the batch needs.
struct Needs {
    bool sampling, top_k, top_p, min_p, penalties, bias, min_tokens, block, coupled;
};

struct Row {
    const float* logits;  // processed ones after the scan
    float* processed;     // where they go; null: there is nothing to do
    Processors how;
    bool is_used, is_sampled;
    int64_t top_k;  // all tokens or more: no limit
    float top_p, min_p;
    float* groups;  // the largest of each group; null where nothing is cut off
    Best best;
    float peak;                 // the largest logit before processing; NaN if there is one
    Distribution distribution;  // of sampled rows
};

// Fills in how the row of a slot is sampled, of `tokens` tokens.
void set_sampling(Row& row, const SlotTensors& slots, int64_t slot, const Needs& needs,
                  int64_t tokens);

// Memory that a thread keeps from call to call.
struct Workspace {
    std::vector<Row> rows;
    std::vector<Best> bests;
    std::vector<float> sums, groups, peaks;
    std::vector<int64_t> list;
};
Workspace& workspace();

// Processes rows of logits, and finds the best of each and the distributions of sampled ones.
void scan(std::vector<Row>& rows, int64_t tokens, Workspace& space);

// The largest probability of each scanned row at temperature 1, to out [rows].
void find_confidences(const std::vector<Row>& rows, int64_t tokens, Workspace& space, float* out);

// A token to be sampled from a row's distribution, or from what that has beyond another's.
struct Race {
    const Row* row;
    NoiseKey key;
    float scale = 1.0f;               // of the row's distribution
    const float* draft_probs;         // q, or null
    int64_t draft_width;              // columns of q
    const int64_t* draft_vocabulary;  // the rising tokens of its columns, or null for 0, 1 ...
    int64_t removed;                  // this token is out of the race; -1 for none
    float* probs_out;                 // receives the weights, or null
    const int64_t* noise_tokens;      // the rising tokens whose noise columns get, or null for
                                      // 0, 1 ...; only with probs_out, and without a draft
    Best winner;                      // its score is 0 where no token has a weight
};

void run_races(Race* races, int64_t count, int64_t tokens, Workspace& space);

// The sums of their weights, to out [count].
void sum_weights(const Race* races, int64_t count, int64_t tokens, Workspace& space, float* out);

}  // namespace slipstream
