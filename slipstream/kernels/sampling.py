"""The interface of the sampling ops: draft, verify, commit. CUDA graphs can capture all of them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.columns import Peaks

PADDING = -1
_NOT_NEGATIVE = (1 << 63) - 1
# All backends depend on the order of these columns.
INTS = tuple(
    "top_k seeds steps min_tokens num_output_tokens num_prompt_tokens verification".split()
)
FLOATS = tuple(
    "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty".split()
)


@dataclass(frozen=True, eq=False)
class SamplingSlots:
    """The sampling state of requests, by slot.

    Attributes:
        ints: [S, 7] int64, with the columns `INTS`.
        floats: [S, 6] float32, with the columns `FLOATS`.
        stop_ids: [S, M] int64, stop tokens, padded with -1.
        output_counts: [S, V] int32, occurrences of each token in the output; None: no request has
            needed them.
        prompt_mask: [S, V] bool, whether the prompt has the token; None: as `output_counts`.
        bias: [S, V] float32, added to logits; None: as `output_counts`.
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
class SamplingNeeds:
    """The sampling features that at least one request of the batch needs."""

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
    """The logits rows of one step: 1 + k rows verify a request with k draft tokens.

    Row `first_row[r] + i` predicts the token at `positions[r] + i`, given the i draft tokens
    before it. An empty draft (k = 0) is plain decoding. A draft token of -1 ends the draft, as if
    the draft were that short. Ragged rows are 1 + k for each request. Uniform rows are 1 + K for
    each request; the rows after a shorter draft are unused. Packed rows are ragged, and some
    requests have up to 1 + K rows, the last of which are unused.

    Attributes:
        slots: [R] int64, slots in the `SamplingState`.
        positions: [R] int64, number of known tokens, which is the position of the next one.
        draft_tokens: [R, K] int64; those from `num_draft_tokens` on are ignored.
        num_draft_tokens: [R] int64.
        one_hot: [R] bool, the draft was not sampled, so its probability q is 1.
        draft_probs: [R, K, Vq] float32, the distributions from which the draft tokens were sampled;
            None: all drafts are one-hot.
        draft_vocabulary: [Vq] int64, rising, the token id of each column of `draft_probs`; None:
            column i is token i.
        layout: request [N] (the batch index of each row), offset [N] (the row's i) and
            first_row [R], int64; None: rows are uniform. Each node of a token tree has its own row,
            whose offset is its depth: the number of `draft_tokens` before the row, none of which
            is verified.
        allowed: [N, ceil(V / 32)] int32: bit v % 32 of word v // 32 says whether a grammar allows
            token v in that row; None: no row has a grammar.
        certain: [R, K] bool, draft tokens that were not sampled, in requests whose other draft
            tokens were; their probability q is 1. None: there are none.
        draft_chances: [R, K] float32, q of each draft token, if `draft_probs` has only this rank's
            columns; None: it has all.
        peaks: `Peaks` of the raw logits, if they are known; None: verification computes them.
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
        """Compute the layout of the rows, without waiting for the device.

        Args:
            num_rows: the sum of `num_draft_tokens` + 1, for ragged rows; None: rows are uniform.
            layout: the layout of ragged rows, if it is known; None: it follows from
                `num_draft_tokens`.
        """
        # Rows are uniform if no draft is shorter; these need no layout.
        uniform = num_rows is None or num_rows == draft_tokens.numel() + slots.shape[0]
        if uniform:
            layout = None
        elif layout is None and num_rows is not None:
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
        """[R] int64, the first row of each request."""
        return self._all_layout[2]

    @property
    def row_slots(self) -> Tensor:
        """[N] int64, the slot of each row."""
        return self.slots[self.request]

    def by_request(self, values: Tensor) -> Tensor:
        """values [N] of the rows -> [R, K + 1]; arbitrary after the rows of a shorter draft."""
        if self.layout is None:
            return values.view(self.num_requests, -1)
        place = torch.arange(self.max_draft_tokens + 1, device=values.device)
        return values[(self.first_row.unsqueeze(1) + place).clamp_max(values.shape[0] - 1)]

    def draft_mask(self) -> Tensor:
        """[R, K] bool, which places of `draft_tokens` are in use."""
        column = torch.arange(self.max_draft_tokens, device=self.slots.device)
        return column < self.num_draft_tokens.unsqueeze(-1)

    def draft_rows(self) -> Tensor:
        """[R, K] int64, the row that verifies each draft token (any legal row if not in use)."""
        column = torch.arange(self.max_draft_tokens, device=self.slots.device)
        column = torch.minimum(column, self.num_draft_tokens.unsqueeze(-1))
        return self.first_row.unsqueeze(-1) + column

    # Computed on first use: fused ops need no layout of uniform rows.
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
    """[R, K] float32: each request's list of a benchmark's acceptance rates [L, K]. The list is
    chosen by the request's seed, [R] int64, without its sign bit and modulo L."""
    return rates[(seeds & _NOT_NEGATIVE) % len(rates)]


class VerifyOp(Protocol):
    """Logits [N, V] -> (token_ids [R, K + 1], num_tokens [R], num_accepted [R]) int64, and
    largest [R, K + 1] float32.

    `largest` is the largest raw logit of the row of each token; if one is NaN, it is NaN or +inf.
    After the rows of a shorter draft it is arbitrary.

    `rates` [R, K] float32: for benchmarks, the probability with which each draft token is accepted
    whatever the logits; None: drafts are verified.
    """

    def __call__(
        self,
        logits: Tensor,
        rows: SampleRows,
        state: SamplingSlots,
        needs: SamplingNeeds,
        rates: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class DraftOp(Protocol):
    """Logits [R, V] of any float dtype -> draft tokens [R] int64, below `num_legal_tokens`.

    Args:
        probs_out: [R, min(V, num_legal_tokens)], receives the distributions of the requests, which
            are sampled from them; None: all requests are greedy.
        confidence_out: [R] float32, contiguous, receives the largest probability of each row of
            logits at temperature 1, whatever the request's parameters (arbitrary for NaN logits).
        vocabulary: [V] int64, rising, the token id of each column; None: column i is token i.
            Requests with `Verification.COUPLED` are sampled with the target's noise for these
            token ids, so that drafter and target choose the same token as often as possible.
    """

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        state: SamplingSlots,
        needs: SamplingNeeds,
        num_legal_tokens: int,
        probs_out: Tensor | None,
        confidence_out: Tensor | None,
        vocabulary: Tensor | None,
    ) -> Tensor: ...


class RecordOutputOp(Protocol):
    """Records the first num_tokens[r] of token_ids [R, K + 1] as output, and counts a step for each
    request that has some."""

    def __call__(
        self, slots: Tensor, token_ids: Tensor, num_tokens: Tensor, state: SamplingSlots
    ) -> None: ...


@dataclass(frozen=True)
class SamplingOps:
    """One backend's sampling ops.

    Attributes:
        draft_shares: `draft` for logits and probabilities of only this rank's columns; None: ranks
            do not split the vocabulary.
    """

    verify: VerifyOp
    draft: DraftOp
    commit: RecordOutputOp
    draft_shares: DraftOp | None = None
