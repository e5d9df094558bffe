"""Norms, activations, and how what a half of a layer makes joins the stream."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

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


@dataclass(frozen=True, eq=False)
class Spread:
    """A sum over ranks that nobody has added up: the op that takes it fetches the others' parts.

    Attributes:
        values: [T, H], this rank's part.
        channel: through which the parts go; it has T rows or more, of H numbers.
        stack: another way, all-gather: [T, H] of each rank -> [ranks, T, H].
    """

    values: Tensor
    channel: Channel
    stack: Callable[[Tensor], Tensor]

    def stacked(self) -> Tensor:
        """The parts of all ranks, [ranks, T, H]."""
        return self.stack(self.values)


Made = Tensor | Spread


@dataclass(frozen=True, eq=False)
class JoiningAddend:
    """What is added to the stream [T, H] by `behind`; values as of `LinearOp`."""

    values: Made
    behind: Behind


Addend = Made | JoiningAddend
