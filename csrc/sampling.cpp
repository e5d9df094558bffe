// The door of sampling: what Python hands over as addresses.
#include <nanobind/stl/vector.h>

#include "addresses.h"
#include "bindings.h"
#include "sampling_verdict.h"
#include "tensor.h"

namespace slipstream {
namespace {

void make_slots(SlotTensors* made, int64_t num_slots, Address ints, int64_t ints_stride,
                Address floats, int64_t floats_stride, Address stop_ids, int64_t num_stop_ids,
                Address output_counts, Address prompt_mask, Address bias, int64_t vocab_size) {
    new (made) SlotTensors{num_slots,
                           at<int64_t>(ints),
                           ints_stride,
                           at<const float>(floats),
                           floats_stride,
                           at<const int64_t>(stop_ids),
                           num_stop_ids,
                           at<int32_t>(output_counts),
                           at<const uint8_t>(prompt_mask),
                           at<const float>(bias),
                           vocab_size};
}

const int64_t* checked(const int64_t* slots, int64_t requests, const SlotTensors& state) {
    for (int64_t request = 0; request < requests; ++request)
        require(slots[request] >= 0 && slots[request] < state.num_slots, "there is no such slot");
    return slots;
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
                bool bias, bool min_tokens) {
    new (made) Needs{sampling, top_k, top_p, min_p, penalties, bias, min_tokens};
}

void make_rows(DraftedRows* made, int64_t num_rows, int64_t num_requests, int64_t most_drafts,
               Address slots, Address positions, Address draft_tokens, Address num_draft_tokens,
               Address one_hot) {
    new (made) DraftedRows{};
    made->num_rows = num_rows;
    made->num_requests = num_requests;
    made->most_drafts = most_drafts;
    made->slots = at<const int64_t>(slots);
    made->positions = at<const int64_t>(positions);
    made->draft_tokens = at<const int64_t>(draft_tokens);
    made->num_draft_tokens = at<const int64_t>(num_draft_tokens);
    made->one_hot = at<const uint8_t>(one_hot);
}

void set_layout(DraftedRows& rows, Address request, Address offset, Address first_row) {
    rows.row_request = at<const int64_t>(request);
    rows.row_offset = at<const int64_t>(offset);
    rows.first_row = at<const int64_t>(first_row);
}

void set_probs(DraftedRows& rows, Address probs, int64_t stride, int64_t place_stride,
               int64_t width, Address vocabulary, Address certain) {
    rows.draft_probs = at<const float>(probs);
    rows.probs_stride = stride;
    rows.probs_place_stride = place_stride;
    rows.probs_width = width;
    rows.draft_vocabulary = at<const int64_t>(vocabulary);
    rows.certain = at<const uint8_t>(certain);
}

void set_allowed(DraftedRows& rows, Address allowed, int64_t stride) {
    rows.allowed = at<const int32_t>(allowed);
    rows.allowed_stride = stride;
}

void run_verify(Address logits, int64_t stride, int64_t tokens, const DraftedRows& rows,
                const SlotTensors& slots, const Needs& needs, const std::vector<float>& rates,
                Address token_ids, Address num_tokens, Address num_accepted) {
    require(rates.empty() || static_cast<int64_t>(rates.size()) >= rows.most_drafts,
            "a rate for each draft token");
    checked(rows.slots, rows.num_requests, slots);
    check_rows(rows);
    nb::gil_scoped_release released;
    verify({at<const float>(logits), stride, tokens}, rows, slots, needs,
           rates.empty() ? nullptr : rates.data(),
           {at<int64_t>(token_ids), at<int64_t>(num_tokens), at<int64_t>(num_accepted)});
}

void run_best_tokens(Address logits, int64_t stride, int64_t tokens, int64_t count, Address out) {
    nb::gil_scoped_release released;
    find_best_tokens({at<const float>(logits), stride, tokens}, count, at<int64_t>(out));
}

void run_draft(Address logits, int64_t stride, int64_t tokens, int64_t count, Address slots,
               Address positions, const SlotTensors& state, const Needs& needs, Address probs_out,
               int64_t probs_stride, Address out) {
    const int64_t* own = checked(at<const int64_t>(slots), count, state);
    nb::gil_scoped_release released;
    draft({at<const float>(logits), stride, tokens}, count, own, at<const int64_t>(positions), state, needs, at<float>(probs_out), probs_stride,
          at<int64_t>(out));
}

void run_commit(int64_t count, Address slots, Address token_ids, int64_t width, Address num_tokens,
                const SlotTensors& state) {
    commit(count, checked(at<const int64_t>(slots), count, state), at<const int64_t>(token_ids), width,
           at<const int64_t>(num_tokens), state);
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
    nb::class_<SlotTensors>(module, "SlotTensors").def("__init__", make_slots);
    nb::class_<Needs>(module, "Needs").def("__init__", make_needs);
    nb::class_<DraftedRows>(module, "DraftedRows")
        .def("__init__", make_rows)
        .def("set_layout", set_layout)
        .def("set_probs", set_probs)
        .def("set_allowed", set_allowed);
    module.def("verify", run_verify);
    module.def("best_tokens", run_best_tokens);
    module.def("draft", run_draft);
    module.def("commit_sampling", run_commit);
    module.def("fill_noise", fill_noise);
}

}  // namespace slipstream
