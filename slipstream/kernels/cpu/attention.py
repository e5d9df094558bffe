"""Attention, latent attention and gated delta nets in C++ (`csrc/attention.h`, `latent.h`,
`delta_net.h`). Meanings and shapes: `kernels/table.py`, `latent_attention.py`, `delta_net.py`.

C++ objects are made once for each layer (sizes, norms, rotary angles) and once for each pass (the
places of its rows).
"""

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.delta_net import DeltaCache, DeltaHeads
from slipstream.kernels.devices import kept
from slipstream.kernels.latent_attention import LatentHeads
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.table import Heads

MOST_HEAD_DIM = 512


def attend(qkv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]) -> Tensor:
    """See `Ops.attend`. The bits of a row do not depend on the other rows of the batch."""
    if not serves(heads):
        return REFERENCE.attend(qkv, heads, inputs, cache)
    out = torch.empty((len(qkv), heads.num_heads * heads.head_dim), dtype=qkv.dtype)
    keys, values = cache
    cpp.attend(layer_of(heads), pass_of(inputs), _dense_rows(qkv), keys, values, out)
    return out


def store(kv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]) -> None:
    """See `Ops.store`."""
    if not serves(heads):
        REFERENCE.store(kv, heads, inputs, cache)
        return
    positions, slots = inputs.rows.positions.contiguous(), inputs.paging.slots.contiguous()
    cpp.store(layer_of(heads), _dense_rows(kv), positions, slots, *cache)


def serves(heads: Heads) -> bool:
    """Whether the kernels support heads of this size and their norms, which have no bias there."""
    fits = heads.head_dim % 4 == 0 and heads.head_dim <= MOST_HEAD_DIM
    return fits and all(norm.bias is None for norm in heads.norms or ())


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@kept
def layer_of(heads: Heads) -> cpp.AttentionLayer:
    """The constant arguments of a layer's attention in C++, made once."""
    norms = heads.norms
    return cpp.AttentionLayer(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        None if norms is None else norms[0].weight.detach(),
        None if norms is None else norms[1].weight.detach(),
        0.0 if norms is None else norms[0].eps,
        heads.cos_sin,
        heads.scale,
        heads.window or 0,
        None if heads.sinks is None else heads.sinks.detach().float(),
        heads.gated,
        heads.softcap or 0.0,
    )


def pass_of(inputs: PassInputs) -> cpp.AttentionPass:
    """The C++ object for the rows of a pass, which all layers share."""
    found = inputs.prepared.get("cpu")
    if not isinstance(found, cpp.AttentionPass):
        found = inputs.prepared["cpu"] = _pass(inputs)
    return found


def _pass(inputs: PassInputs) -> cpp.AttentionPass:
    rows, paging, sees = inputs.rows, inputs.paging, inputs.sees
    tree = sees.tree
    trees = (None,) * 3 if tree is None else (tree.starts, tree.tokens, tree.ancestors)
    made = cpp.AttentionPass(
        rows.query_start.contiguous(),
        paging.context_lens.contiguous(),
        paging.block_tables,
        rows.positions.contiguous(),
        rows.in_context.contiguous(),
        paging.slots.contiguous(),
        sees.first_seen,
        sees.causal,
        *(part if part is None else part.contiguous() for part in trees),
    )
    if sees.last_seen is not None:
        made.set_last_seen(sees.last_seen.contiguous())
    if inputs.window_paging is not None:
        windowed = inputs.window_paging
        made.set_windowed(windowed.block_tables, windowed.slots.contiguous())
    if inputs.states is not None:
        states = inputs.states
        parts = states.slots, states.num_known, states.pending, states.save_at, states.saved
        made.set_states(*(part.contiguous() for part in parts))
    if inputs.adapters is not None:
        made.set_adapters(inputs.adapters.contiguous())
    return made


MOST_STORED_DIM = 576


def latent_attention(
    queries: Tensor, latents: Tensor, heads: LatentHeads, inputs: PassInputs, cache: Tensor
) -> Tensor:
    """See `Ops.latent_attention`. All rows use the absorbed form, and the bits of a row do not
    depend on the other rows of the batch."""
    if not serves_latent(heads):
        return REFERENCE.latent_attention(queries, latents, heads, inputs, cache)
    out = torch.empty((len(queries), heads.num_heads * heads.value_dim), dtype=queries.dtype)
    cpp.latent_attend(
        latent_layer_of(heads), pass_of(inputs), queries, latents, as_pages(cache), out
    )
    return out


def serves_latent(heads: LatentHeads) -> bool:
    """Whether the kernels support latent rows of this size."""
    stored = heads.rank + heads.rotary_dim
    return stored % 4 == 0 and stored <= MOST_STORED_DIM


def as_pages(cache: Tensor) -> Tensor:
    """View latent rows as pages of one head, [num_blocks, block_size, 1, R + P]."""
    return cache.unsqueeze(2)


@kept
def latent_layer_of(heads: LatentHeads) -> cpp.LatentLayer:
    """The C++ object for a layer, with its matrices packed for each head."""
    scales = heads.query_scales
    return cpp.LatentLayer(
        heads.norm_weight.detach(),
        heads.eps,
        heads.keys.detach().transpose(1, 2).contiguous(),
        heads.values.detach().contiguous(),
        heads.cos_sin,
        heads.scale,
        None if scales is None else scales.contiguous(),
    )


def delta_net(
    mixed: Tensor,
    gates: Tensor,
    z: Tensor,
    heads: DeltaHeads,
    inputs: PassInputs,
    cache: DeltaCache,
) -> Tensor:
    """See `Ops.delta_net`. Rows are processed one by one, so the bits of rows and states do not
    depend on how a prompt is split into passes, nor on the other requests of a batch."""
    out = torch.empty(z.shape, dtype=z.dtype)
    cpp.delta_net(delta_layer_of(heads), pass_of(inputs), mixed, gates, z, tensors_of(cache), out)
    return out


def tensors_of(cache: DeltaCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return cache.states, cache.windows, cache.drafted, cache.drafted_gates


@kept
def delta_layer_of(heads: DeltaHeads) -> cpp.DeltaLayer:
    """The constant arguments of a layer's gated delta net in C++, made once."""
    return cpp.DeltaLayer(
        heads.num_key_heads,
        heads.num_value_heads,
        heads.key_dim,
        heads.value_dim,
        heads.taps.detach().float().T.contiguous(),
        heads.decay.detach(),
        heads.step_bias.detach(),
        heads.norm_weight.detach().float(),
        heads.eps,
    )
