"""Triton kernels for CUDA devices. The only place that imports Triton.

Every kernel also runs under Triton's interpreter (`TRITON_INTERPRET=1`, CPU tensors), which is how
it is tested where there is no GPU.
"""

from slipstream.kernels.composition import Parts, compose
from slipstream.kernels.reference import dense
from slipstream.kernels.triton.activation import gated_activation
from slipstream.kernels.triton.attention import paged_attention
from slipstream.kernels.triton.norm import add_norm, norm
from slipstream.kernels.triton.rope import rotate_and_store

PARTS = Parts(
    linear=dense.linear,  # the library's matmuls, for now
    logits=dense.logits,
    norm=norm,
    add_norm=add_norm,
    gated_activation=gated_activation,
    rotate_and_store=rotate_and_store,
    paged_attention=paged_attention,
)
TRITON = compose("triton", PARTS)
