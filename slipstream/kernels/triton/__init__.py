"""Triton kernels for NVIDIA GPUs. No other package imports Triton.

Every kernel also runs with Triton's interpreter (`TRITON_INTERPRET=1`, CPU tensors), so that it is
tested without a GPU.
"""

import torch
from torch import Tensor

from slipstream.kernels.delta_net import DeltaCache, DeltaHeads
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference import ReferenceOps
from slipstream.kernels.table import Addend, ExpertsParts
from slipstream.kernels.triton import (
    activation,
    adapters,
    attention,
    grouped,
    latent,
    norm,
    rope,
)
from slipstream.kernels.triton.delta_net import delta_net
from slipstream.kernels.triton.experts import GroupedExperts
from slipstream.kernels.triton.linear import Linears


class TritonOps(Linears, ReferenceOps):
    """The Triton backend.

    Args:
        packs: convert quantised weights to the layouts of kernels for bfloat16.
    """

    sums_addends = True
    reads_shared_once = True

    rms_norm = staticmethod(norm.norm)
    add_rms_norm = staticmethod(norm.add_norm)
    gated_activation = staticmethod(activation.gated_activation)
    rotate_and_store = staticmethod(rope.rotate_and_store)
    paged_attention = staticmethod(attention.paged_attention)
    latent_attention = staticmethod(latent.latent_attention)
    add_low_rank = staticmethod(adapters.add_low_rank)
    attend = staticmethod(attention.attend)

    def __init__(self, invariant: bool = False, packs: bool = True) -> None:
        super().__init__(invariant)
        self.backend = "triton, batch invariant" if invariant else "triton"
        self._packs, self._experts = packs, GroupedExperts(self)

    def experts(
        self, addend: Addend, residual: Tensor | None, parts: ExpertsParts
    ) -> tuple[Tensor, Tensor]:
        return self._experts(addend, residual, parts)

    def delta_net(
        self,
        mixed: Tensor,
        gates: Tensor,
        z: Tensor,
        heads: DeltaHeads,
        inputs: PassInputs,
        cache: DeltaCache,
    ) -> Tensor:
        # The chunks of a prompt depend on the other requests of the batch.
        chunks = False if self.invariant else None
        return delta_net(mixed, gates, z, heads, inputs, cache, chunks)

    def pack(self, weight: Weight) -> Weight:
        packed = grouped.pack(weight) if self._packs else weight
        grouped.require_conversions(packed)
        return packed


TRITON = TritonOps()
TRITON_INVARIANT = TritonOps(invariant=True)


def backend(dtype: torch.dtype, invariant: bool) -> TritonOps:
    """The ops for activations of this dtype; only with bfloat16 they pack weights."""
    if dtype != torch.bfloat16:
        return TritonOps(invariant, packs=False)
    return TRITON_INVARIANT if invariant else TRITON
