"""Latent attention in C++ (`csrc/latent.h`). Meanings: `kernels/latent_attention.py`."""

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.cpu.attention import pass_of
from slipstream.kernels.devices import kept
from slipstream.kernels.latent_attention import LatentHeads
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference import REFERENCE

MOST_STORED_DIM = 576


def latent_attention(
    queries: Tensor, latents: Tensor, heads: LatentHeads, inputs: PassInputs, cache: Tensor
) -> Tensor:
    """See `LatentAttentionOp`; all rows are in the absorbed form, and a row's bits depend on
    nothing beside the row."""
    if not serves(heads):
        return REFERENCE.latent_attention(queries, latents, heads, inputs, cache)
    out = torch.empty((len(queries), heads.num_heads * heads.value_dim), dtype=queries.dtype)
    cpp.latent_attend(layer_of(heads), pass_of(inputs), queries, latents, as_pages(cache), out)
    return out


def serves(heads: LatentHeads) -> bool:
    """Whether the kernels take rows of this size."""
    stored = heads.rank + heads.rotary_dim
    return stored % 4 == 0 and stored <= MOST_STORED_DIM


def as_pages(cache: Tensor) -> Tensor:
    """Latent rows as pages of one head, [num_blocks, block_size, 1, R + P]."""
    return cache.unsqueeze(2)


@kept
def layer_of(heads: LatentHeads) -> cpp.LatentLayer:
    """What C++ keeps of a layer: its matrices packed, head by head."""
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
