"""Plain torch, written to be read. Every fast backend is compared with this one."""

from slipstream.kernels.composition import Parts, compose
from slipstream.kernels.reference.attention import paged_attention, rotate_and_store
from slipstream.kernels.reference.dense import add_norm, gated_activation, linear, logits, norm
from slipstream.kernels.reference.experts import experts
from slipstream.kernels.reference.preparation import PREPARATION
from slipstream.kernels.reference.sampling import FP64_SAMPLING, SAMPLING

__all__ = ["FP64_SAMPLING", "PARTS", "PREPARATION", "REFERENCE", "SAMPLING"]

PARTS = Parts(
    linear=linear,
    logits=logits,
    norm=norm,
    add_norm=add_norm,
    gated_activation=gated_activation,
    experts=experts,
    rotate_and_store=rotate_and_store,
    paged_attention=paged_attention,
)
REFERENCE = compose("reference", PARTS)
