// Batch preparation: a few integers for each request, between the passes of the models. Meaning and
// shapes: slipstream/kernels/preparation.py.
#include <algorithm>
#include <cstring>
#include <new>

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
    int64_t window_column;  // where a second table of each slot begins; 0: there is none

    int64_t num_tables() const { return window_column ? 2 : 1; }

    const int64_t* checked(const Array& given, int64_t requests) const {
        const int64_t* slots = dense<int64_t>(given, {requests}, "slots");
        for (int64_t request = 0; request < requests; ++request)
            require(slots[request] >= 0 && slots[request] < num_slots, "there is no such slot");
        return slots;
    }
    // Where a token of the request in a slot stands in the cache, by its first table or the second.
    int64_t place(int64_t slot, int64_t token, int64_t table) const {
        const int64_t width = window_column ? window_column : num_blocks;
        require(token >= 0 && token < width * block_size, "a token is in no block");
        const int64_t block =
            block_tables[slot * num_blocks + table * window_column + token / block_size];
        return block * block_size + token % block_size;
    }
    // Tokens past the last column are dropped.
    void write(int64_t slot, int64_t position, int64_t token) const {
        require(position >= 0, "a position is negative");
        token_ids[slot * columns + std::min(position, columns - 1)] = static_cast<int32_t>(token);
    }
};

using Optional = std::optional<Array>;

// Python keeps the tables alive as long as the result.
void make_tables(Tables* made, const Array& token_ids, const Array& num_tokens,
                 const Array& num_computed, const Array& block_tables, int64_t block_size,
                 int64_t window_column) {
    const int64_t num_slots = length(token_ids, 2, 0, "token_ids"),
                  columns = length(token_ids, 2, 1, "token_ids"),
                  num_blocks = length(block_tables, 2, 1, "block_tables");
    require(columns > 0 && block_size > 0, "token_ids, block_size: too small");
    require(window_column == 0 || 2 * window_column == num_blocks,
            "window_column: the second table is as wide as the first");
    new (made) Tables{num_slots,
                      dense<int32_t>(token_ids, {num_slots, columns}, "token_ids"),
                      columns,
                      dense<int64_t>(num_tokens, {num_slots}, "num_tokens"),
                      dense<int64_t>(num_computed, {num_slots}, "num_computed"),
                      dense<const int32_t>(block_tables, {num_slots, num_blocks}, "block_tables"),
                      num_blocks,
                      block_size,
                      window_column};
}

// `numbers`: (1 + tables) T + 3 R + 1 int64: positions [T], slots [tables, T], query_start [R + 1], context_lens [R],
// last_row [R]; `blocks` [R, num_blocks]; `token_ids` [T]. A mask token of -1 is none.
void expand_rows(const Tables& tables, const Array& slots_in, const Array& starts_in,
                 const Array& lengths_in, int64_t most, int64_t mask_token, const Array& numbers_out,
                 const Array& blocks_out, const Array& tokens_out) {
    const int64_t requests = length(slots_in, 1, 0, "slots");
    require(most >= 0, "most: negative");
    const int64_t rows = requests * most, last_position = tables.columns - 2;
    const int64_t *slots = tables.checked(slots_in, requests),
                  *starts = dense<int64_t>(starts_in, {requests}, "starts"),
                  *lengths = dense<int64_t>(lengths_in, {requests}, "lengths");
    const int64_t num_places = tables.num_tables() * rows;
    auto* positions =
        dense<int64_t>(numbers_out, {rows + num_places + 3 * requests + 1}, "numbers");
    int64_t *places = positions + rows, *query_start = places + num_places,
            *contexts = query_start + requests + 1, *last_rows = contexts + requests;
    auto *tokens = dense<int32_t>(tokens_out, {rows}, "token_ids"),
         *own_blocks = dense<int32_t>(blocks_out, {requests, tables.num_blocks}, "blocks");
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
            for (int64_t table = 0; table < tables.num_tables(); ++table)
                places[table * rows + row] =
                    offset < length ? tables.place(slot, position, table) : -1;
            tokens[row] = position >= known ? static_cast<int32_t>(mask_token)
                                            : tables.token_ids[slot * tables.columns + position];
        }
    }
    query_start[requests] = rows;
}

// `numbers`: (3 + tables) T + 3 R + 1 int64: positions [T], slots [tables, T], request [T], offset [T], query_start
// [R + 1], context_lens [R], last_row [R]; `blocks` [R, num_blocks]; `token_ids` [T]. `rereads` of 0
// and a mask token of -1 are none.
void place_rows(const Tables& tables, const Array& slots_in, const Array& starts_in,
                const Array& lengths_in, const Optional& rereads_in, int64_t mask_token,
                const Array& numbers_out, const Array& blocks_out, const Array& tokens_out) {
    const int64_t requests = length(slots_in, 1, 0, "slots"),
                  rows = length(tokens_out, 1, 0, "token_ids");
    const int64_t *slots = tables.checked(slots_in, requests),
                  *starts = dense<int64_t>(starts_in, {requests}, "starts"),
                  *lengths = dense<int64_t>(lengths_in, {requests}, "lengths"),
                  *rereads = dense<int64_t>(rereads_in, {requests}, "rereads");
    const int64_t num_places = tables.num_tables() * rows;
    auto* positions =
        dense<int64_t>(numbers_out, {3 * rows + num_places + 3 * requests + 1}, "numbers");
    int64_t *places = positions + rows, *owners = places + num_places, *offsets = owners + rows,
            *query_start = offsets + rows, *contexts = query_start + requests + 1,
            *last_rows = contexts + requests;
    auto *tokens = dense<int32_t>(tokens_out, {rows}, "token_ids"),
         *own_blocks = dense<int32_t>(blocks_out, {requests, tables.num_blocks}, "blocks");
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
            const int64_t position = start + offset;
            require(position < tables.columns, "a position is after the last one");
            positions[row] = position;
            for (int64_t table = 0; table < tables.num_tables(); ++table) {
                const int64_t place = tables.place(slot, position, table);
                places[table * rows + row] = offset < reread ? -1 : place;
            }
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

// `numbers`: starts [R], lengths [R]; `tokens` [R, width].
void advance_drafts(const Tables& tables, const Array& slots_in, const Array& known_in,
                    const Array& wanted_in, const Array& picked_in, const Optional& vocabulary_in,
                    const Array& tokens_out, int64_t index, const Array& numbers_out) {
    const int64_t requests = length(slots_in, 1, 0, "slots"),
                  width = length(tokens_out, 2, 1, "tokens"),
                  vocabulary_size = vocabulary_in ? length(*vocabulary_in, 1, 0, "vocabulary") : 0;
    require(index >= 0 && index < width, "index: not a column of tokens");
    const int64_t *slots = tables.checked(slots_in, requests),
                  *known = dense<int64_t>(known_in, {requests}, "known"),
                  *wanted = dense<int64_t>(wanted_in, {requests}, "wanted"),
                  *picked = dense<int64_t>(picked_in, {requests}, "picked"),
                  *vocabulary = dense<int64_t>(vocabulary_in, {vocabulary_size}, "vocabulary");
    int64_t *tokens = dense<int64_t>(tokens_out, {requests, width}, "tokens"),
            *starts = dense<int64_t>(numbers_out, {2 * requests}, "numbers");
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

void write_tokens(const Tables& tables, const Array& slots_in, const Array& tokens_in,
                  const Array& counts_in) {
    const int64_t requests = length(slots_in, 1, 0, "slots"),
                  width = length(tokens_in, 2, 1, "tokens");
    const int64_t *slots = tables.checked(slots_in, requests),
                  *tokens = dense<int64_t>(tokens_in, {requests, width}, "tokens"),
                  *counts = dense<int64_t>(counts_in, {requests}, "counts");
    for (int64_t request = 0; request < requests; ++request) {
        const int64_t known = tables.num_tokens[slots[request]];
        for (int64_t i = 0; i < std::min(counts[request], width); ++i)
            tables.write(slots[request], known + i, tokens[request * width + i]);
    }
}

// `gains`: tokens [R], accepted [R].
void commit(const Tables& tables, const Array& slots_in, const Array& new_in,
            const Array& at_end_in, const Array& tokens_in, const Array& num_tokens_in,
            const Array& num_accepted_in, const Array& gains_out) {
    const int64_t requests = length(slots_in, 1, 0, "slots"),
                  width = length(tokens_in, 2, 1, "tokens");
    const int64_t *slots = tables.checked(slots_in, requests),
                  *num_new = dense<int64_t>(new_in, {requests}, "num_new"),
                  *tokens = dense<int64_t>(tokens_in, {requests, width}, "tokens"),
                  *num_tokens = dense<int64_t>(num_tokens_in, {requests}, "num_tokens"),
                  *num_accepted = dense<int64_t>(num_accepted_in, {requests}, "num_accepted");
    const auto* at_end = dense<uint8_t>(at_end_in, {requests}, "at_end");
    auto *gained = dense<int64_t>(gains_out, {2 * requests}, "gains"), *accepted = gained + requests;
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

// `more` [R, n]: float32, of which the bits are taken, or int64; `out` [R, 2 W + n + 9].
void pack_results(const Array& tokens_in, const Array& largest_in, const Optional& more_in,
                  const Array& num_tokens, const Array& num_accepted, const Array& num_drafted,
                  const Array& first_rows, const Array& cached, int64_t began, int64_t drafted,
                  int64_t computed, int64_t ended, const Array& out) {
    const int64_t requests = length(tokens_in, 2, 0, "tokens"),
                  width = length(tokens_in, 2, 1, "tokens"),
                  extra = more_in ? length(*more_in, 2, 1, "more") : 0;
    const int64_t* tokens = dense<int64_t>(tokens_in, {requests, width}, "tokens");
    const auto* largest = reinterpret_cast<const int32_t*>(
        dense<float>(largest_in, {requests, width}, "largest"));
    const bool has_bits = more_in && number_of(*more_in) == Number::f32;
    const auto* bits = has_bits ? reinterpret_cast<const int32_t*>(
                                      dense<float>(more_in, {requests, extra}, "more"))
                                : nullptr;
    const auto* more = has_bits ? nullptr : dense<int64_t>(more_in, {requests, extra}, "more");
    const int64_t* counts[] = {dense<int64_t>(num_tokens, {requests}, "num_tokens"),
                               dense<int64_t>(num_accepted, {requests}, "num_accepted"),
                               dense<int64_t>(num_drafted, {requests}, "num_drafted"),
                               dense<int64_t>(first_rows, {requests}, "first_rows"),
                               dense<int64_t>(cached, {requests}, "cached")};
    auto* to = dense<int64_t>(out, {requests, 2 * width + extra + 9}, "out");
    for (int64_t request = 0; request < requests; ++request) {
        to = std::copy_n(tokens + request * width, width, to);
        to = std::copy_n(largest + request * width, width, to);
        if (bits) to = std::copy_n(bits + request * extra, extra, to);
        if (more) to = std::copy_n(more + request * extra, extra, to);
        for (const int64_t* count : counts) *to++ = count[request];
        for (int64_t time : {began, drafted, computed, ended}) *to++ = time;
    }
}

// `pages` [num_pages, blocks, block_size, heads, numbers], of any type and strides. A node never
// stands before its new place, and its old one is read before anything is written there, as the
// ways rise.
void keep_path(const Tables& tables, const Array& slots_in, const Array& roots_in,
               const Array& path_in, const Array& counts_in, const Array& pages_in,
               bool windowed) {
    const int64_t requests = length(slots_in, 1, 0, "slots"), width = length(path_in, 2, 1, "path"),
                  num_pages = length(pages_in, 5, 0, "pages");
    const int64_t *slots = tables.checked(slots_in, requests),
                  *roots = dense<int64_t>(roots_in, {requests}, "roots"),
                  *path = dense<int64_t>(path_in, {requests, width}, "path"),
                  *counts = dense<int64_t>(counts_in, {requests}, "counts");
    require(!windowed || tables.window_column, "windowed: there is no second table");
    const int64_t table = windowed ? 1 : 0;
    const Number type = number_of(pages_in);
    char* pages = numbers<char>(pages_in, type, 1, "pages");
    const int64_t size = pages_in.dtype().bits / 8, block_size = tables.block_size;
    require(static_cast<int64_t>(pages_in.shape(2)) == block_size, "pages: blocks of another size");
    const int64_t num_blocks = pages_in.shape(1), num_heads = pages_in.shape(3);
    const auto offset = [&](int64_t place) {
        require(place / block_size < num_blocks, "a block is not in the cache");
        return place / block_size * pages_in.stride(1) + place % block_size * pages_in.stride(2);
    };
    for (int64_t request = 0; request < requests; ++request) {
        const int64_t slot = slots[request], root = roots[request], count = counts[request];
        for (int64_t i = 0; i <= count && i < width; ++i) {
            const int64_t node = path[request * width + i];
            if (node == i) continue;
            const int64_t from = offset(tables.place(slot, root + node, table));
            const int64_t to = offset(tables.place(slot, root + i, table));
            for (int64_t page = 0; page < num_pages; ++page)
                for (int64_t head = 0; head < num_heads; ++head) {
                    char* first = pages + (page * pages_in.stride(0) + head * pages_in.stride(3)) * size;
                    std::memcpy(first + to * size, first + from * size, pages_in.shape(4) * size);
                }
        }
    }
}

void run_suffix_lookup(const Array& token_ids_in, const Array& slots_in, const Array& known_in,
                       int64_t shortest, int64_t longest, const Array& tokens_out,
                       const Array& found_out) {
    const int64_t num_slots = length(token_ids_in, 2, 0, "token_ids"),
                  columns = length(token_ids_in, 2, 1, "token_ids"),
                  requests = length(slots_in, 1, 0, "slots"),
                  width = length(tokens_out, 2, 1, "tokens");
    const int32_t* token_ids = dense<int32_t>(token_ids_in, {num_slots, columns}, "token_ids");
    const int64_t *slots = dense<int64_t>(slots_in, {requests}, "slots"),
                  *known = dense<int64_t>(known_in, {requests}, "known");
    auto* tokens = dense<int64_t>(tokens_out, {requests, width}, "tokens");
    auto* found = dense<uint8_t>(found_out, {requests}, "found");
    for (int64_t request = 0; request < requests; ++request) {
        require(slots[request] >= 0 && slots[request] < num_slots, "there is no such slot");
        require(known[request] >= 0 && known[request] <= columns, "a text is longer than its row");
    }
    nb::gil_scoped_release released;
    look_up_suffixes({token_ids, columns, requests, slots, known, width, shortest, longest}, tokens,
                     found);
}

}  // namespace

void bind_preparation(nb::module_& module) {
    nb::class_<Tables>(module, "Tables").def("__init__", make_tables);
    module.def("expand_rows", expand_rows);
    module.def("place_rows", place_rows, nb::arg("tables"), nb::arg("slots"), nb::arg("starts"),
               nb::arg("lengths"), nb::arg("rereads").none(), nb::arg("mask_token"),
               nb::arg("numbers"), nb::arg("blocks"), nb::arg("token_ids"));
    module.def("advance_drafts", advance_drafts, nb::arg("tables"), nb::arg("slots"),
               nb::arg("known"), nb::arg("wanted"), nb::arg("picked"),
               nb::arg("vocabulary").none(), nb::arg("tokens"), nb::arg("index"),
               nb::arg("numbers"));
    module.def("write_tokens", write_tokens);
    module.def("commit", commit);
    module.def("pack_results", pack_results, nb::arg("tokens"), nb::arg("largest"),
               nb::arg("more").none(), nb::arg("num_tokens"), nb::arg("num_accepted"),
               nb::arg("num_drafted"), nb::arg("first_rows"), nb::arg("cached"), nb::arg("began"),
               nb::arg("drafted"), nb::arg("computed"), nb::arg("ended"), nb::arg("out"));
    module.def("keep_path", keep_path);
    module.def("suffix_lookup", run_suffix_lookup);
}

}  // namespace slipstream
