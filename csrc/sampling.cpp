// The door of sampling: what Python hands over.
#include "bindings.h"
#include "sampling_verdict.h"
#include "tensor.h"

namespace slipstream {
namespace {

using Optional = std::optional<Array>;

constexpr int64_t num_ints = 7, num_floats = 6;  // INTS and FLOATS of kernels/sampling.py

// Python keeps the tensors alive as long as the result.
void make_slots(SlotTensors* made, const Array& ints, const Array& floats, const Array& stop_ids,
                const Optional& output_counts, const Optional& prompt_mask, const Optional& bias) {
    const int64_t slots = length(ints, 2, 0, "ints"),
                  num_stop_ids = length(stop_ids, 2, 1, "stop_ids");
    int64_t vocab_size = 0;
    for (const Optional& table : {output_counts, prompt_mask, bias})
        if (table) vocab_size = length(*table, 2, 1, "a table over the vocabulary");
    new (made) SlotTensors{
        slots,
        shaped<int64_t>(ints, {slots, num_ints}, 1, "ints"),
        ints.stride(0),
        shaped<float>(floats, {slots, num_floats}, 1, "floats"),
        floats.stride(0),
        dense<int64_t>(stop_ids, {slots, num_stop_ids}, "stop_ids"),
        num_stop_ids,
        dense<int32_t>(output_counts, {slots, vocab_size}, "output_counts"),
        dense<uint8_t>(prompt_mask, {slots, vocab_size}, "prompt_mask"),
        dense<float>(bias, {slots, vocab_size}, "bias"),
        vocab_size};
}

const int64_t* checked(const Array& given, int64_t requests, const SlotTensors& state) {
    const int64_t* slots = dense<int64_t>(given, {requests}, "slots");
    for (int64_t request = 0; request < requests; ++request)
        require(slots[request] >= 0 && slots[request] < state.num_slots, "there is no such slot");
    return slots;
}

// [count, tokens or more]: the first `tokens` columns.
LogitRows logits_of(const Array& logits, int64_t count, int64_t tokens) {
    const int64_t width = length(logits, 2, 1, "logits");
    require(tokens >= 0 && tokens <= width, "logits: too few columns");
    return {shaped<float>(logits, {count, width}, 1, "logits"), logits.stride(0), tokens};
}

// Layouts come from draft lengths: they must agree. Offsets of a tree's nodes may lie beyond the
// drafts that are judged, as none is.
void check_rows(const DraftedRows& rows) {
    for (int64_t row = 0; rows.row_request && row < rows.num_rows; ++row)
        require(rows.row_request[row] >= 0 && rows.row_request[row] < rows.num_requests &&
                    rows.row_offset[row] >= 0,
                "a row is of no request");
    for (int64_t request = 0; request < rows.num_requests; ++request) {
        const int64_t drafts = rows.num_draft_tokens[request];
        require(drafts >= 0 && drafts <= rows.most_drafts, "a draft is too long");
        if (!rows.first_row) continue;
        const int64_t first = rows.first_row[request];
        require(first >= 0 && first + drafts < rows.num_rows, "a draft has no rows");
    }
}

void make_needs(Needs* made, bool sampling, bool top_k, bool top_p, bool min_p, bool penalties,
                bool bias, bool min_tokens, bool block, bool coupled) {
    new (made) Needs{sampling, top_k, top_p, min_p, penalties, bias, min_tokens, block, coupled};
}

// Rows of a step; `layout`: request [N], offset [N] and first_row [R] of rows that are not uniform.
struct RowTensors {
    Array slots, positions, draft_tokens, num_draft_tokens, one_hot;
    Optional request, offset, first_row, draft_probs, draft_vocabulary, allowed, certain;
};

void make_rows(RowTensors* made, Array slots, Array positions, Array draft_tokens,
               Array num_draft_tokens, Array one_hot, Optional request, Optional offset,
               Optional first_row, Optional draft_probs, Optional draft_vocabulary,
               Optional allowed, Optional certain) {
    new (made) RowTensors{slots,     positions,   draft_tokens,     num_draft_tokens,
                          one_hot,   request,     offset,           first_row,
                          draft_probs, draft_vocabulary, allowed,   certain};
}

DraftedRows rows_of(const RowTensors& given, int64_t num_rows, int64_t tokens,
                    const SlotTensors& state) {
    const int64_t requests = length(given.draft_tokens, 2, 0, "draft_tokens"),
                  most = length(given.draft_tokens, 2, 1, "draft_tokens");
    DraftedRows rows{};
    rows.num_rows = num_rows, rows.num_requests = requests, rows.most_drafts = most;
    rows.slots = checked(given.slots, requests, state);
    rows.positions = dense<int64_t>(given.positions, {requests}, "positions");
    rows.draft_tokens = dense<int64_t>(given.draft_tokens, {requests, most}, "draft_tokens");
    rows.num_draft_tokens = dense<int64_t>(given.num_draft_tokens, {requests}, "num_draft_tokens");
    rows.one_hot = dense<uint8_t>(given.one_hot, {requests}, "one_hot");
    rows.row_request = dense<int64_t>(given.request, {num_rows}, "request");
    rows.row_offset = dense<int64_t>(given.offset, {num_rows}, "offset");
    rows.first_row = dense<int64_t>(given.first_row, {requests}, "first_row");
    require(!rows.row_request == !rows.row_offset && !rows.row_request == !rows.first_row,
            "a part of a layout");
    require(rows.row_request || num_rows == requests * (most + 1),
            "logits: not as many rows as the drafts have");
    if (given.draft_probs && most) {
        const Array& probs = *given.draft_probs;
        rows.probs_width = length(probs, 3, 2, "draft_probs");
        rows.draft_probs =
            shaped<float>(probs, {requests, most, rows.probs_width}, 1, "draft_probs");
        rows.probs_stride = probs.stride(0), rows.probs_place_stride = probs.stride(1);
        rows.draft_vocabulary =
            dense<int64_t>(given.draft_vocabulary, {rows.probs_width}, "draft_vocabulary");
        rows.certain = dense<uint8_t>(given.certain, {requests, most}, "certain");
    }
    if (given.allowed) {
        rows.allowed =
            shaped<int32_t>(*given.allowed, {num_rows, (tokens + 31) / 32}, 1, "allowed");
        rows.allowed_stride = given.allowed->stride(0);
    }
    check_rows(rows);
    return rows;
}

void run_verify(const Array& logits_in, const RowTensors& given, const SlotTensors& slots,
                const Needs& needs, const Optional& rates, const Array& token_ids,
                const Array& numbers, const Array& largest) {
    const int64_t num_rows = length(logits_in, 2, 0, "logits"),
                  tokens = length(logits_in, 2, 1, "logits");
    const LogitRows logits = logits_of(logits_in, num_rows, tokens);
    const DraftedRows rows = rows_of(given, num_rows, tokens, slots);
    const int64_t requests = rows.num_requests;
    const auto* chances = dense<float>(rates, {requests, rows.most_drafts}, "rates");
    if (needs.penalties)
        require(slots.output_counts && slots.prompt_mask && slots.vocab_size == tokens,
                "penalties need counts of all tokens");
    if (needs.bias)
        require(slots.bias && slots.vocab_size == tokens, "a bias needs a number for all tokens");
    auto* chosen = dense<int64_t>(token_ids, {requests, rows.most_drafts + 1}, "token_ids");
    auto* counts = dense<int64_t>(numbers, {2, requests}, "numbers");
    auto* peaks = dense<float>(largest, {requests, rows.most_drafts + 1}, "largest");
    nb::gil_scoped_release released;
    verify(logits, rows, slots, needs, chances, {chosen, counts, counts + requests, peaks});
}

void run_best_tokens(const Array& logits_in, int64_t tokens, const Optional& confidence_out,
                     const Array& out) {
    const int64_t count = length(out, 1, 0, "out");
    const LogitRows logits = logits_of(logits_in, count, tokens);
    auto* confidences = dense<float>(confidence_out, {count}, "confidence_out");
    auto* chosen = dense<int64_t>(out, {count}, "out");
    nb::gil_scoped_release released;
    find_best_tokens(logits, count, confidences, chosen);
}

void run_draft(const Array& logits_in, int64_t tokens, const Array& slots, const Array& positions,
               const SlotTensors& state, const Needs& needs, const Array& probs_out,
               const Optional& confidence_out, const Optional& vocabulary, const Array& out) {
    const int64_t count = length(out, 1, 0, "out");
    const LogitRows logits = logits_of(logits_in, count, tokens);
    const int64_t *own = checked(slots, count, state),
                  *places = dense<int64_t>(positions, {count}, "positions");
    auto* probs = shaped<float>(probs_out, {count, tokens}, 1, "probs_out");
    auto* confidences = dense<float>(confidence_out, {count}, "confidence_out");
    const int64_t* ids = dense<int64_t>(vocabulary, {tokens}, "vocabulary");
    auto* chosen = dense<int64_t>(out, {count}, "out");
    nb::gil_scoped_release released;
    draft(logits, count, own, places, state, needs, probs, probs_out.stride(0), confidences, ids,
          chosen);
}

void run_commit(const Array& slots, const Array& token_ids, const Array& num_tokens,
                const SlotTensors& state) {
    const int64_t count = length(slots, 1, 0, "slots"),
                  width = length(token_ids, 2, 1, "token_ids");
    commit(count, checked(slots, count, state),
           dense<int64_t>(token_ids, {count, width}, "token_ids"), width,
           dense<int64_t>(num_tokens, {count}, "num_tokens"), state);
}

// For tests.
void fill_noise(int64_t seed, int64_t position, int64_t step, uint32_t purpose, const Array& words,
                const Array& numbers) {
    require(words.size() == numbers.size() && words.size() % group_tokens == 0, "whole groups");
    auto* to = contiguous<uint32_t>(words, Number::i32, "words");
    auto* also_to = contiguous<float>(numbers, Number::f32, "numbers");
    sampling_kernels.active().noise(
        noise_key(seed, position, step, static_cast<Purpose>(purpose)),
        static_cast<int64_t>(words.size()), to, also_to);
}

}  // namespace

void bind_sampling(nb::module_& module) {
    nb::class_<SlotTensors>(module, "SlotTensors")
        .def("__init__", make_slots, nb::arg("ints"), nb::arg("floats"), nb::arg("stop_ids"),
             nb::arg("output_counts").none(), nb::arg("prompt_mask").none(),
             nb::arg("bias").none());
    nb::class_<Needs>(module, "Needs").def("__init__", make_needs);
    nb::class_<RowTensors>(module, "RowTensors")
        .def("__init__", make_rows, nb::arg("slots"), nb::arg("positions"),
             nb::arg("draft_tokens"), nb::arg("num_draft_tokens"), nb::arg("one_hot"),
             nb::arg("request").none(), nb::arg("offset").none(), nb::arg("first_row").none(),
             nb::arg("draft_probs").none(), nb::arg("draft_vocabulary").none(),
             nb::arg("allowed").none(), nb::arg("certain").none());
    module.def("verify", run_verify, nb::arg("logits"), nb::arg("rows"), nb::arg("slots"),
               nb::arg("needs"), nb::arg("rates").none(), nb::arg("token_ids"),
               nb::arg("numbers"), nb::arg("largest"));
    module.def("best_tokens", run_best_tokens, nb::arg("logits"), nb::arg("tokens"),
               nb::arg("confidence_out").none(), nb::arg("out"));
    module.def("draft", run_draft, nb::arg("logits"), nb::arg("tokens"), nb::arg("slots"),
               nb::arg("positions"), nb::arg("state"), nb::arg("needs"), nb::arg("probs_out"),
               nb::arg("confidence_out").none(), nb::arg("vocabulary").none(), nb::arg("out"));
    module.def("commit_sampling", run_commit);
    module.def("fill_noise", fill_noise);
}

}  // namespace slipstream
