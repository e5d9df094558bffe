"""Which rows of logits belong to whom."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from slipstream.kernels.sampling_table import JudgedRows


@dataclass(frozen=True, eq=False)
class SampleRows:
    """The logits rows of one step: 1 + k of them judge a request with k draft tokens.

    Row `first_row[r] + i` predicts the token at `positions[r] + i`, given the i draft tokens
    before it. An empty draft (k = 0) is plain decoding. A draft token of -1 ends the draft, as
    though it had been that short. Ragged rows are 1 + k for each request, one behind the other;
    uniform rows are 1 + K for each, and those behind a shorter draft are computed for nothing.

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
        ragged_rows: N where rows are ragged; None where they are uniform.
        allowed: [N, ceil(V / 32)] int32 or None: bit v % 32 of word v // 32 says whether a grammar
            allows token v in that row.
        certain: [R, K] bool or None: draft tokens that were not sampled, though the others of their
            request were; their probability counts as 1.
        depths: [R] int64 where every request is a single row, that of a node of a token tree: so
            many of its `draft_tokens` stand before the row, none of them is judged.
    """

    slots: Tensor
    positions: Tensor
    draft_tokens: Tensor
    num_draft_tokens: Tensor
    one_hot: Tensor
    draft_probs: Tensor | None = None
    draft_vocabulary: Tensor | None = None
    ragged_rows: int | None = None
    allowed: Tensor | None = None
    certain: Tensor | None = None
    depths: Tensor | None = None

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
    ) -> "SampleRows":
        """Lay the rows out, without waiting for the device.

        Args:
            num_rows: the sum of `num_draft_tokens` and R, for ragged rows; None for uniform ones.
        """
        return cls(
            slots=slots,
            positions=positions,
            draft_tokens=draft_tokens,
            num_draft_tokens=num_draft_tokens,
            one_hot=one_hot,
            draft_probs=draft_probs,
            draft_vocabulary=draft_vocabulary,
            # Without a shorter draft among them they are uniform, which takes no layout.
            ragged_rows=None if num_rows == draft_tokens.numel() + slots.shape[0] else num_rows,
        )

    @property
    def num_requests(self) -> int:
        return self.slots.shape[0]

    @property
    def num_rows(self) -> int:
        if self.depths is not None:
            return self.num_requests
        if self.ragged_rows is not None:
            return self.ragged_rows
        return self.num_requests * (self.max_draft_tokens + 1)

    @property
    def max_draft_tokens(self) -> int:
        """K."""
        return self.draft_tokens.shape[1]

    @property
    def request(self) -> Tensor:
        """[N] int64, batch index of each row."""
        return self._layout[0]

    @property
    def offset(self) -> Tensor:
        """[N] int64, the row's i."""
        return self._layout[1]

    @property
    def first_row(self) -> Tensor:
        """[R] int64."""
        return self._layout[2]

    @property
    def row_slots(self) -> Tensor:
        """[N] int64, the slot of each row."""
        return self.slots[self.request]

    def draft_mask(self) -> Tensor:
        """[R, K] bool, which places of `draft_tokens` are in use."""
        column = torch.arange(self.max_draft_tokens, device=self.slots.device)
        return column < self.num_draft_tokens.unsqueeze(-1)

    def draft_rows(self) -> Tensor:
        """[R, K] int64, the row that judges each draft token (some legal row when not in use)."""
        column = torch.arange(self.max_draft_tokens, device=self.slots.device)
        column = torch.minimum(column, self.num_draft_tokens.unsqueeze(-1))
        return self.first_row.unsqueeze(-1) + column

    def judged(self) -> JudgedRows:
        """The same for fused ops, which need no layout of uniform rows."""
        return JudgedRows(
            layout=self._layout
            if self.depths is not None or self.ragged_rows is not None
            else None,
            slots=self.slots,
            positions=self.positions,
            draft_tokens=self.draft_tokens,
            num_draft_tokens=self.num_draft_tokens,
            one_hot=self.one_hot,
            draft_probs=self.draft_probs,
            draft_vocabulary=self.draft_vocabulary,
            allowed=self.allowed,
            certain=self.certain,
        )

    # Worked out when it is first asked for: a graph of fused ops does without.
    @cached_property
    def _layout(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.depths is not None:
            row = torch.arange(self.num_requests, device=self.slots.device)
            return row, self.depths, row
        if self.ragged_rows is not None:
            return _ragged(self.num_draft_tokens, self.ragged_rows)
        return _uniform(self.draft_tokens)


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
    """The same with K + 1 rows for each request; draft_tokens [R, K]."""
    requests, width = draft_tokens.shape[0], draft_tokens.shape[1] + 1
    row = torch.arange(requests * width, device=draft_tokens.device)
    return row // width, row % width, torch.arange(requests, device=row.device) * width
