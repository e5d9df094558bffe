"""The requests of a step as tensors, for code that runs on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slipstream.core.batch import FACTOR_PARTS, ChainStops, Trim
from slipstream.kernels.devices import upload
from slipstream.kernels.pass_inputs import SharedBlocks
from slipstream.runner.excerpts import Excerpt
from slipstream.runner.prefix_groups import PrefixGroup
from slipstream.runner.rows import PassRows, PromptRows, TreeRows
from slipstream.sampling.state import Uses

# Draft tokens of each request that were found on the host; None: the device drafts for it.
Guesses = Sequence[Sequence[int] | None]
LEFT_TO_DEVICE = -1


@dataclass(frozen=True)
class PackedBatch:
    """A batch as numbers on the host, to be copied to the device in one piece.

    Attributes:
        slots, num_new_tokens, num_draft_tokens: one number per request.
        at_end: whether the last known token is among the new ones.
        width: K, not less than any request's number of draft tokens.
        uses: the sampling features that at least one of the requests needs.
        guesses: see `Guesses`; None: the device drafts for all requests.
        rereads: number of tokens before the new ones that the target computes again, for their
            features (0 or 1 per request), if any request has some; None: 0 for all.
        stops: see `DraftPlan`, per request; empty if no chain may end early.
        trims: see `DraftPlan`, per request; empty if all draft tokens are verified.
        saved: see `ScheduledRequest`, per request; empty if no checkpoint is written.
        prompts: see `PassRows`.
        reads_all: the hidden states of all rows may be read; else only those that verify drafts.
        shared: requests whose shared blocks attention reads once; None: it reads all for each.
        least_requests, least_rows: minimum sizes to which captured steps are padded, so that data
            parallel ranks replay graphs of one shape.
    """

    slots: Sequence[int]
    num_new_tokens: Sequence[int]
    num_draft_tokens: Sequence[int]
    at_end: Sequence[bool]
    width: int
    uses: frozenset[Uses]
    guesses: Guesses | None = None
    rereads: Sequence[int] | None = None
    stops: Sequence[ChainStops | None] = ()
    trims: Sequence[Trim | None] = ()
    saved: Sequence[int] = ()
    prompts: Sequence[PromptRows | None] = ()
    reads_all: bool = True
    shared: PrefixGroup | None = None
    least_requests: int = 0
    least_rows: int = 0

    @property
    def num_verified(self) -> int:
        """Number of draft tokens that are verified."""
        if not self.trims:
            return sum(self.num_draft_tokens)
        pairs = zip(self.num_draft_tokens, self.trims, strict=True)
        return sum([most if it is None else min(most, it.num_rows) for most, it in pairs])

    def columns(self, width: int) -> list[list[int]]:
        """Seven rows of numbers with a column per request, two more rows if blocks are `shared`,
        and `width` more if there are guesses."""
        rows = [
            list(self.slots),
            list(self.num_new_tokens),
            list(self.num_draft_tokens),
            [int(end) for end in self.at_end],
            list(self.rereads or [0] * len(self.slots)),
            [FACTOR_PARTS if it is None else it.factor for it in self.trims]
            or [FACTOR_PARTS] * len(self.slots),
            list(self.saved) or [-1] * len(self.slots),
        ]
        if self.shared is not None:
            rows.extend(self.shared.columns(len(self.slots)))
        if self.guesses is not None:
            padded = [
                [LEFT_TO_DEVICE] * width if guess is None else [*guess, *[0] * (width - len(guess))]
                for guess in self.guesses
            ]
            rows.extend([row[place] for row in padded] for place in range(width))
        return rows

    def on(self, device: torch.device, follows_results: bool = False) -> "DeviceBatch":
        """The batch as tensors, without padding.

        Args:
            follows_results: it was planned with the results of the last step.
        """
        columns = upload(self.columns(self.width), device)
        num_rows = sum(self.num_new_tokens) + self.num_verified if self.trims else None
        known = self.num_new_tokens
        if self.rereads is not None:
            known = [new + more for new, more in zip(known, self.rereads, strict=True)]
        return DeviceBatch.over(
            *(columns, self.width, self.uses, True, num_rows, self.shared is not None),
            stops=self.stops,
            prompts=self.prompts,
            known_counts=known,
            draft_counts=self.num_draft_tokens if follows_results else None,
            most_rereads=max(self.rereads or (0,)),
            reads_all=self.reads_all,
        )


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """The requests of one step on the device. Nothing writes to its tensors, since a later step
    with equal numbers uses them again.

    Attributes:
        slots: [R] int64, rows of the device state; padding has a reserved slot.
        num_new_tokens: [R] int64, known tokens that the target computes; 0 for padding.
        num_draft_tokens: [R] int64, at most K.
        at_end: [R] bool, the last known token is among the new ones, so the request gets tokens.
        rereads: [R] int64, see `PackedBatch`.
        guesses: [R, K] int64, draft tokens that the host found, -1 in the rows of requests for
            which the device drafts; [R, 0] if there are none.
        width: K.
        uses: see `PackedBatch`.
        exact: passes compute no padding, and the host may wait for the device to get the number
            of rows. Otherwise each request gets its maximum number of rows, and the host never
            waits, so that the step can be captured in a CUDA graph.
        factors: [R] int64, see `Trim`.
        saved: [R] int64, see `PackedBatch`.
        num_rows: rows of the target's pass, without those of `rereads`; draft tokens get the rows
            that known tokens do not use. None: the maximum of all requests together.
        kept: [R] int64, number of leading draft tokens that a grammar has not replaced; None: all.
        stops: see `PackedBatch`; empty unless the batch is exact, since chains of captured steps
            have their planned length.
        prompts: see `PassRows`; empty unless the batch is exact.
        known_counts: `num_known_rows` on the host; empty unless the batch is exact.
        draft_counts: `num_draft_tokens` on the host, of an exact batch that was planned with the
            results of the last step, so that they are within the limits of requests; else None.
        most_rereads: the largest of `rereads`; 0 unless the batch is exact.
        reads_all, shared: see `PackedBatch`.
    """

    slots: Tensor
    num_new_tokens: Tensor
    num_draft_tokens: Tensor
    at_end: Tensor
    rereads: Tensor
    factors: Tensor
    saved: Tensor
    guesses: Tensor
    width: int
    uses: frozenset[Uses]
    exact: bool
    kept: Tensor | None = None
    num_rows: int | None = None
    stops: Sequence[ChainStops | None] = ()
    prompts: Sequence[PromptRows | None] = ()
    known_counts: Sequence[int] = ()
    draft_counts: Sequence[int] | None = None
    most_rereads: int = 0
    reads_all: bool = True
    shared: SharedBlocks | None = None

    @classmethod
    def over(
        cls,
        columns: Tensor,
        width: int,
        uses: frozenset[Uses],
        exact: bool,
        num_rows: int | None = None,
        shares: bool = False,
        **of_host: Any,
    ) -> "DeviceBatch":
        """Views of `PackedBatch.columns` [7, 9, 7 + K or 9 + K, R] int64 on the device.

        Args:
            shares: the columns have two rows for `shared`.
            of_host: the other attributes, of exact batches.
        """
        slots, new, drafts, at_end, rereads, factors, saved = columns[:7].unbind(0)
        shared, guessed = (SharedBlocks(*columns[7:9].unbind(0)), 9) if shares else (None, 7)
        guesses = columns[guessed:].T.contiguous()
        return cls(
            slots,
            new,
            drafts,
            at_end != 0,
            rereads,
            factors,
            saved,
            guesses,
            width,
            uses,
            exact,
            num_rows=num_rows,
            shared=shared,
            **of_host,
        )

    @property
    def num_requests(self) -> int:
        return self.slots.shape[0]

    @property
    def guessed(self) -> Tensor:
        """[R] bool, whether the host has drafted for the request, even if it found no token."""
        return (self.guesses[:, :1] >= 0).any(1)

    @property
    def num_known_rows(self) -> Tensor:
        """[R] int64, number of rows of the target's pass for known tokens."""
        return self.num_new_tokens + self.rereads if self._may_reread else self.num_new_tokens

    @property
    def _may_reread(self) -> bool:
        """Whether any of `rereads` may be above 0: where steps are captured, drafts of exact steps
        are proposed by a batch that is padded."""
        return not self.exact or self.most_rereads > 0

    @cached_property
    def no_tokens(self) -> Tensor:
        """[R, K] int64, zeros."""
        return self.slots.new_zeros((self.num_requests, self.width))

    @cached_property
    def zeros(self) -> Tensor:
        """[R] int64."""
        return torch.zeros_like(self.slots)

    @cached_property
    def ones(self) -> Tensor:
        """[R] bool."""
        return torch.ones_like(self.at_end)

    @cached_property
    def planned_rows(self) -> tuple[Tensor, Sequence[int]]:
        """The number of rows of the target's pass for each request that drafts as many tokens as
        planned, on the device [R] int64 and on the host (empty: not known)."""
        counts: list[int] = []
        if self.known_counts and self.draft_counts is not None:
            pairs = zip(self.known_counts, self.draft_counts, strict=True)
            counts = [known + drafts for known, drafts in pairs]
        return self.num_known_rows + self.num_draft_tokens, counts

    @cached_property
    def draft_slots(self) -> Tensor:
        """[R * K] int64, the slot of the request of each draft token."""
        return self.slots.unsqueeze(1).expand(-1, self.width).contiguous().flatten()

    @cached_property
    def draft_places(self) -> Tensor:
        """[R * K] int64, the place of each draft token in its draft."""
        return torch.arange(self.width, device=self.slots.device).repeat(self.num_requests)

    @cached_property
    def all_draft(self) -> bool:
        """Whether the host knows that each request drafts (`num_featured_drafts` is positive)."""
        return all(self.draft_counts or (0,)) and not self._may_reread

    @cached_property
    def drafts_fill(self) -> bool:
        """Whether the host knows that each request drafts `width` tokens."""
        return self.all_draft and self.draft_counts == [self.width] * self.num_requests

    def where_drafts(self, wanted: Tensor, values: Tensor, others: Tensor | int) -> Tensor:
        """[R], `values` for the requests that draft `wanted` [R] tokens, `others` for those with 0
        (by `num_draft_tokens` or `num_featured_drafts`)."""
        return values if self.all_draft else torch.where(wanted > 0, values, others)

    @cached_property
    def judges_all(self) -> bool:
        """Whether the batch is exact, and every row of the target's pass has its logits judged."""
        return bool(self.known_counts) and all([count == 1 for count in self.known_counts])

    @property
    def num_featured_drafts(self) -> Tensor:
        """[R] int64, number of draft tokens; 0 for requests whose last known token has no features
        of the target yet: after a prefix hit, this step computes them."""
        if not self._may_reread:
            return self.num_draft_tokens
        return torch.where(self.rereads > 0, 0, self.num_draft_tokens)

    def rows(
        self,
        starts: Tensor,
        lengths: Tensor,
        most: int,
        mask_token: int | None = None,
        tree: TreeRows | None = None,
        excerpt: Excerpt | None = None,
    ) -> PassRows:
        """The rows of a drafter's pass: lengths[r] rows of each request, at most `most`, from
        position starts[r] on; see `PassRows`."""
        width = None if self.exact else most
        return PassRows(
            self.slots,
            starts,
            lengths,
            width,
            mask_token=mask_token,
            tree=tree,
            excerpt=excerpt,
            adapted=Uses.ADAPTER in self.uses,
            shared=self.shared,
        )

    def target_rows(
        self, starts: Tensor, num_drafts: Tensor, most_drafts: int, tree: TreeRows | None
    ) -> PassRows:
        """The rows of the target's pass: known tokens from `starts` on, then num_drafts[r] draft
        tokens, at most `most_drafts`."""
        adapted = Uses.ADAPTER in self.uses
        if not self.exact:
            lengths = self.num_new_tokens + num_drafts
            most, total = most_drafts + 1, self.num_rows
            if total is not None and total >= self.num_requests * most:
                total = None
            return PassRows(
                *(self.slots, starts, lengths, most, total),
                num_known=self.num_new_tokens,  # there are no `rereads`
                saved=self.saved,
                tree=tree,
                adapted=adapted,
                shared=self.shared,
            )
        if not most_drafts:
            lengths, counts = self.num_known_rows, self.known_counts
        elif num_drafts is self.num_draft_tokens:
            lengths, counts = self.planned_rows
        else:
            lengths, counts = self.num_known_rows + num_drafts, ()
        return PassRows(
            *(self.slots, starts - self.rereads if self.most_rereads else starts, lengths),
            rereads=self.rereads if self.most_rereads else None,
            num_known=self.num_known_rows,
            saved=self.saved,
            tree=tree,
            adapted=adapted,
            prompts=self.prompts,
            counts=counts,
            num_read=None if self.reads_all else most_drafts + 1,
            shared=self.shared,
        )

    def asking_for(self, num_draft_tokens: Tensor, width: int) -> "DeviceBatch":
        """A copy with other numbers of draft tokens, at most `width`."""
        if self.exact:
            width = int(num_draft_tokens.max())
        return replace(self, num_draft_tokens=num_draft_tokens, width=width, draft_counts=None)
