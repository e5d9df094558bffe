"""The interface of batch preparation ops: small work between the models' passes.

In plain torch each op is about a dozen kernel launches, which would slow captured steps down; as
Triton kernels each is one launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces


@dataclass(frozen=True, eq=False)
class RequestTables:
    """What the device keeps of every slot.

    Attributes:
        token_ids: [S, L + 1] int32; writes without a place go to the last column.
        num_tokens, num_computed: [S] int64.
        block_tables: [S, max_blocks] int32.
        block_size: tokens in a block.
        window_column: where layers with a window have blocks of their own, the table of each slot
            is followed by one for them, as wide, from this column on; 0: there is none.
    """

    token_ids: Tensor
    num_tokens: Tensor
    num_computed: Tensor
    block_tables: Tensor
    block_size: int
    window_column: int = 0

    @property
    def last_position(self) -> int:
        return self.token_ids.shape[1] - 2

    @property
    def num_tables(self) -> int:
        """Tables of a slot: 2 with one for layers with a window."""
        return 2 if self.window_column else 1

    def inputs(
        self, rows: RowPlaces, own_tables: Tensor, context_lens: Tensor, slots: Tensor
    ) -> PassInputs:
        """The inputs of a pass.

        Args:
            own_tables: [R, max_blocks], rows of `block_tables`.
            context_lens: [R] int64.
            slots: [num_tables * T] int64, of the rows by each table.
        """
        column = self.window_column
        if not column:
            return PassInputs(rows, Paging(own_tables, context_lens, slots))
        own, windowed = slots.view(2, -1).unbind(0)
        return PassInputs(
            rows,
            Paging(own_tables[:, :column], context_lens, own),
            window_paging=Paging(own_tables[:, column:], context_lens, windowed),
        )


@dataclass(frozen=True, eq=False)
class PlacedRows:
    """The rows of a pass.

    Attributes:
        token_ids: [T] int32.
        inputs: where the rows stand; those behind a request's length write nothing.
        first_row, last_row: [R] int64, of each request; the last that means something, or some
            other's.
        request, offset: [T] int64, which request a row belongs to and its place among that
            request's rows; None where every request has as many rows.
        row_starts: `first_row` on the host, and T; empty where the host does not know.
    """

    token_ids: Tensor
    inputs: PassInputs
    first_row: Tensor
    last_row: Tensor
    request: Tensor | None = None
    offset: Tensor | None = None
    row_starts: Sequence[int] = ()


class ExpandRowsOp(Protocol):
    """`most` rows for each request: lengths[r] from position starts[r] on, then padding.

    A request without rows has no context either: `starts` may then lie beyond its block table.
    slots, starts, lengths [R] int64; T = R * most. With a `mask_token` the rows behind the known
    tokens hold that in place of what `token_ids` has there.

    With `num_rows`, at least the sum of `lengths` and below R * most, T = num_rows: each request
    has its rows, and what is left over is padding of the last ones, `most` rows at most each.
    """

    def __call__(
        self,
        tables: RequestTables,
        slots: Tensor,
        starts: Tensor,
        lengths: Tensor,
        most: int,
        mask_token: int | None = None,
        num_rows: int | None = None,
    ) -> PlacedRows: ...


class PlaceRowsOp(Protocol):
    """lengths[r] rows for each request, from position starts[r] on. The host waits for `lengths`,
    unless it has them already (`counts`).

    The first rereads[r] of them write nothing (None: no request has any). Else as `ExpandRowsOp`.
    """

    def __call__(
        self,
        tables: RequestTables,
        slots: Tensor,
        starts: Tensor,
        lengths: Tensor,
        rereads: Tensor | None = None,
        mask_token: int | None = None,
        counts: Sequence[int] = (),
    ) -> PlacedRows: ...


class AdvanceDraftsOp(Protocol):
    """Draft token number `index` of each request is known: where the next pass begins.

    Args:
        tables: `token_ids` get the token behind the known ones.
        slots, known, wanted: [R] int64: known tokens, and how many drafts are wanted.
        picked: [R] int64, indices into `vocabulary` [Vq] int64 where there is one.
        tokens: [R, K] int64; column `index` is filled.
        index: from 0.

    Returns:
        starts, lengths: [R] int64, of the next pass: one row where another draft is wanted.
    """

    def __call__(
        self,
        tables: RequestTables,
        slots: Tensor,
        known: Tensor,
        wanted: Tensor,
        picked: Tensor,
        vocabulary: Tensor | None,
        tokens: Tensor,
        index: int,
    ) -> tuple[Tensor, Tensor]: ...


class TrimDraftsOp(Protocol):
    """Gives the rows of a pass to the draft tokens that are the most likely to survive.

    The chance of a token is rates[i] * factors[r] / FACTOR_PARTS, at most 1, where i of N is the
    bin of its confidence (the last one if that is no number from 0 to 1); a token survives with the
    product of the chances up to it. Of equal ones earlier places come first, then earlier requests.
    So what a request keeps is a prefix of its chain, and whether it keeps a place depends on
    nothing behind it.

    Args:
        confidences: [R, K] float32.
        wanted: [R] int64, draft tokens of each request, at most K.
        factors: [R] int64.
        rates: [N] float32.
        known: [R] int64, rows of the pass that hold known tokens.
        num_rows: all rows of the pass.

    Returns:
        [R] int64, draft tokens that each request keeps.
    """

    def __call__(
        self,
        confidences: Tensor,
        wanted: Tensor,
        factors: Tensor,
        rates: Tensor,
        known: Tensor,
        num_rows: int,
    ) -> Tensor: ...


class WriteTokensOp(Protocol):
    """Write the first counts[r] of `tokens` [R, W] behind each request's known tokens.

    What stands behind those is tentative and may be written too: no token is lost.
    """

    def __call__(
        self, tables: RequestTables, slots: Tensor, tokens: Tensor, counts: Tensor
    ) -> None: ...


class CommitOp(Protocol):
    """Append a verdict's tokens and move the counters.

    Args:
        tables: token ids, known and computed tokens, of which the target has computed
            num_new[r] + accepted[r] more.
        slots, num_new: [R] int64.
        at_end: [R] bool; the others gain nothing, whatever the verdict.
        tokens: [R, W] int64.
        num_tokens, num_accepted: [R] int64.

    Returns:
        (num_tokens, num_accepted) of what was really gained.
    """

    def __call__(
        self,
        tables: RequestTables,
        slots: Tensor,
        num_new: Tensor,
        at_end: Tensor,
        tokens: Tensor,
        num_tokens: Tensor,
        num_accepted: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class KeepPathOp(Protocol):
    """Move what is cached of the accepted nodes of a tree to where a chain has it.

    Args:
        tables: for the block tables.
        slots, roots: [R] int64, which token of each request is the root of its tree.
        path: [R, W] int64: node path[r, i] becomes token roots[r] + i; it never rises by less
            than 1 from one i to the next.
        counts: [R] int64, below W: the last i that matters.
        pages: [P, num_blocks, block_size, Hk, D], contiguous.
        windowed: they are paged by the second table.
    """

    def __call__(
        self,
        tables: RequestTables,
        slots: Tensor,
        roots: Tensor,
        path: Tensor,
        counts: Tensor,
        pages: Tensor,
        windowed: bool = False,
    ) -> None: ...


class SuffixLookupOp(Protocol):
    """For each text: the tokens behind the latest occurrence of its longest known suffix.

    A suffix of `shortest` to `longest` tokens counts, the longest first; its occurrence needs one
    token behind it. When the occurrence overlaps the end, the text is taken to repeat itself.

    Args:
        token_ids: [S, L] int32.
        slots: [R] int64, rows of `token_ids`.
        known: [R] int64, tokens of each text, at most L.
        width: K.

    Returns:
        tokens [R, K] int64, and found [R] bool: whether there was an occurrence.
    """

    def __call__(
        self,
        token_ids: Tensor,
        slots: Tensor,
        known: Tensor,
        width: int,
        shortest: int,
        longest: int,
    ) -> tuple[Tensor, Tensor]: ...


class TimestampOp(Protocol):
    """A scalar int64 on `device`: nanoseconds of some clock when the device came here; 0 always
    where it has no clock."""

    def __call__(self, device: torch.device) -> Tensor: ...


@dataclass(frozen=True)
class PreparationOps:
    """One backend's implementations."""

    expand_rows: ExpandRowsOp
    place_rows: PlaceRowsOp
    advance_drafts: AdvanceDraftsOp
    trim_drafts: TrimDraftsOp
    write_tokens: WriteTokensOp
    commit: CommitOp
    keep_path: KeepPathOp
    suffix_lookup: SuffixLookupOp
    timestamp: TimestampOp
