"""The reference backend: plain torch, which defines the correct results of all ops."""

from slipstream.kernels.ops import Ops
from slipstream.kernels.reference import attention, delta_net, dense, experts
from slipstream.kernels.reference.preparation import PREPARATION
from slipstream.kernels.reference.sampling import FP64_SAMPLING, SAMPLING, with_columns

__all__ = ["FP64_SAMPLING", "PREPARATION", "REFERENCE", "SAMPLING", "ReferenceOps", "with_columns"]


class ReferenceOps(Ops):
    """Plain torch; base class of backends that have kernels for some ops only."""

    backend = "reference"

    product = staticmethod(dense.linear)
    logits = staticmethod(dense.logits)
    rms_norm = staticmethod(dense.norm)
    add_rms_norm = staticmethod(dense.add_norm)
    activate = staticmethod(dense.activated)
    gated_activation = staticmethod(dense.gated_activation)
    mixture = staticmethod(experts.experts)
    rotate_and_store = staticmethod(attention.rotate_and_store)
    paged_attention = staticmethod(attention.paged_attention)
    latent_attention = staticmethod(attention.latent_attention)
    delta_net = staticmethod(delta_net.delta_net)
    add_low_rank = staticmethod(dense.add_low_rank)


REFERENCE = ReferenceOps()
