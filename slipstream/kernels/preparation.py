"""The interface of the ops that prepare batches between the models' passes.

In plain torch each op is about a dozen kernel launches, which would slow captured steps down; the
Triton backend needs one launch for each.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces


@dataclass(frozen=True, eq=False)
class RequestTables:
    """The device's state of requests, by slot.

    Attributes:
        token_ids: [S, L + 1] int32; column L receives writes that are beyond the last position.
        num_tokens, num_computed: [S] int64, known and computed tokens.
        block_tables: [S, max_blocks] int32.
        block_size: tokens in a block.
        window_column: if layers with a window have their own blocks, `block_tables` has a second
            table, of equal width, which begins at this column; 0: there is none.
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
        """Number of block tables of a slot: 2 if layers with a window have their own, else 1."""
        return 2 if self.window_column else 1

    def inputs(
        self, rows: RowPlaces, own_tables: Tensor, context_lens: Tensor, slots: Tensor
    ) -> PassInputs:
        """The inputs of a pass over these rows.

        Args:
            own_tables: [R, max_blocks], the rows of `block_tables` for the requests of the pass.
            context_lens: [R] int64, see `Paging`.
            slots: [num_tables * T] int64, the cache slots of the rows by each block table.
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


class PlacedRows(NamedTuple):
    """The rows of a pass; a tuple, since one is made for every pass of a draft.

    Attributes:
        token_ids: [T] int32.
        inputs: the inputs of the pass; padding rows write nothing to the cache.
        first_row, last_row: [R] int64, of each request, without padding; for a request without
            rows, any row.
        request, offset: [T] int64, the request of each row and the row's index among the rows of
            that request; None: all requests have equally many rows.
        row_starts: `first_row` and T on the host; empty if the host does not know them.
    """

    token_ids: Tensor
    inputs: PassInputs
    first_row: Tensor
    last_row: Tensor
    request: Tensor | None = None
    offset: Tensor | None = None
    row_starts: Sequence[int] = ()


class PreparationOps(ABC):
    """One backend's ops for preparing batches."""

    @abstractmethod
    def expand_rows(
        self,
        tables: RequestTables,
        slots: Tensor,
        starts: Tensor,
        lengths: Tensor,
        most: int,
        mask_token: int | None = None,
        num_rows: int | None = None,
    ) -> PlacedRows:
        """Place `most` rows for each request: lengths[r] rows from position starts[r] on, then
        padding.

        slots, starts, lengths [R] int64; T = R * most. A request of length 0 has no context, so its
        start may be beyond its block table. With a `mask_token`, rows at positions beyond the known
        tokens have that token instead of the one in `token_ids`.

        With `num_rows`, which is at least the sum of `lengths` and below R * most, rows are packed:
        T = num_rows, and the last requests are padded, to at most `most` rows each.
        """

    @abstractmethod
    def place_rows(
        self,
        tables: RequestTables,
        slots: Tensor,
        starts: Tensor,
        lengths: Tensor,
        rereads: Tensor | None = None,
        mask_token: int | None = None,
        counts: Sequence[int] = (),
    ) -> PlacedRows:
        """Place lengths[r] rows for each request, from position starts[r] on, without padding. The
        host waits for `lengths`, unless it knows them (`counts`).

        The first rereads[r] rows of a request write nothing to the cache (None: all rows write).
        Other arguments as in `expand_rows`.
        """

    @abstractmethod
    def advance_drafts(
        self,
        tables: RequestTables,
        slots: Tensor,
        known: Tensor,
        wanted: Tensor,
        picked: Tensor,
        vocabulary: Tensor | None,
        tokens: Tensor,
        index: int,
    ) -> tuple[Tensor, Tensor]:
        """Store draft token number `index` of each request, and compute the rows of the next pass.

        Args:
            tables: `token_ids` receive the token at position known[r] + index.
            slots, known, wanted: [R] int64, slots, numbers of known tokens, and numbers of draft
                tokens that are wanted.
            picked: [R] int64, the drafted tokens, as indices into `vocabulary` [Vq] int64 if there
                is one.
            tokens: [R, K] int64; column `index` receives the tokens.
            index: from 0.

        Returns:
            starts, lengths: [R] int64, the rows of the next pass: one for each request that wants
            another draft token.
        """

    @abstractmethod
    def trim_drafts(
        self,
        confidences: Tensor,
        wanted: Tensor,
        factors: Tensor,
        rates: Tensor,
        known: Tensor,
        num_rows: int,
    ) -> Tensor:
        """Keep the draft tokens that are most likely to be accepted, as many as a pass has rows
        for.

        The estimated probability that a token is accepted after those before it is
        rates[i] * factors[r] / FACTOR_PARTS, at most 1, where i of N is the bin of its confidence
        (the last bin if the confidence is not in [0, 1)). Tokens are ranked by the product of these
        probabilities up to the token; ties are won by the earlier place in the chain, then by the
        earlier request. So each request keeps a prefix of its chain, and whether a token is kept
        does not depend on later tokens of its chain.

        Args:
            confidences: [R, K] float32.
            wanted: [R] int64, number of draft tokens of each request, at most K.
            factors: [R] int64.
            rates: [N] float32.
            known: [R] int64, number of rows of each request for known tokens.
            num_rows: number of rows of the pass.

        Returns:
            [R] int64, number of draft tokens that each request keeps.
        """

    @abstractmethod
    def write_tokens(
        self, tables: RequestTables, slots: Tensor, tokens: Tensor, counts: Tensor
    ) -> None:
        """Write the first counts[r] of `tokens` [R, W] after each request's known tokens.

        Positions after these may be overwritten too, since they have no known tokens.
        """

    @abstractmethod
    def commit(
        self,
        tables: RequestTables,
        slots: Tensor,
        num_new: Tensor,
        at_end: Tensor,
        tokens: Tensor,
        num_tokens: Tensor,
        num_accepted: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Append the tokens of a verification to the requests, and update their counters.

        Args:
            tables: `num_computed` grows by num_new[r] + num_accepted[r], `num_tokens` by
                num_tokens[r].
            slots: [R] int64.
            num_new: [R] int64, number of known tokens that the target has computed in this step.
            at_end: [R] bool, whether the request's known tokens are all computed; others get no
                tokens.
            tokens: [R, W] int64.
            num_tokens, num_accepted: [R] int64, results of verification (`VerifyOp`).

        Returns:
            `num_tokens` and `num_accepted`, with 0 for requests that are not `at_end`.
        """

    @abstractmethod
    def pack_results(
        self,
        tokens: Tensor,
        largest: Tensor,
        more: Tensor | None,
        counts: Sequence[Tensor],
        times: Sequence[Tensor | int],
    ) -> Tensor:
        """Join the results of a step, so that one copy brings them to the host.

        Args:
            tokens: [R, W] int64.
            largest: [R, W] float32.
            more: [R, n], float32 or int64; None: n is 0.
            counts: five [R] int64.
            times: four numbers, or four scalars int64 on the device; see `timestamp`.

        Returns:
            [R, 2 W + n + 9] int64: all of these, in this order; of float32 numbers the bits.
        """

    @abstractmethod
    def keep_path(
        self,
        tables: RequestTables,
        slots: Tensor,
        roots: Tensor,
        path: Tensor,
        counts: Tensor,
        pages: Tensor,
        windowed: bool = False,
    ) -> None:
        """Move the cached keys and values of a tree's accepted nodes to the places of a chain.

        Args:
            tables: has the block tables.
            slots: [R] int64.
            roots: [R] int64, the position of the root of each request's tree.
            path: [R, W] int64: node path[r, i] becomes token roots[r] + i; strictly increasing in
                i.
            counts: [R] int64, below W: the last i that is moved.
            pages: [P, num_blocks, block_size, Hk, D], contiguous.
            windowed: use the second block table, for layers with a window.
        """

    @abstractmethod
    def timestamp(self, device: torch.device) -> Tensor | int:
        """Record the time when the device reaches this op, in nanoseconds of a clock: a scalar
        int64 on `device`, always 0 if the device has no clock; on a CPU a number."""
