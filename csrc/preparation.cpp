// Batch preparation: a few integers for each request, between the passes of the models. Meaning and
// shapes: slipstream/kernels/preparation.py. Python has checked dtypes and shapes; here is checked
// what serves as a place.
#include <algorithm>
#include <cstring>
#include <new>

#include "addresses.h"
#include "bindings.h"
#include "suffix_lookup.h"
#include "tensor.h"

namespace slipstream {
namespace {

// What the device keeps of every slot.
struct Tables {
    int64_t num_slots;
    int32_t* token_ids;  // [S, columns], of which the last takes what has no place
    int64_t columns;
    int64_t* num_tokens;    // [S]
    int64_t* num_computed;  // [S]
    const int32_t* block_tables;  // [S, num_blocks]
    int64_t num_blocks, block_size;

    const int64_t* checked(const int64_t* slots, int64_t requests) const {
        for (int64_t request = 0; request < requests; ++request)
            require(slots[request] >= 0 && slots[request] < num_slots, "there is no such slot");
        return slots;
    }
    // Where a token of the request in a slot stands in the cache.
    int64_t place(int64_t slot, int64_t token) const {
        require(token >= 0 && token < num_blocks * block_size, "a token is in no block");
        const int64_t block = block_tables[slot * num_blocks + token / block_size];
        return block * block_size + token % block_size;
    }
    // Tokens behind the last column are lost in it.
    void write(int64_t slot, int64_t position, int64_t token) const {
        require(position >= 0, "a position is negative");
        token_ids[slot * columns + std::min(position, columns - 1)] = static_cast<int32_t>(token);
    }
};

void make_tables(Tables* made, int64_t num_slots, Address token_ids, int64_t columns,
                 Address num_tokens, Address num_computed, Address block_tables,
                 int64_t num_blocks, int64_t block_size) {
    new (made) Tables{num_slots,
                      at<int32_t>(token_ids),
                      columns,
                      at<int64_t>(num_tokens),
                      at<int64_t>(num_computed),
                      at<const int32_t>(block_tables),
                      num_blocks,
                      block_size};
}

// `numbers`: 2 T + 3 R + 1 int64: positions [T], slots [T], query_start [R + 1], context_lens [R],
// last_row [R]; `blocks` [R, num_blocks]; `token_ids` [T]. A mask token of -1 is none.
void expand_rows(const Tables& tables, int64_t requests, Address slots_at, Address starts_at,
                 Address lengths_at, int64_t most, int64_t mask_token, Address numbers,
                 Address blocks, Address token_ids) {
    const auto *slots = tables.checked(at<const int64_t>(slots_at), requests),
               *starts = at<const int64_t>(starts_at),
               *lengths = at<const int64_t>(lengths_at);
    const int64_t rows = requests * most, last_position = tables.columns - 2;
    auto* positions = at<int64_t>(numbers);
    int64_t *places = positions + rows, *query_start = places + rows,
            *contexts = query_start + requests + 1, *last_rows = contexts + requests;
    auto *tokens = at<int32_t>(token_ids), *own_blocks = at<int32_t>(blocks);
    for (int64_t request = 0; request < requests; ++request) {
        const int64_t slot = slots[request], start = starts[request], length = lengths[request];
        const int64_t first = request * most;
        query_start[request] = first;
        contexts[request] = length > 0 ? start + length : 0;
        last_rows[request] = first + std::max<int64_t>(length - 1, 0);
        std::memcpy(own_blocks + request * tables.num_blocks,
                    tables.block_tables + slot * tables.num_blocks, tables.num_blocks * 4);
        const int64_t known = mask_token < 0 ? tables.columns : tables.num_tokens[slot];
        for (int64_t offset = 0; offset < most; ++offset) {
            const int64_t row = first + offset;
            const int64_t position = std::min(start + offset, last_position);
            require(position >= 0, "a position is negative");
            positions[row] = position;
            places[row] = offset < length ? tables.place(slot, position) : -1;
            tokens[row] = position >= known ? static_cast<int32_t>(mask_token)
                                            : tables.token_ids[slot * tables.columns + position];
        }
    }
    query_start[requests] = rows;
}

// `numbers`: 4 T + 3 R + 1 int64: positions [T], slots [T], request [T], offset [T], query_start
// [R + 1], context_lens [R], last_row [R]; `blocks` [R, num_blocks]; `token_ids` [T]. `rereads` of 0
// and a mask token of -1 are none.
void place_rows(const Tables& tables, int64_t requests, Address slots_at, Address starts_at,
                Address lengths_at, int64_t rows, Address rereads_at, int64_t mask_token,
                Address numbers, Address blocks, Address token_ids) {
    const auto *slots = tables.checked(at<const int64_t>(slots_at), requests),
               *starts = at<const int64_t>(starts_at), *lengths = at<const int64_t>(lengths_at),
               *rereads = at<const int64_t>(rereads_at);
    auto* positions = at<int64_t>(numbers);
    int64_t *places = positions + rows, *owners = places + rows, *offsets = owners + rows,
            *query_start = offsets + rows, *contexts = query_start + requests + 1,
            *last_rows = contexts + requests;
    auto *tokens = at<int32_t>(token_ids), *own_blocks = at<int32_t>(blocks);
    int64_t row = 0;
    for (int64_t request = 0; request < requests; ++request) {
        const int64_t slot = slots[request], start = starts[request], length = lengths[request];
        const int64_t reread = rereads ? rereads[request] : 0;
        const int64_t known = mask_token < 0 ? tables.columns : tables.num_tokens[slot];
        require(length >= 0 && row + length <= rows, "there are not so many rows");
        query_start[request] = row;
        contexts[request] = start + length;
        std::memcpy(own_blocks + request * tables.num_blocks,
                    tables.block_tables + slot * tables.num_blocks, tables.num_blocks * 4);
        for (int64_t offset = 0; offset < length; ++offset, ++row) {
            const int64_t position = start + offset, place = tables.place(slot, position);
            require(position < tables.columns, "a position is behind the last one");
            positions[row] = position;
            places[row] = offset < reread ? -1 : place;
            owners[row] = request;
            offsets[row] = offset;
            tokens[row] = position >= known ? static_cast<int32_t>(mask_token)
                                            : tables.token_ids[slot * tables.columns + position];
        }
        last_rows[request] = std::max<int64_t>(row - 1, 0);
    }
    require(row == rows, "there are more rows");
    query_start[requests] = rows;
}

// `numbers`: starts [R], lengths [R]; `tokens` [R, width]; a vocabulary of 0 is none.
void advance_drafts(const Tables& tables, int64_t requests, Address slots_at, Address known_at,
                    Address wanted_at, Address picked_at, Address vocabulary_at,
                    int64_t vocabulary_size, Address tokens_at, int64_t width, int64_t index,
                    Address numbers) {
    const auto *slots = tables.checked(at<const int64_t>(slots_at), requests),
               *known = at<const int64_t>(known_at),
               *wanted = at<const int64_t>(wanted_at), *picked = at<const int64_t>(picked_at),
               *vocabulary = at<const int64_t>(vocabulary_at);
    int64_t *tokens = at<int64_t>(tokens_at), *starts = at<int64_t>(numbers);
    for (int64_t request = 0; vocabulary && request < requests; ++request)
        require(picked[request] >= 0 && picked[request] < vocabulary_size,
                "a picked token is none of the vocabulary's");
    for (int64_t request = 0; request < requests; ++request) {
        const int64_t token = vocabulary ? vocabulary[picked[request]] : picked[request];
        tokens[request * width + index] = token;
        starts[request] = known[request] + index;
        starts[requests + request] = wanted[request] > index + 1;
        tables.write(slots[request], starts[request], token);
    }
}

void write_tokens(const Tables& tables, int64_t requests, Address slots_at, Address tokens_at,
                  int64_t width, Address counts_at) {
    const auto *slots = tables.checked(at<const int64_t>(slots_at), requests),
               *tokens = at<const int64_t>(tokens_at),
               *counts = at<const int64_t>(counts_at);
    for (int64_t request = 0; request < requests; ++request) {
        const int64_t known = tables.num_tokens[slots[request]];
        for (int64_t i = 0; i < std::min(counts[request], width); ++i)
            tables.write(slots[request], known + i, tokens[request * width + i]);
    }
}

// `gains`: tokens [R], accepted [R].
void commit(const Tables& tables, int64_t requests, Address slots_at, Address new_at,
            Address at_end_at, Address tokens_at, int64_t width, Address num_tokens_at,
            Address num_accepted_at, Address gains_at) {
    const auto *slots = tables.checked(at<const int64_t>(slots_at), requests),
               *num_new = at<const int64_t>(new_at),
               *tokens = at<const int64_t>(tokens_at), *num_tokens = at<const int64_t>(num_tokens_at),
               *num_accepted = at<const int64_t>(num_accepted_at);
    const auto* at_end = at<const uint8_t>(at_end_at);
    auto *gained = at<int64_t>(gains_at), *accepted = gained + requests;
    // All are written before any slot's counter moves: padding may have one slot twice.
    for (int64_t request = 0; request < requests; ++request) {
        gained[request] = at_end[request] ? num_tokens[request] : 0;
        accepted[request] = at_end[request] ? num_accepted[request] : 0;
        const int64_t slot = slots[request], known = tables.num_tokens[slot];
        for (int64_t i = 0; i < std::min(gained[request], width); ++i)
            tables.write(slot, known + i, tokens[request * width + i]);
    }
    for (int64_t request = 0; request < requests; ++request) {
        tables.num_tokens[slots[request]] += gained[request];
        tables.num_computed[slots[request]] += num_new[request] + accepted[request];
    }
}

// `pages` [num_pages, tokens, token_bytes]. A node never stands before its new place, and its old
// one is read before anything is written there, as the ways rise.
void keep_path(const Tables& tables, int64_t requests, Address slots_at, Address roots_at,
               Address path_at, int64_t width, Address counts_at, Address pages_at,
               int64_t num_pages, int64_t page_bytes, int64_t token_bytes) {
    const auto *slots = tables.checked(at<const int64_t>(slots_at), requests),
               *roots = at<const int64_t>(roots_at),
               *path = at<const int64_t>(path_at), *counts = at<const int64_t>(counts_at);
    char* pages = at<char>(pages_at);
    for (int64_t request = 0; request < requests; ++request) {
        const int64_t slot = slots[request], root = roots[request], count = counts[request];
        for (int64_t i = 0; i <= count && i < width; ++i) {
            const int64_t node = path[request * width + i];
            if (node == i) continue;
            const int64_t from = tables.place(slot, root + node) * token_bytes;
            const int64_t to = tables.place(slot, root + i) * token_bytes;
            require(std::max(from, to) < page_bytes, "a block is not in the cache");
            for (int64_t page = 0; page < num_pages; ++page)
                std::memcpy(pages + page * page_bytes + to, pages + page * page_bytes + from,
                            token_bytes);
        }
    }
}

void run_suffix_lookup(Address token_ids, int64_t num_slots, int64_t columns, int64_t requests,
                       Address slots, Address known, int64_t width, int64_t shortest,
                       int64_t longest, Address tokens, Address found) {
    for (int64_t request = 0; request < requests; ++request) {
        const int64_t slot = at<const int64_t>(slots)[request];
        const int64_t length = at<const int64_t>(known)[request];
        require(slot >= 0 && slot < num_slots, "there is no such slot");
        require(length >= 0 && length <= columns, "a text is longer than its row");
    }
    nb::gil_scoped_release released;
    look_up_suffixes({at<const int32_t>(token_ids), columns, requests, at<const int64_t>(slots),
                      at<const int64_t>(known), width, shortest, longest},
                     at<int64_t>(tokens), at<uint8_t>(found));
}

}  // namespace

void bind_preparation(nb::module_& module) {
    nb::class_<Tables>(module, "Tables").def("__init__", make_tables);
    module.def("expand_rows", expand_rows);
    module.def("place_rows", place_rows);
    module.def("advance_drafts", advance_drafts);
    module.def("write_tokens", write_tokens);
    module.def("commit", commit);
    module.def("keep_path", keep_path);
    module.def("suffix_lookup", run_suffix_lookup);
}

}  // namespace slipstream
