"""Mixtures of experts in C++ (`csrc/experts.h`). Meanings: `ExpertsParts` in `kernels/table.py`."""

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.cpu.matmul import handle_of
from slipstream.kernels.devices import CPP_DTYPES, kept
from slipstream.kernels.experts import Router
from slipstream.kernels.reference import experts as plain
from slipstream.kernels.table import ExpertsParts, SharedExpert


def experts(x: Tensor, parts: ExpertsParts) -> Tensor:
    """See `Ops.mixture`. The bits of a row do not depend on the other rows of the batch."""
    if not serves(parts):
        return plain.experts(x, parts)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    mixture_of(parts).run(x.contiguous(), out)
    return out


def serves(parts: ExpertsParts) -> bool:
    """Whether all matrices are packed."""
    shared = () if parts.shared is None else (parts.shared.gate_up[0], parts.shared.down[0])
    matrices = (parts.gate_up, parts.down, *shared)
    packed = all(handle_of(weight) is not None for weight in matrices)
    return packed and parts.router.weight.dtype in CPP_DTYPES


@kept
def mixture_of(parts: ExpertsParts) -> cpp.Experts:
    """The C++ object for a mixture of experts."""
    router, shared, clamp = parts.router, parts.shared, parts.clamp
    routing = router.routing
    return cpp.Experts(
        router.weight.dtype == torch.bfloat16,
        cpp.Routing(
            routing.num_experts,
            routing.num_chosen,
            routing.scores.value,
            routing.normalised,
            routing.scale,
            routing.num_groups,
            routing.kept_groups,
        ),
        _router(router, None if shared is None else shared.gate),
        router.correction,
        router.gains,
        (handle_of(parts.gate_up), _flat(parts.gate_up_bias)),
        (handle_of(parts.down), _flat(parts.down_bias)),
        None if clamp is None else (clamp.limit, clamp.alpha),
        None if shared is None else _shared(shared),
        parts.activation.value,
    )


def _router(router: Router, gate: Tensor | None) -> tuple[object, Tensor | None]:
    """The router's weight; its last row is the gate of the shared expert, if there is one."""
    weight, bias = router.weight, router.bias
    if gate is not None:
        weight = torch.cat([weight, gate])
        bias = None if bias is None else torch.cat([bias, bias.new_zeros(1)])
    return cpp.pack(weight.contiguous()), bias


def _shared(shared: SharedExpert) -> tuple[object, object]:
    (gate_up, gate_up_bias), (down, down_bias) = shared.gate_up, shared.down
    return (handle_of(gate_up), gate_up_bias), (handle_of(down), down_bias)


def _flat(biases: Tensor | None) -> Tensor | None:
    return None if biases is None else biases.flatten()
