"""The reference backend: plain torch, which defines the correct results of all ops."""

from slipstream.kernels.composition import Parts, compose
from slipstream.kernels.reference.adapters import add_low_rank
from slipstream.kernels.reference.attention import (
    latent_attention,
    paged_attention,
    rotate_and_store,
)
from slipstream.kernels.reference.delta_net import delta_net
from slipstream.kernels.reference.dense import (
    activated,
    add_norm,
    gated_activation,
    linear,
    logits,
    norm,
)
from slipstream.kernels.reference.experts import experts
from slipstream.kernels.reference.preparation import PREPARATION
from slipstream.kernels.reference.sampling import FP64_SAMPLING, SAMPLING, with_columns

__all__ = ["FP64_SAMPLING", "PARTS", "PREPARATION", "REFERENCE", "SAMPLING", "with_columns"]

PARTS = Parts(
    linear=linear,
    logits=logits,
    norm=norm,
    add_norm=add_norm,
    activation=activated,
    gated_activation=gated_activation,
    experts=experts,
    rotate_and_store=rotate_and_store,
    paged_attention=paged_attention,
    latent_attention=latent_attention,
    delta_net=delta_net,
    add_low_rank=add_low_rank,
)
REFERENCE = compose("reference", PARTS)
