#include "suffix_lookup.h"

#include <algorithm>

#include "threads.h"

namespace slipstream {
namespace {

// The place after the latest occurrence of the longest suffix; 0 where there is none.
int64_t latest_place(const int32_t* text, int64_t known, int64_t shortest, int64_t longest) {
    int64_t best = 0, best_length = std::max<int64_t>(shortest, 1) - 1;
    for (int64_t place = known - 1; place > best_length; --place) {
        // A longer run than the best needs this token to agree, which most do not.
        if (text[place - 1 - best_length] != text[known - 1 - best_length]) continue;
        const int64_t most = std::min(place, longest);
        int64_t length = 0;
        while (length < most && text[place - 1 - length] == text[known - 1 - length]) ++length;
        if (length <= best_length) continue;
        best = place;
        best_length = length;
        if (length == longest) break;
    }
    return best;
}

}  // namespace

void look_up_suffixes(const SuffixQuery& query, int64_t* tokens, uint8_t* found) {
    parallel_for(query.requests, [&](int64_t request) {
        const int32_t* text = query.token_ids + query.slots[request] * query.columns;
        const int64_t known = query.known[request];
        const int64_t place = query.longest < query.shortest
                                  ? 0
                                  : latest_place(text, known, query.shortest, query.longest);
        found[request] = place > 0;
        const int64_t period = std::max<int64_t>(known - place, 1);
        for (int64_t i = 0; i < query.width; ++i)
            tokens[request * query.width + i] = text[place + i % period];
    });
}

}  // namespace slipstream
