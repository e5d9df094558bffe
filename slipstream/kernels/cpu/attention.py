"""Attention in C++. Shapes and meanings: `kernels/table.py`."""

import weakref

import _slipstream_cpu as cpp
from torch import Tensor

from slipstream.kernels.table import AttentionInputs, Heads

_layers: weakref.WeakKeyDictionary[Heads, "cpp.AttentionLayer"] = weakref.WeakKeyDictionary()


def attention_layer(heads: Heads) -> "cpp.AttentionLayer":
    """What C++ keeps of a layer."""
    found = _layers.get(heads)
    if found is None:
        query, key = heads.norms or (None, None)
        found = cpp.AttentionLayer(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            query_norm=None if query is None else query.weight,
            key_norm=None if key is None else key.weight,
            norm_eps=0.0 if query is None else query.eps,
            cos_sin=heads.cos_sin,
            scale=heads.scale,
            window=heads.window or 0,
        )
        _layers[heads] = found
    return found


def attention_pass(inputs: AttentionInputs) -> "cpp.AttentionPass":
    """What C++ keeps of the rows of a pass, for all its layers."""
    tree = inputs.tree
    return cpp.AttentionPass(
        query_start=inputs.query_start,
        context_lens=inputs.context_lens,
        block_tables=inputs.block_tables,
        positions=inputs.positions,
        slots=inputs.slots,
        first_seen=inputs.first_seen,
        causal=inputs.causal,
        tree_starts=None if tree is None else tree.starts,
        tree_tokens=None if tree is None else tree.tokens,
        tree_ancestors=None if tree is None else tree.ancestors,
    )


def attend(
    qkv: Tensor, heads: Heads, inputs: AttentionInputs, cache: tuple[Tensor, Tensor]
) -> Tensor:
    out = qkv.new_empty((len(qkv), heads.num_heads * heads.head_dim))
    cpp.attend(attention_layer(heads), attention_pass(inputs), qkv, *cache, out)
    return out


def store(kv: Tensor, heads: Heads, inputs: AttentionInputs, cache: tuple[Tensor, Tensor]) -> None:
    cpp.store(attention_layer(heads), kv, inputs.positions, inputs.slots, *cache)
