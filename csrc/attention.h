// Causal self-attention of ragged rows over paged keys and values, and what stores them.
//
// The arithmetic of a row is a function of the row, what it sees and the level of instructions,
// never of the other rows of the pass, of the threads or of how a prompt was cut: cached tokens are
// taken in parts that begin at fixed tokens, and parts that a row does not see change nothing.
#pragma once

#include <cstdint>

#include "levels.h"

namespace slipstream {

// One attention layer. Pointers are borrowed.
struct AttentionShape {
    int num_heads, num_kv_heads, head_dim;  // head_dim is a multiple of 4, heads one of kv heads
    float scale;
    int64_t window;                      // tokens that a row sees, itself included; 0 sees all
    const void *query_norm, *key_norm;   // RMS norm weights [D] in x's type; both null for none
    float norm_eps;
    const float* cos_sin;  // [num_positions, R]: R/2 cosines, then R/2 sines
    int64_t num_positions;
    int rotary_dim;      // R: numbers of a head that are rotated, its first ones
    const float* sinks;  // [num_heads]: scores without a value, not scaled; null for none
    float softcap;       // scaled scores become softcap * tanh(score / softcap); 0 for none
    bool gated;          // what comes out is multiplied by sigmoids of gates
    const float* query_scales;  // [num_positions]: scores' other factor, by position; null for 1
    bool norms_values;  // value heads are normed like keys, without a weight
    bool reads_only;    // the cache is that of another layer: there are queries alone

    int64_t query_columns() const { return int64_t{num_heads} * head_dim; }
    int64_t gate_column() const {
        return (num_heads + 2 * int64_t{num_kv_heads}) * head_dim;
    }
    // Queries, keys and values, then a gate for each number of the queries where there are gates.
    int64_t columns() const {
        return reads_only ? query_columns() : gate_column() + (gated ? query_columns() : 0);
    }
};

// How states move on; meanings as `StateInputs` of kernels/pass_inputs.py. All [num_requests].
struct StateRows {
    const int64_t *slots, *num_known, *pending, *save_at, *saved;
};

// Where the rows of one pass stand; meanings as `PassInputs` of kernels/pass_inputs.py.
struct AttentionRows {
    int64_t num_rows, num_requests;
    const int64_t* query_start;   // [num_requests + 1]
    const int64_t* context_lens;  // [num_requests]
    // [num_rows]; places: which token of the paged context a row is
    const int64_t *positions, *places, *slots;
    const int32_t* block_tables;  // [num_requests, table_stride], of which table_width are entries
    int64_t table_stride, table_width;
    int64_t first_seen;
    bool causal;
    // Of passes with trees, all three; else null: [num_requests], [num_rows], [num_rows].
    const int64_t *tree_starts, *tree_tokens, *tree_ancestors;
    const int64_t* last_seen;  // [num_rows]: up to this token a row sees in any case; or null
    // The rows as layers with a window find them, where those have blocks of their own; else null.
    const AttentionRows* windowed;
    const StateRows* states;  // of layers with states; else null
    const int64_t* adapters;  // [num_rows], see `LowRankCall`; null where no row has one
};

// i8: a head of a token is D numbers and 4 bytes of a float32, the scale of the numbers.
enum class CacheType { f32, bf16, i8 };

// One layer's pages, keys and values alike: number d of a head is at
// block * block_stride + token * token_stride + head * head_stride + d, counted in numbers.
struct CacheView {
    void *keys, *values;
    CacheType type;  // x's, or i8
    int64_t block_size, num_blocks;
    int64_t block_stride, token_stride, head_stride;
};

struct AttentionCall {
    const AttentionShape* shape;
    const AttentionRows* rows;
    const CacheView* cache;
    const void* x;  // attend: [T, shape->columns()]; store: [T, 2 Hk D]; rows x_stride apart
    bool x_is_bf16;
    int64_t x_stride;
    bool is_stored;  // attend: x is [T, Hq D], and keys and values stand in the cache already
    void* out;  // attend: [T, Hq D] in x's type, rows out_stride apart
    int64_t out_stride;
};

struct AttentionKernels {
    void (*attend)(const AttentionCall& call);
    void (*store)(const AttentionCall& call);
};

extern ByLevel<AttentionKernels> attention_kernels;

// std::invalid_argument of rows that are not in order. Here since files that are compiled for each
// level use nothing of the standard library.
[[noreturn]] void throw_of_query_start();

// Norms and rotates queries and keys, stores keys and values at the rows' slots, then attends.
// Reads no block, position or slot that is out of range; rows that see nothing give zeros.
void attend(const AttentionCall& call);

// The storing alone; of the rows only num_rows, positions and slots count.
inline void store_kv(const AttentionCall& call) { attention_kernels.active().store(call); }

}  // namespace slipstream
