"""A step's requests as tensors: what device code knows of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.core.batch import FACTOR_PARTS, ChainStops, Trim
from slipstream.kernels.devices import upload
from slipstream.runner.excerpts import Excerpt
from slipstream.runner.rows import PassRows, PromptRows, TreeRows
from slipstream.sampling.state import Uses

# Of each request; None leaves it to the device.
Guesses = Sequence[Sequence[int] | None]
LEFT_TO_DEVICE = -1


@dataclass(frozen=True)
class PackedBatch:
    """A batch in host numbers, ready to be copied to the device in one piece.

    Attributes:
        slots, num_new_tokens, num_draft_tokens: one number per request.
        at_end: whether the last known token is among the new ones.
        width: K, at least the most draft tokens.
        uses: what any request's sampling needs.
        guesses: draft tokens that the host found, per request (None: the device drafts for it);
            None when the device drafts for all.
        rereads: computed tokens before the new ones that the target computes again, for their
            features; None: nowhere.
        stops: when each request's chain ends early (None: it does not); empty where none does.
        trims: which draft tokens of each request are verified (None: all); empty where all are.
        saved: the place for the checkpoint of each request, -1 for none; empty: none has any.
        prompts: see `PassRows`.
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

    @property
    def num_verified(self) -> int:
        """Draft tokens that get rows."""
        if not self.trims:
            return sum(self.num_draft_tokens)
        pairs = zip(self.num_draft_tokens, self.trims, strict=True)
        return sum([most if it is None else min(most, it.num_rows) for most, it in pairs])

    def columns(self, width: int) -> list[list[int]]:
        """Rows of numbers, one column per request: seven, and `width` more where there are
        guesses."""
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
        if self.guesses is not None:
            padded = [
                [LEFT_TO_DEVICE] * width if guess is None else [*guess, *[0] * (width - len(guess))]
                for guess in self.guesses
            ]
            rows.extend([row[place] for row in padded] for place in range(width))
        return rows

    def on(self, device: torch.device) -> "DeviceBatch":
        """As tensors of exactly these requests."""
        columns = upload(self.columns(self.width), device)
        batch = DeviceBatch.over(columns, self.width, self.uses, True)
        num_rows = sum(self.num_new_tokens) + self.num_verified if self.trims else None
        return replace(batch, stops=self.stops, num_rows=num_rows, prompts=self.prompts)


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """The requests of one step on the device.

    Attributes:
        slots: [R] int64, rows of the device state; padding has a slot of its own.
        num_new_tokens: [R] int64, known tokens that the target computes; 0 for padding.
        num_draft_tokens: [R] int64, at most K.
        at_end: [R] bool, the request gains tokens.
        rereads: [R] int64, tokens before the new ones that the target computes again; 0 wherever
            the batch is not exact.
        guesses: [R, K] int64, what the host guessed; K columns only where there are guesses, and -1
            in the rows of requests for which the device drafts.
        width: K.
        uses: what any request's sampling needs.
        exact: passes compute exactly the rows that there are, for which the host may wait to
            learn how many; otherwise each request gets as many as it can have at most, and the
            host waits for nothing.
        factors: [R] int64, see `Trim`.
        saved: [R] int64, see `PackedBatch`.
        num_rows: rows of the target's pass, of which draft tokens get what known ones leave over
            (rows of `rereads` are not counted); None: as many as all requests can have.
        kept: [R] int64, how many of the draft's first tokens are what the drafter proposed; None:
            all of them.
        stops: see `PackedBatch`; empty wherever the batch is not exact: chains of captured steps
            are as long as they were planned.
        prompts: see `PassRows`; empty wherever the batch is not exact.
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

    @classmethod
    def over(
        cls,
        columns: Tensor,
        width: int,
        uses: frozenset[Uses],
        exact: bool,
        num_rows: int | None = None,
    ) -> "DeviceBatch":
        """Views of `PackedBatch.columns` [7 or 7 + K, R] int64 on the device."""
        slots, new, drafts, at_end, rereads, factors, saved = columns[:7].unbind(0)
        guesses = columns[7:].T.contiguous()
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
        )

    @property
    def num_requests(self) -> int:
        return self.slots.shape[0]

    @property
    def guessed(self) -> Tensor:
        """[R] bool, the host has said what it guesses, be it nothing."""
        return (self.guesses[:, :1] >= 0).any(1)

    @property
    def num_known_rows(self) -> Tensor:
        """[R] int64, rows of the target's pass that hold known tokens."""
        return self.num_new_tokens + self.rereads

    @property
    def most_rereads(self) -> int:
        """The most that `rereads` can be."""
        return int(self.exact)

    @property
    def num_featured_drafts(self) -> Tensor:
        """[R] int64, draft tokens for those whose last known token's features are there: behind a
        prefix hit they come with this step."""
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
        """The rows of a drafter's pass: lengths[r] of each request from position starts[r] on, of
        which no request has more than `most`; see `PassRows`."""
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
        )

    def target_rows(
        self, starts: Tensor, num_drafts: Tensor, most_drafts: int, tree: TreeRows | None
    ) -> PassRows:
        """The rows of the target's pass: known tokens from `starts` on, then num_drafts[r] draft
        tokens, `most_drafts` of a request at most."""
        lengths, adapted = self.num_new_tokens + num_drafts, Uses.ADAPTER in self.uses
        if not self.exact:
            most, total = most_drafts + 1, self.num_rows
            if total is not None and total >= self.num_requests * most:
                total = None
            return PassRows(
                *(self.slots, starts, lengths, most, total),
                num_known=self.num_new_tokens,  # nothing is computed again here
                saved=self.saved,
                tree=tree,
                adapted=adapted,
            )
        return PassRows(
            *(self.slots, starts - self.rereads, lengths + self.rereads),
            rereads=self.rereads,
            num_known=self.num_known_rows,
            saved=self.saved,
            tree=tree,
            adapted=adapted,
            prompts=self.prompts,
        )

    def asking_for(self, num_draft_tokens: Tensor, width: int) -> "DeviceBatch":
        """A copy with other numbers of draft tokens, at most `width`."""
        if self.exact:
            width = int(num_draft_tokens.max())
        return replace(self, num_draft_tokens=num_draft_tokens, width=width)
