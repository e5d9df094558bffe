// What followed the end of a text when it last occurred: slipstream/kernels/preparation.py.
#pragma once

#include <cstdint>

namespace slipstream {

struct SuffixQuery {
    const int32_t* token_ids;  // [S, columns]
    int64_t columns, requests;
    const int64_t* slots;  // [R]
    const int64_t* known;  // [R], at most `columns`
    int64_t width, shortest, longest;
};

// tokens [R, width], found [R].
void look_up_suffixes(const SuffixQuery& query, int64_t* tokens, uint8_t* found);

}  // namespace slipstream
