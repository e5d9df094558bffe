"""The C++ kernels for CPUs. The only place that imports `_slipstream_cpu`."""

from dataclasses import replace

import _slipstream_cpu as cpp

from slipstream.kernels.composition import Parts, compose
from slipstream.kernels.cpu import adapters, experts, matmul, rows
from slipstream.kernels.cpu.attention import attend, delta_net, latent_attention, store
from slipstream.kernels.cpu.layers import fuse
from slipstream.kernels.devices import labelled
from slipstream.kernels.reference import PARTS as PLAIN
from slipstream.kernels.table import Ops

_PARTS = Parts(
    linear=labelled("matmul", PLAIN.linear),
    logits=labelled("matmul", PLAIN.logits),
    norm=labelled("norm", rows.norm),
    add_norm=labelled("norm", rows.add_norm),
    activation=labelled("activate", rows.activation),
    gated_activation=labelled("gated", rows.gated_activation),
    experts=labelled("experts", experts.experts),
    rotate_and_store=PLAIN.rotate_and_store,
    paged_attention=PLAIN.paged_attention,
    latent_attention=labelled("attend", latent_attention),
    delta_net=labelled("delta net", delta_net),
    add_low_rank=labelled("adapters", adapters.add_low_rank),
)


def cpu_backend() -> Ops:
    """The backend; its name includes the active level of instructions."""
    composed = compose(f"cpu ({cpp.level()})", _PARTS)
    return replace(
        composed,
        attend=labelled("attend", attend),
        store=labelled("attend", store),
        pack=matmul.pack,
        round=matmul.rounded,
        fuse=fuse,
    )
