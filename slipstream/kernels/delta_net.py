"""The interface of gated delta nets (Yang et al. 2024, arXiv:2412.06464)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class DeltaHeads:
    """The heads of one gated delta net.

    Every value head has its own state; Hv / Hk adjacent ones share the query and the key of a key
    head.

    Attributes:
        num_key_heads, num_value_heads, key_dim, value_dim: Hk, Hv, Dk and Dv.
        taps: [C, W], the causal convolution of each channel, the tap of the row itself last; the C
            channels are Hk Dk of queries, Hk Dk of keys and Hv Dv of values.
        decay: [Hv] float32, negative: -exp(A_log).
        step_bias: [Hv] float32 (`dt_bias`).
        norm_weight, eps: gated RMS norm [Dv] of the outputs.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: Tensor
    decay: Tensor
    step_bias: Tensor
    norm_weight: Tensor
    eps: float

    @property
    def num_channels(self) -> int:
        """C."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, eq=False)
class DeltaCache:
    """The recurrent states of one layer, by place: the slots of requests first, then checkpoints.

    Attributes:
        states: [places, Hv, Dk, Dv] float32, the state after the committed tokens.
        windows: [places, W - 1, C], the convolution's inputs for the last W - 1 committed tokens,
            the oldest first; zeros before the first token.
        drafted: [slots, K, C], the convolution's inputs for the draft tokens of the last pass.
        drafted_gates: [slots, K, 2 Hv], their gates.
    """

    states: Tensor
    windows: Tensor
    drafted: Tensor
    drafted_gates: Tensor
