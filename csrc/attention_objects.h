// Attention's Python objects, as other subjects of the module see them.
#pragma once

#include "attention.h"
#include "tensor.h"

namespace slipstream {

// Of an `AttentionLayer` for rows of this type, and of an `AttentionPass`; valid while the object
// lives.
const AttentionShape& attention_shape(nb::handle layer, Number rows);
const AttentionRows& attention_rows(nb::handle pass);

// Pages [blocks, block size, Hk, D] of keys and values, alike in layout, in x's type or int8.
CacheView view_cache(const Array& keys, const Array& values, int num_kv_heads, int head_dim,
                     Number x_type);

}  // namespace slipstream
