"""Triton kernels for NVIDIA GPUs. No other package imports Triton.

Every kernel also runs with Triton's interpreter (`TRITON_INTERPRET=1`, CPU tensors), so that it is
tested without a GPU.
"""

from dataclasses import replace
from functools import partial

import torch

from slipstream.kernels.composition import Parts, compose
from slipstream.kernels.formats.weight import keep_layout
from slipstream.kernels.reference import dense
from slipstream.kernels.reference.experts import experts
from slipstream.kernels.table import Ops
from slipstream.kernels.triton.activation import gated_activation
from slipstream.kernels.triton.adapters import add_low_rank
from slipstream.kernels.triton.attention import attend, paged_attention
from slipstream.kernels.triton.delta_net import delta_net
from slipstream.kernels.triton.experts import GroupedExperts
from slipstream.kernels.triton.grouped import pack
from slipstream.kernels.triton.latent import latent_attention
from slipstream.kernels.triton.linear import Linears
from slipstream.kernels.triton.norm import add_norm, norm
from slipstream.kernels.triton.rope import rotate_and_store

PARTS = Parts(
    linear=dense.linear,
    logits=dense.logits,
    norm=norm,
    add_norm=add_norm,
    activation=dense.activated,
    gated_activation=gated_activation,
    experts=experts,
    rotate_and_store=rotate_and_store,
    paged_attention=paged_attention,
    latent_attention=latent_attention,
    delta_net=delta_net,
    add_low_rank=add_low_rank,
)


def _column(name: str, linears: Linears) -> Ops:
    return replace(
        compose(name, PARTS),
        linear=linears.linear,
        norm_linear=linears.norm_linear,
        norm_gated_linear=linears.norm_gated_linear,
        add_norm=linears.add_norm,
        attend=attend,
        norm=linears.norm,
        experts=GroupedExperts(linears),
        joined_linear=linears.joined_linear,
        logits=linears.logits,
        pack=pack,
        sums_addends=True,
    )


TRITON = _column("triton", Linears())
TRITON_INVARIANT = replace(
    _column("triton, batch invariant", Linears(invariant=True)),
    # The chunks of a prompt depend on the other requests of the batch.
    delta_net=partial(delta_net, in_chunks=False),
)


def backend(dtype: torch.dtype, invariant: bool) -> Ops:
    """The ops for activations of this dtype; only with bfloat16 they pack weights."""
    ops = TRITON_INVARIANT if invariant else TRITON
    return ops if dtype == torch.bfloat16 else replace(ops, pack=keep_layout)
