"""Norms, activations, and how what a half of a layer makes joins the stream."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from slipstream.kernels.inboxes import Channel


class Activation(Enum):
    """What a gate goes through before it is multiplied.

    GELU_TANH: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016).
    """

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm over the last axis, or with a bias a layer norm (Ba et al. 2016).

    Attributes:
        weight, bias: [H].
        eps: is added to the mean square, or to the variance.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Behind:
    """How what a half makes, y, joins the stream x, which becomes (x + norm(y)) * factor.

    Attributes:
        norm: its result is rounded to its dtype; None: y is added as it is.
        factor: [1]; None: 1.
    """

    norm: Norm | None = None
    factor: Tensor | None = None


def summed(made: Tensor, dtype: torch.dtype) -> Tensor:
    """An op's addend as [T, H]: partial sums [parts, T, H] are added up in their order in float32,
    and rounded to `dtype`."""
    if made.ndim == 2:
        return made
    total = made[0]
    for part in made[1:]:
        total = total + part
    return total.to(dtype)


@dataclass(frozen=True, eq=False)
class Spread:
    """A sum over ranks that nobody has added up: the op that takes it fetches the others' parts.

    Attributes:
        values: what this rank adds, [T, H] in `dtype`, or partial sums [parts, T, H] of it.
        dtype: that of the numbers that go to other ranks, and of the sum.
        channel: through which they go; it has T rows or more, of H numbers.
    """

    values: Tensor
    dtype: torch.dtype
    channel: Channel


Made = Tensor | Spread


@dataclass(frozen=True, eq=False)
class JoiningAddend:
    """What is added to the stream [T, H] by `behind`; values as of `LinearOp`."""

    values: Made
    behind: Behind


Addend = Made | JoiningAddend
