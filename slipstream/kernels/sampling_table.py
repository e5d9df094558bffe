"""What sampling asks of a device: fused ops where there are any.

What the ops mean is defined by the plain torch of the sampling room, which serves every device
that has none. All of them run inside graph capture.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.devices import runs_cpp, runs_triton


@dataclass(frozen=True, eq=False)
class SamplingSlots:
    """Tensors by slot.

    Attributes:
        ints: [S, 5 or more] int64: top_k, seed, steps, min_tokens, output tokens.
        floats: [S, 6] float32: temperature, top_p, min_p, presence, frequency, repetition penalty.
        stop_ids: [S, M] int64, padded with -1.
        output_counts: [S, V] int32.
        prompt_mask: [S, V] bool.
        bias: [S, V] float32.
    """

    ints: Tensor
    floats: Tensor
    stop_ids: Tensor
    output_counts: Tensor | None
    prompt_mask: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class Needs:
    """What any request of the batch needs."""

    sampling: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    bias: bool = False
    min_tokens: bool = False


@dataclass(frozen=True, eq=False)
class JudgedRows:
    """Rows of logits and the drafts that they judge; shapes as in `sampling/rows.py`.

    Attributes:
        layout: request [N], offset [N] and first_row [R]; None when every request has K + 1 rows.
        allowed: [N, ceil(V / 32)] int32 or None.
    """

    layout: tuple[Tensor, Tensor, Tensor] | None
    slots: Tensor
    positions: Tensor
    draft_tokens: Tensor
    num_draft_tokens: Tensor
    one_hot: Tensor
    draft_probs: Tensor | None
    draft_vocabulary: Tensor | None
    allowed: Tensor | None
    certain: Tensor | None = None


class VerifyOp(Protocol):
    """Logits [N, V] -> (token_ids [R, K + 1], num_tokens [R], num_accepted [R]) int64.

    `rates`: for benchmarks, the chance that each draft token is accepted; else empty.
    """

    def __call__(
        self,
        logits: Tensor,
        rows: JudgedRows,
        state: SamplingSlots,
        needs: Needs,
        rates: tuple[float, ...],
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class DraftOp(Protocol):
    """Logits [R, V] of any float dtype -> draft tokens [R] int64, below `num_legal_tokens`.

    With probs_out [R, min(V, num_legal_tokens)] requests are sampled, and it receives their
    distributions.
    """

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        state: SamplingSlots,
        needs: Needs,
        num_legal_tokens: int,
        probs_out: Tensor | None,
    ) -> Tensor: ...


class CommitOp(Protocol):
    """Counts steps and the first num_tokens[r] of token_ids [R, K + 1] in the state."""

    def __call__(
        self, slots: Tensor, token_ids: Tensor, num_tokens: Tensor, state: SamplingSlots
    ) -> None: ...


@dataclass(frozen=True)
class SamplingOps:
    """The fused ops of a device."""

    verify: VerifyOp
    draft: DraftOp
    commit: CommitOp


@functools.cache
def sampling_ops_for(device: torch.device) -> SamplingOps | None:
    """The fused ops that serve `device`; None leaves it to plain torch."""
    if runs_triton(device):
        from slipstream.kernels.triton.sampling import SAMPLING as TRITON

        return TRITON
    if runs_cpp(device):
        from slipstream.kernels.cpu.sampling import SAMPLING as CPU

        return CPU
    return None


def reads_are_free(device: torch.device) -> bool:
    """Whether the host may look at numbers on `device` without waiting for it."""
    return device.type == "cpu"
