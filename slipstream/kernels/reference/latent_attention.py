"""Latent attention in plain torch, absorbed. Meanings: `kernels/latent_attention.py`."""

import torch
from torch import Tensor

from slipstream.kernels.latent_attention import LatentHeads
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference.attention import paged_attention, store_rows
from slipstream.kernels.reference.dense import norm


def latent_attention(
    queries: Tensor, latents: Tensor, heads: LatentHeads, inputs: PassInputs, cache: Tensor
) -> Tensor:
    """See `LatentAttentionOp`. What is handed from product to product has the queries' dtype."""
    positions = inputs.rows.positions
    cos, sin = heads.cos_sin[positions].chunk(2, dim=-1)
    normed = norm(latents[:, : heads.rank], heads.norm_weight, heads.eps)
    rotated = rotate_pairs(latents[:, heads.rank :], cos, sin)
    store_rows(torch.cat((normed, rotated), -1), inputs.paging.slots, cache)
    queries = queries.view(len(queries), heads.num_heads, -1)
    plain, turning = queries[..., : heads.plain_dim], queries[..., heads.plain_dim :]
    turned = rotate_pairs(turning, cos.unsqueeze(1), sin.unsqueeze(1))
    absorbed = torch.einsum("thn,hnr->thr", plain, heads.keys)
    query = torch.cat((absorbed, turned), -1)
    if heads.query_scales is not None:
        query = (query.float() * heads.query_scales[positions, None, None]).to(query.dtype)
    # All heads share one key of R + P numbers, and its first R are its value.
    pages = cache.unsqueeze(2)
    mixed = paged_attention(query, (pages, pages), inputs, heads.scale, None)[..., : heads.rank]
    return torch.einsum("thr,hvr->thv", mixed, heads.values).flatten(1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring numbers, x [..., P], cos and sin [..., P/2], in float32."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return turned.flatten(-2).to(x.dtype)
