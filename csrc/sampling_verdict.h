// The three ops of sampling. Shapes and meaning: slipstream/kernels/sampling.py.
#pragma once

#include "sampling_rows.h"

namespace slipstream {

// Rows of logits and the drafts that they judge; null where there is none.
struct DraftedRows {
    const int64_t* row_request;  // [N], with row_offset [N] and first_row [R] of ragged rows
    const int64_t* row_offset;
    const int64_t* first_row;
    const int64_t* slots;             // [R]
    const int64_t* positions;         // [R]
    const int64_t* draft_tokens;      // [R, K], dense
    const int64_t* num_draft_tokens;  // [R]
    const uint8_t* one_hot;           // [R]
    const float* draft_probs;         // [R, K, Vq]
    int64_t probs_stride, probs_place_stride, probs_width;
    const int64_t* draft_vocabulary;  // [Vq]
    const int32_t* allowed;           // [N, V / 32]
    int64_t allowed_stride;
    const uint8_t* certain;  // [R, K], dense
    int64_t num_rows, num_requests, most_drafts;

    int64_t first(int64_t request) const {
        return first_row ? first_row[request] : request * (most_drafts + 1);
    }
    int64_t num_drafts(int64_t request) const {
        return num_draft_tokens[request] < most_drafts ? num_draft_tokens[request] : most_drafts;
    }
    bool is_certain(int64_t request, int64_t place) const {
        return one_hot[request] || (certain && certain[request * most_drafts + place]);
    }
};

struct LogitRows {
    const float* data;
    int64_t stride, tokens;
};

struct VerdictOut {
    int64_t* token_ids;     // [R, K + 1]
    int64_t* num_tokens;    // [R]
    int64_t* num_accepted;  // [R]
    float* largest;         // [R, K + 1], of the row of each token
};

// `rates`: [R, K] or null.
void verify(const LogitRows& logits, const DraftedRows& rows, const SlotTensors& slots,
            const Needs& needs, const float* rates, const VerdictOut& out);

// The first of the largest of each row, to out [count]. confidence_out: [count] or null.
void find_best_tokens(const LogitRows& logits, int64_t count, float* confidence_out, int64_t* out);

// probs_out: [R, tokens]; confidence_out: [R] or null; vocabulary: [tokens], rising, the token of
// each column, or null.
void draft(const LogitRows& logits, int64_t count, const int64_t* request_slots,
           const int64_t* positions, const SlotTensors& slots, const Needs& needs,
           float* probs_out, int64_t probs_stride, float* confidence_out,
           const int64_t* vocabulary, int64_t* out);

void commit(int64_t count, const int64_t* request_slots, const int64_t* token_ids, int64_t width,
            const int64_t* num_tokens, const SlotTensors& slots);

}  // namespace slipstream
