"""Ops of sampling: what they mean. All of them run inside graph capture."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.columns import Peaks

PADDING = -1
_NOT_NEGATIVE = (1 << 63) - 1
# The order is known to all backends.
INTS = tuple(
    "top_k seeds steps min_tokens num_output_tokens num_prompt_tokens verification".split()
)
FLOATS = tuple(
    "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty".split()
)


@dataclass(frozen=True, eq=False)
class SamplingSlots:
    """Tensors by slot.

    Attributes:
        ints: [S, 7] int64, the columns `INTS`.
        floats: [S, 6] float32, the columns `FLOATS`.
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

    def int_column(self, name: str, slots: Tensor) -> Tensor:
        """[n] int64, one of `INTS` of the slots [n]."""
        return self.ints[slots, INTS.index(name)]

    def float_column(self, name: str, slots: Tensor) -> Tensor:
        """[n] float32, one of `FLOATS` of the slots [n]."""
        return self.floats[slots, FLOATS.index(name)]


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
    block: bool = False
    coupled: bool = False


@dataclass(frozen=True, eq=False)
class SampleRows:
    """The logits rows of one step: 1 + k of them judge a request with k draft tokens.

    Row `first_row[r] + i` predicts the token at `positions[r] + i`, given the i draft tokens
    before it. An empty draft (k = 0) is plain decoding. A draft token of -1 ends the draft, as
    though it had been that short. Ragged rows are 1 + k for each request, one behind the other;
    uniform rows are 1 + K for each, and those behind a shorter draft are computed for nothing.
    Packed rows are ragged with some up to 1 + K behind a draft, for nothing too.

    Attributes:
        slots: [R] int64, slots in the `SamplingState`.
        positions: [R] int64, number of known tokens, which is the position of the next one.
        draft_tokens: [R, K] int64; what stands behind `num_draft_tokens` is ignored.
        num_draft_tokens: [R] int64.
        one_hot: [R] bool, the draft was not sampled: its probability counts as 1.
        draft_probs: [R, K, Vq] float32, the distributions that the draft tokens were sampled
            from; None when every request's draft is one-hot.
        draft_vocabulary: [Vq] int64, rising, the token id of each column of `draft_probs`; None
            when they are the ids from 0 on.
        layout: where rows are not uniform, request [N] (the batch index of each row), offset [N]
            (the row's i) and first_row [R], int64. Nodes of token trees have a row of their own
            each, whose offset is their depth: so many of its `draft_tokens` stand before the row,
            and none of them is judged.
        allowed: [N, ceil(V / 32)] int32 or None: bit v % 32 of word v // 32 says whether a grammar
            allows token v in that row.
        certain: [R, K] bool or None: draft tokens that were not sampled, though the others of their
            request were; their probability counts as 1.
        draft_chances: [R, K] float32, what each draft token was sampled with, where `draft_probs`
            have this rank's columns alone; None: they have all.
        peaks: of the raw logits, where these are known; None: verification finds them.
    """

    slots: Tensor
    positions: Tensor
    draft_tokens: Tensor
    num_draft_tokens: Tensor
    one_hot: Tensor
    draft_probs: Tensor | None = None
    draft_vocabulary: Tensor | None = None
    layout: tuple[Tensor, Tensor, Tensor] | None = None
    allowed: Tensor | None = None
    certain: Tensor | None = None
    draft_chances: Tensor | None = None
    peaks: Peaks | None = None

    @classmethod
    def build(
        cls,
        slots: Tensor,
        positions: Tensor,
        draft_tokens: Tensor,
        num_draft_tokens: Tensor,
        one_hot: Tensor,
        draft_probs: Tensor | None = None,
        draft_vocabulary: Tensor | None = None,
        num_rows: int | None = None,
        certain: Tensor | None = None,
        layout: tuple[Tensor, Tensor, Tensor] | None = None,
        draft_chances: Tensor | None = None,
        peaks: Peaks | None = None,
    ) -> "SampleRows":
        """Lay the rows out, without waiting for the device.

        Args:
            num_rows: the sum of `num_draft_tokens` and R, for ragged rows; None for uniform ones.
            layout: of rows that have been laid out; None where they follow from the numbers.
        """
        # Without a shorter draft among them they are uniform, which takes no layout.
        uniform = num_rows is None or num_rows == draft_tokens.numel() + slots.shape[0]
        if layout is None and num_rows is not None and not uniform:
            layout = _ragged(num_draft_tokens, num_rows)
        sampled_from = draft_probs, draft_vocabulary, layout
        return cls(
            slots,
            positions,
            draft_tokens,
            num_draft_tokens,
            one_hot,
            *sampled_from,
            certain=certain,
            draft_chances=draft_chances,
            peaks=peaks,
        )

    @property
    def num_requests(self) -> int:
        return self.slots.shape[0]

    @property
    def num_rows(self) -> int:
        if self.layout is not None:
            return self.layout[0].shape[0]
        return self.num_requests * (self.max_draft_tokens + 1)

    @property
    def max_draft_tokens(self) -> int:
        """K."""
        return self.draft_tokens.shape[1]

    @property
    def request(self) -> Tensor:
        """[N] int64, batch index of each row."""
        return self._all_layout[0]

    @property
    def offset(self) -> Tensor:
        """[N] int64, the row's i."""
        return self._all_layout[1]

    @property
    def first_row(self) -> Tensor:
        """[R] int64."""
        return self._all_layout[2]

    @property
    def row_slots(self) -> Tensor:
        """[N] int64, the slot of each row."""
        return self.slots[self.request]

    def by_request(self, values: Tensor) -> Tensor:
        """values [N] of the rows -> [R, K + 1]; some row's behind those of a shorter draft."""
        if self.layout is None:
            return values.view(self.num_requests, -1)
        place = torch.arange(self.max_draft_tokens + 1, device=values.device)
        return values[(self.first_row.unsqueeze(1) + place).clamp_max(values.shape[0] - 1)]

    def draft_mask(self) -> Tensor:
        """[R, K] bool, which places of `draft_tokens` are in use."""
        column = torch.arange(self.max_draft_tokens, device=self.slots.device)
        return column < self.num_draft_tokens.unsqueeze(-1)

    def draft_rows(self) -> Tensor:
        """[R, K] int64, the row that judges each draft token (some legal row when not in use)."""
        column = torch.arange(self.max_draft_tokens, device=self.slots.device)
        column = torch.minimum(column, self.num_draft_tokens.unsqueeze(-1))
        return self.first_row.unsqueeze(-1) + column

    # Worked out when it is first asked for: fused ops need no layout of uniform rows.
    @cached_property
    def _all_layout(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.layout or _uniform(self.draft_tokens)


def _ragged(num_draft_tokens: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(request [N], offset [N], first_row [R]) for draft lengths [R]."""
    device = num_draft_tokens.device
    counts = num_draft_tokens + 1
    first_row = counts.cumsum(0) - counts
    request = torch.repeat_interleave(
        torch.arange(counts.shape[0], device=device), counts, output_size=num_rows
    )
    return request, torch.arange(num_rows, device=device) - first_row[request], first_row


def _uniform(draft_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(request, offset, first_row) with K + 1 rows for each request; draft_tokens [R, K]."""
    requests, width = draft_tokens.shape[0], draft_tokens.shape[1] + 1
    row = torch.arange(requests * width, device=draft_tokens.device)
    return row // width, row % width, torch.arange(requests, device=row.device) * width


def rates_by_request(rates: Tensor, seeds: Tensor) -> Tensor:
    """[R, K] float32, of a benchmark's lists of rates [L, K] the one of each seed [R] int64: that
    of its number modulo L, without the sign bit."""
    return rates[(seeds & _NOT_NEGATIVE) % len(rates)]


class VerifyOp(Protocol):
    """Logits [N, V] -> (token_ids [R, K + 1], num_tokens [R], num_accepted [R]) int64.

    `rates` [R, K] float32: for benchmarks, the chance that each draft token is accepted; else None.
    """

    def __call__(
        self,
        logits: Tensor,
        rows: SampleRows,
        state: SamplingSlots,
        needs: Needs,
        rates: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class DraftOp(Protocol):
    """Logits [R, V] of any float dtype -> draft tokens [R] int64, below `num_legal_tokens`.

    With probs_out [R, min(V, num_legal_tokens)] requests are sampled, and it receives their
    distributions. Those with `Verification.COUPLED` are sampled with the target's own noise, of the
    token ids that `vocabulary` [V] int64, rising, gives the columns (None: those from 0 on), so
    that draft and target choose alike. confidence_out [R] float32, dense: the largest probability
    of each row of logits at temperature 1, whatever a request's parameters; rows that are no
    numbers give any number.
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
        confidence_out: Tensor | None,
        vocabulary: Tensor | None,
    ) -> Tensor: ...


class CommitOp(Protocol):
    """Counts steps and the first num_tokens[r] of token_ids [R, K + 1] in the state."""

    def __call__(
        self, slots: Tensor, token_ids: Tensor, num_tokens: Tensor, state: SamplingSlots
    ) -> None: ...


@dataclass(frozen=True)
class SamplingOps:
    """What one backend has of them.

    Attributes:
        draft_shares: the same as `draft` by the columns that `verify` judges by, where these are
            not all: logits and probabilities are this rank's. None: they are all.
    """

    verify: VerifyOp
    draft: DraftOp
    commit: CommitOp
    draft_shares: DraftOp | None = None
