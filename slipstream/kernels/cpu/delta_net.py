"""Gated delta nets in C++ (`csrc/delta_net.h`). Meanings and shapes: `kernels/delta_net.py`."""

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.cpu.attention import pass_of
from slipstream.kernels.delta_net import DeltaCache, DeltaHeads
from slipstream.kernels.devices import kept
from slipstream.kernels.pass_inputs import PassInputs


def delta_net(
    mixed: Tensor,
    gates: Tensor,
    z: Tensor,
    heads: DeltaHeads,
    inputs: PassInputs,
    cache: DeltaCache,
) -> Tensor:
    """See `DeltaNetOp`. Rows are taken strictly one behind the other: a row's bits, and those of a
    state, do not tell in how many passes they were made, nor beside which requests."""
    out = torch.empty(z.shape, dtype=z.dtype)
    cpp.delta_net(delta_layer_of(heads), pass_of(inputs), mixed, gates, z, tensors_of(cache), out)
    return out


def tensors_of(cache: DeltaCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return cache.states, cache.windows, cache.drafted, cache.drafted_gates


@kept
def delta_layer_of(heads: DeltaHeads) -> cpp.DeltaLayer:
    """What C++ keeps of a layer."""
    return cpp.DeltaLayer(
        heads.num_key_heads,
        heads.num_value_heads,
        heads.key_dim,
        heads.value_dim,
        heads.taps.detach().float().T.contiguous(),
        heads.decay.detach(),
        heads.step_bias.detach(),
        heads.norm_weight.detach().float(),
        heads.eps,
    )
