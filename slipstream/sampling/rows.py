"""Which rows of logits belong to whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SampleRows:
    """The logits rows of one step, ragged: 1 + k rows for a request with k draft tokens.

    Row `first_row[r] + i` predicts the token at `positions[r] + i`, given the i draft tokens
    before it. An empty draft (k = 0) is plain decoding. A draft token of -1 ends the draft, as
    though it had been that short.

    Attributes:
        request: [N] int64, batch index of each row.
        offset: [N] int64, the row's i.
        slots: [R] int64, slots in the `SamplingState`.
        positions: [R] int64, number of known tokens, which is the position of the next one.
        first_row: [R] int64.
        draft_tokens: [R, K] int64; what stands behind `num_draft_tokens` is ignored.
        num_draft_tokens: [R] int64.
        one_hot: [R] bool, the draft was not sampled: its probability counts as 1.
        draft_probs: [R, K, Vq] float32, the distributions that the draft tokens were sampled
            from; None when every request's draft is one-hot.
        draft_vocabulary: [Vq] int64, rising, the token id of each column of `draft_probs`; None
            when they are the ids from 0 on.
        host_slots: `slots` on the host.
        host_num_draft_tokens: `num_draft_tokens` on the host.
    """

    request: Tensor
    offset: Tensor
    slots: Tensor
    positions: Tensor
    first_row: Tensor
    draft_tokens: Tensor
    num_draft_tokens: Tensor
    one_hot: Tensor
    draft_probs: Tensor | None
    host_slots: tuple[int, ...]
    host_num_draft_tokens: tuple[int, ...]
    draft_vocabulary: Tensor | None = None

    @classmethod
    def build(
        cls,
        host_slots: Sequence[int],
        positions: Sequence[int] | Tensor,
        draft_tokens: Sequence[Sequence[int]] | Tensor,
        num_draft_tokens: Sequence[int] | Tensor,
        one_hot: Sequence[bool] | Tensor,
        draft_probs: Tensor | None,
        device: torch.device | str,
        draft_vocabulary: Tensor | None = None,
    ) -> "SampleRows":
        """Lay the rows out.

        `num_draft_tokens` is needed on the host, because it says how many rows there are; a
        tensor on another device is waited for.
        """
        if isinstance(num_draft_tokens, Tensor):
            num_draft_tokens = num_draft_tokens.tolist()
        host_num_draft_tokens = tuple(num_draft_tokens)
        drafts = torch.as_tensor(draft_tokens, dtype=torch.int64, device=device)
        lengths = torch.tensor(host_num_draft_tokens, dtype=torch.int64, device=device)
        request, offset, first_row = _layout(lengths, sum(host_num_draft_tokens) + len(host_slots))
        return cls(
            request=request,
            offset=offset,
            slots=torch.tensor(tuple(host_slots), dtype=torch.int64, device=device),
            positions=torch.as_tensor(positions, dtype=torch.int64, device=device),
            first_row=first_row,
            draft_tokens=drafts,
            num_draft_tokens=lengths,
            one_hot=torch.as_tensor(one_hot, dtype=torch.bool, device=device),
            draft_probs=draft_probs,
            host_slots=tuple(host_slots),
            host_num_draft_tokens=host_num_draft_tokens,
            draft_vocabulary=draft_vocabulary,
        )

    @property
    def num_requests(self) -> int:
        return len(self.host_slots)

    @property
    def num_rows(self) -> int:
        return self.request.shape[0]

    @property
    def max_draft_tokens(self) -> int:
        """K."""
        return self.draft_tokens.shape[1]

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

    def host_rows_of(self, requests: Sequence[int]) -> list[int]:
        """The rows of these requests (batch indices), in the order given."""
        first = (0, *accumulate(k + 1 for k in self.host_num_draft_tokens))
        return [row for r in requests for row in range(first[r], first[r + 1])]

    def rows_of(self, requests: Sequence[int]) -> Tensor:
        """`host_rows_of` as an int64 tensor."""
        return torch.tensor(
            self.host_rows_of(requests), dtype=torch.int64, device=self.slots.device
        )

    def select(self, requests: Sequence[int]) -> "SampleRows":
        """Only these requests (batch indices), as a batch of their own.

        Its logits are those of `rows_of(requests)`.
        """
        index = torch.tensor(tuple(requests), dtype=torch.int64, device=self.slots.device)
        host_num_draft_tokens = tuple(self.host_num_draft_tokens[r] for r in requests)
        lengths = self.num_draft_tokens[index]
        request, offset, first_row = _layout(lengths, sum(host_num_draft_tokens) + len(requests))
        return SampleRows(
            request=request,
            offset=offset,
            slots=self.slots[index],
            positions=self.positions[index],
            first_row=first_row,
            draft_tokens=self.draft_tokens[index],
            num_draft_tokens=lengths,
            one_hot=self.one_hot[index],
            draft_probs=None if self.draft_probs is None else self.draft_probs[index],
            host_slots=tuple(self.host_slots[r] for r in requests),
            host_num_draft_tokens=host_num_draft_tokens,
            draft_vocabulary=self.draft_vocabulary,
        )


def _layout(num_draft_tokens: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(request [N], offset [N], first_row [R]) for draft lengths [R]."""
    device = num_draft_tokens.device
    counts = num_draft_tokens + 1
    first_row = counts.cumsum(0) - counts
    request = torch.repeat_interleave(
        torch.arange(counts.shape[0], device=device), counts, output_size=num_rows
    )
    return request, torch.arange(num_rows, device=device) - first_row[request], first_row
