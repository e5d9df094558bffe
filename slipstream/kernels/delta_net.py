"""Gated delta nets: what their op means."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs


@dataclass(frozen=True, eq=False)
class DeltaHeads:
    """One gated delta net (Yang et al. 2024, "Gated Delta Networks").

    Every value head has a state of its own; Hv / Hk of them in a row share the query and the key
    of a key head.

    Attributes:
        num_key_heads, num_value_heads, key_dim, value_dim: Hk, Hv, Dk and Dv.
        taps: [C, W], the causal convolution of each channel, the row's own tap last; the C channels
            are Hk Dk of queries, Hk Dk of keys and Hv Dv of values.
        decay: [Hv] float32, below 0: how fast a head forgets.
        step_bias: [Hv] float32.
        norm_weight: [Dv], of the outputs' norm.
        eps: of that norm.
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
    """What one layer keeps of every request, by its place: slots first, then checkpoints.

    Attributes:
        states: [places, Hv, Dk, Dv] float32, over the tokens that count for certain.
        windows: [places, W - 1, C]: the last rows of those tokens before the convolution, the
            oldest first; zeros before the first token.
        drafted: [slots, K, C]: the rows of the last pass's draft tokens before the convolution.
        drafted_gates: [slots, K, 2 Hv]: their gates.
    """

    states: Tensor
    windows: Tensor
    drafted: Tensor
    drafted_gates: Tensor


class DeltaNetOp(Protocol):
    """The recurrence of ragged rows, each behind those before it in its request.

    mixed [T, C]: queries, keys, values of the rows; gates [T, 2 Hv]: write strengths b, then decay
    steps a; z [T, Hv Dv]. All may be columns of wider tensors. Returns [T, Hv Dv] in their dtype.

    A row's channels are convolved with those of the W - 1 rows before it and pass SiLU. Then, for
    each value head, all in float32:

        q <- q / sqrt(|q|^2 + 1e-6) / sqrt(Dk);  k <- k / sqrt(|k|^2 + 1e-6)
        S <- exp(decay softplus(a + step_bias)) S
        S <- S + k (x) sigmoid(b) (v - S^T k)
        out = norm_weight * (S^T q) / rms(S^T q) * silu(z)

    `inputs.states` says which rows stay whatever is refused. A pass first takes in the `pending`
    rows of `drafted`, then its own known rows: after those `states` and `windows` are written,
    once. Rows behind them start from that state and leave it as it is; they go to `drafted`, the
    first K of them. Where the count of tokens taken in reaches `save_at`, the state and the window
    there are copied to the place `saved` as well. Requests without rows keep everything as it is.
    """

    def __call__(
        self,
        mixed: Tensor,
        gates: Tensor,
        z: Tensor,
        heads: DeltaHeads,
        inputs: PassInputs,
        cache: DeltaCache,
    ) -> Tensor: ...
