"""Activations of gated feed-forward parts."""

from enum import Enum


class Activation(Enum):
    """What a gate goes through before it is multiplied.

    GELU_TANH: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016).
    """

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
