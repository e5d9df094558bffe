"""Norms, activations, and how what a half of a layer makes joins the stream."""

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


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
class JoiningAddend:
    """What is added to the stream [T, H] by `behind`; values as of `LinearOp`."""

    values: Tensor
    behind: Behind


Addend = Tensor | JoiningAddend
