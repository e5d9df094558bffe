"""The C++ kernels for CPUs. The only place that imports `_slipstream_cpu`."""

import _slipstream_cpu as cpp

from slipstream.kernels.cpu import attention, experts, layers, matmul, rows
from slipstream.kernels.devices import labelled
from slipstream.kernels.reference import ReferenceOps, dense


class CppOps(ReferenceOps):
    """The C++ backend; its name includes the active level of instructions."""

    product = staticmethod(labelled("matmul", dense.linear))
    logits = staticmethod(labelled("matmul", dense.logits))
    rms_norm = staticmethod(labelled("norm", rows.norm))
    add_rms_norm = staticmethod(labelled("norm", rows.add_norm))
    activate = staticmethod(labelled("activate", rows.activate))
    gated_activation = staticmethod(labelled("gated", rows.gated_activation))
    mixture = staticmethod(labelled("experts", experts.experts))
    latent_attention = staticmethod(labelled("attend", attention.latent_attention))
    delta_net = staticmethod(labelled("delta net", attention.delta_net))
    add_low_rank = staticmethod(labelled("adapters", rows.add_low_rank))
    attend = staticmethod(labelled("attend", attention.attend))
    store = staticmethod(labelled("attend", attention.store))
    pack = staticmethod(matmul.pack)
    round = staticmethod(matmul.rounded)
    fuse = staticmethod(layers.fuse)

    def __init__(self) -> None:
        self.backend = f"cpu ({cpp.level()})"
