"""Norms, activations, and how the output of a sublayer is added to the residual stream."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from slipstream.kernels.inboxes import Channel


class Activation(Enum):
    """The activation of a gate, before `up` is multiplied by it.

    GELU_TANH: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016).
    """

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm over the last axis, or with a bias a layer norm (Ba et al. 2016).

    Attributes:
        weight, bias: [H].
        eps: added to the mean square, or to the variance.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PostNorm:
    """How the output y of a sublayer is added to the stream x: x = (x + norm(y)) * factor.

    Attributes:
        norm: its result is rounded to its dtype before the addition; None: y is not normed.
        factor: [1]; None: 1.
    """

    norm: Norm | None = None
    factor: Tensor | None = None


def sum_parts(output: Tensor, dtype: torch.dtype) -> Tensor:
    """The output of an op as [T, H]: partial sums [parts, T, H] are added in their order in
    float32, and rounded to `dtype`."""
    if output.ndim == 2:
        return output
    total = output[0]
    for part in output[1:]:
        total = total + part
    return total.to(dtype)


@dataclass(frozen=True, eq=False)
class UnreducedSum:
    """A sum over ranks before its all-reduce: the op that takes it as an addend fetches the parts
    of the other ranks.

    Attributes:
        values: this rank's part: [T, H] in `dtype`, or partial sums of it, [parts, T, H].
        dtype: dtype of the numbers that are sent to other ranks, and of the sum.
        channel: sends and receives the parts; it is for at least T rows of H numbers.
    """

    values: Tensor
    dtype: torch.dtype
    channel: Channel


SublayerOutput = Tensor | UnreducedSum


@dataclass(frozen=True, eq=False)
class PostNormAddend:
    """An addend that is added to the stream [T, H] by `post_norm`; `values`: see `Ops.linear`."""

    values: SublayerOutput
    post_norm: PostNorm


Addend = SublayerOutput | PostNormAddend
