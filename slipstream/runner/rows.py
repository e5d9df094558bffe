"""The rows of a pass through a network: their tokens and their layout.

There are three layouts. *Exact*: each request has as many rows as it needs; if drafts may be
shorter than planned, the host has to wait for the device to get their number. *Padded*: every
request has the same number of rows. *Packed*: there is a fixed number of rows for all requests
together. The host knows the sizes of padded and packed passes in advance, so these can be captured
in a CUDA graph. `DeviceBatch.rows` chooses the layout; other code uses the `RowLayout` of the pass,
which hides it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.spans import Span, end_of_spans
from slipstream.kernels.devices import upload
from slipstream.kernels.pass_inputs import PassInputs, SharedBlocks, TreeInputs
from slipstream.runner.device_state import DeviceState
from slipstream.runner.excerpts import Excerpt
from slipstream.sampling.verification import TreeNodes

_ALL_VISIBLE = -1  # `TreeInputs.ancestors` of a causal row: every bit is set


@dataclass(frozen=True, eq=False)
class TreeRows:
    """Some nodes of each request's token tree, one row each.

    Node i is stored as token roots + i of its request. Its position is roots + its depth, which is
    its position in the text that ends with it.

    Attributes:
        roots: [R] int64, the index of the token that is node 0.
        first: the node of each request's first row; the other rows are the next nodes.
        drafted: [R] bool, whether the request has a tree; otherwise its rows are a causal chain.
    """

    nodes: TreeNodes
    roots: Tensor
    first: int
    drafted: Tensor

    def inputs(self, chain: "RowLayout") -> PassInputs:
        """The inputs of the tree's pass, made from the inputs of a chain with equally many rows."""
        request = chain.request
        node = (chain.offset + self.first).clamp_max(self.nodes.depths.shape[1] - 1)
        drafted = self.drafted[request]
        tokens = chain.inputs.rows.positions
        positions = self.roots[request] + self.nodes.depths[request, node]
        # A node's number is at least its depth; positions are clamped to the last one.
        positions = torch.where(drafted, torch.minimum(positions, tokens), tokens)
        ancestors = torch.where(drafted, self.nodes.ancestors[request, node], _ALL_VISIBLE)
        inputs = chain.inputs
        return replace(
            inputs,
            rows=replace(inputs.rows, positions=positions),
            sees=replace(inputs.sees, tree=TreeInputs(self.roots, tokens, ancestors)),
        )


@dataclass(frozen=True, eq=False)
class PromptRows:
    """A request's rows in a pass, tokens `first` to before `end`, and the spans of its images."""

    spans: Sequence[Span]
    first: int
    end: int

    @property
    def pieces(self) -> list[tuple[Span, int, int]]:
        """The spans that overlap these rows, each with the range (start, end) of its rows."""
        cut = [(it, max(it.start, self.first), min(it.end, self.end)) for it in self.spans]
        return [(span, first, end) for span, first, end in cut if first < end]


def prompt_rows(spans: Sequence[Span], first: int, end: int) -> PromptRows | None:
    """The rows with their spans; None if no image overlaps these rows or precedes them."""
    return PromptRows(spans, first, end) if first < end_of_spans(spans) else None


class PassRows(NamedTuple):
    """The tokens that a pass computes: for each request, `lengths` rows from `starts` on. A tuple,
    since one is made for every pass of a draft.

    Attributes:
        slots: [R] int64.
        starts: [R] int64, position of each request's first row.
        lengths: [R] int64.
        width: padded rows: the number of rows of every request; those after `lengths` write nothing
            and are ignored. None: exact rows.
        total: packed rows: the number of rows of all requests, at most `width` for each; the last
            requests are padded. None: padded or exact rows.
        rereads: [R] int64, number of leading rows of each request that write nothing, since they
            are in the cache already and only their features are needed; None: 0 for all. Only for
            exact rows.
        num_known: [R] int64, number of leading rows of each request that are known tokens, not
            draft tokens; None: all. Only recurrent states need it.
        saved: see `ModelCache.state_inputs`.
        mask_token: the token of rows after the known ones; None: the token in the device state.
        tree: for rows that are nodes of token trees; None: rows are chains.
        prompts: for exact rows, the images of each request; empty: there are none.
        counts: for exact rows, `lengths` on the host, if they are known there; else empty.
        excerpt: the part of the context to which rows attend; `starts` and the roots of trees are
            then places within it. None: rows attend to all of it.
        adapted: some request has an adapter, which is applied to its rows.
        num_read: for exact rows, at most so many of the last rows of each request have their output
            read; None: all rows may.
        shared: blocks that some of the requests share; None: they are not known.
    """

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    width: int | None = None
    total: int | None = None
    rereads: Tensor | None = None
    num_known: Tensor | None = None
    saved: Tensor | None = None
    mask_token: int | None = None
    tree: TreeRows | None = None
    excerpt: Excerpt | None = None
    adapted: bool = False
    prompts: Sequence[PromptRows | None] = ()
    counts: Sequence[int] = ()
    num_read: int | None = None
    shared: SharedBlocks | None = None


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The request and the position of each row of a pass; rows are ordered by request.

    Attributes:
        token_ids: [T] int32.
        inputs: the inputs of the pass; padding rows write nothing.
        first_row: [R] int64, the first row of each request.
        last_row: [R] int64, the last row of each request before padding; undefined, but a valid
            row, for requests without rows.
        width: number of rows of every request, if padded; None: exact or packed.
        row_starts: for exact rows `first_row` and T, on the host; else empty.
        places: `request` and `offset`, if they are known already.
    """

    token_ids: Tensor
    inputs: PassInputs
    first_row: Tensor
    last_row: Tensor
    width: int | None
    row_starts: Sequence[int] = ()
    places: tuple[Tensor, Tensor] | None = None

    @property
    def num_requests(self) -> int:
        return self.first_row.shape[0]

    @property
    def is_empty(self) -> bool:
        """Whether no request has a row; False if the host does not know."""
        return bool(self.row_starts) and not self.row_starts[-1]

    @cached_property
    def num_each(self) -> int | None:
        """The number of rows of every request; None: they differ, or the host does not know."""
        if not self.row_starts:
            return self.width
        count = self.row_starts[-1] // max(1, self.num_requests)
        evenly = [it * count for it in range(len(self.row_starts))]
        return count if [*self.row_starts] == evenly else None

    @property
    def is_single(self) -> bool:
        """Whether every request has exactly one row."""
        return self.num_each == 1

    def judged(self, all_rows: bool) -> tuple[Tensor, Tensor, Tensor] | None:
        """(`request`, `offset`, `first_row`) of the rows whose logits are judged, if these are all
        rows and not equally many of each request; else None.

        Args:
            all_rows: whether they are all rows of exact passes; they are in others.
        """
        if self.width is not None or (self.row_starts and not all_rows):
            return None
        return *self._places, self.first_row

    @property
    def request(self) -> Tensor:
        """[T] int64, the request that each row belongs to."""
        return self._places[0]

    @property
    def offset(self) -> Tensor:
        """[T] int64, the index of each row among the rows of its request."""
        return self._places[1]

    def of_requests(self, values: Tensor) -> Tensor:
        """values [R] -> [T], for each row the value of its request."""
        if self.is_single:
            return values
        if self.width is not None:  # of one request, `flatten` would be a view with stride 0
            return values.unsqueeze(1).expand(-1, self.width).flatten().contiguous()
        return values[self.request]

    def with_adapters(self, slots: Tensor) -> "RowLayout":
        """The layout with the adapters of the rows, from the slot of each request's [R]."""
        return replace(self, inputs=replace(self.inputs, adapters=self.of_requests(slots)))

    def spread(self, values: Tensor) -> Tensor:
        """values [R, W, ...] of each request's first W rows or more -> [T, ...], row by row."""
        if self.is_single:
            return values[:, 0]
        if self.num_each is not None:
            return values[:, : self.num_each].flatten(0, 1)
        return values[self.request, self.offset]

    def collect(self, values: Tensor, width: int) -> Tensor:
        """values [T, ...] -> [R, width, ...]: the rows of each request, at most `width`, then
        zeros."""
        if self.width is not None:
            return values.view(self.num_requests, width, *values.shape[1:])
        collected = values.new_zeros((self.num_requests, width, *values.shape[1:]))
        collected[self.request, self.offset] = values
        return collected

    def heads(self, values: Tensor, width: int) -> Tensor:
        """values [T, ...] -> [R, width, ...]: each request's first rows; undefined after them."""
        if self.num_each == width:
            return values.view(self.num_requests, width, *values.shape[1:])
        place = torch.arange(width, device=self.first_row.device)
        return values[(self.first_row.unsqueeze(1) + place).clamp_max(len(values) - 1)]

    def last(self, values: Tensor) -> Tensor:
        """values [T, ...] -> [R, ...]: each request's last row."""
        return values if self.is_single else values.index_select(0, self.last_row)

    def over_last(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """`last(function(values))` for a function of single rows and values [T, ...], computed for
        the smaller number of rows: requests whose chains have ended have none."""
        if self.row_starts and 0 < self.row_starts[-1] < self.num_requests:
            return self.last(function(values))
        return function(self.last(values))

    def tails(self, values: Tensor, counts: Tensor, width: int, fill: bool = False) -> Tensor:
        """values [T, ...] -> [R, width, ...]: the last counts[r] rows of each request, at most
        `width`; undefined after them. With `fill` the host knows that all counts are `width`."""
        if fill and self.row_starts and self.num_each is not None:
            return values.view(self.num_requests, self.num_each, *values.shape[1:])[:, -width:]
        place = torch.arange(width, device=counts.device)
        first = self.last_row + 1 - counts
        return values[torch.minimum(first.unsqueeze(1) + place, self.last_row.unsqueeze(1))]

    def ends(self, values: Tensor, counts: Tensor) -> Tensor:
        """values [T, ...] -> [N, ...]: the last counts[r] rows of each request, concatenated; all
        rows if they are padded or packed."""
        if not self.row_starts:
            return values
        num_rows = int(counts.sum())
        if num_rows == values.shape[0]:
            return values
        request = torch.repeat_interleave(counts, output_size=num_rows)
        place = torch.arange(num_rows, device=counts.device) - (counts.cumsum(0) - counts)[request]
        return values[(self.last_row + 1 - counts)[request] + place]

    def read_rows(self, num_read: int | None) -> Tensor | None:
        """The last `num_read` rows of each request, [n] int64; None (all rows) if these are more
        than half of all rows, or if there is padding."""
        if num_read is None or not self.row_starts:
            return None
        if 2 * num_read * self.num_requests > self.row_starts[-1]:
            return None
        pairs = pairwise(self.row_starts)
        rows = [row for start, end in pairs for row in range(max(start, end - num_read), end)]
        return upload([rows], self.first_row.device)[0]

    def leading(self, counts: Tensor) -> Tensor | slice:
        """An index of the first counts[r] rows of each request; of all rows if they are padded or
        packed."""
        if not self.row_starts:
            return slice(None)
        request = torch.repeat_interleave(counts)
        place = torch.arange(len(request), device=counts.device)
        return self.first_row[request] + place - (counts.cumsum(0) - counts)[request]

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        if self.places is not None:
            return self.places
        assert self.width is not None
        row = torch.arange(self.token_ids.shape[0], device=self.first_row.device)
        return row // self.width, row % self.width


def lay_out(state: DeviceState, rows: PassRows, windowed: bool = False) -> RowLayout:
    """Lay out the rows of a pass; waits for the device if they are exact and not counted.

    Args:
        windowed: the network's layers with a sliding window have blocks of their own.
    """
    ops, excerpt = state.ops, rows.excerpt
    tables, own = (state.tables, rows.slots) if excerpt is None else (excerpt.tables, excerpt.rows)
    which = tables, own, rows.starts, rows.lengths
    if rows.width is None:
        placed = ops.place_rows(*which, rows.rereads, rows.mask_token, rows.counts)
    else:
        placed = ops.expand_rows(*which, rows.width, rows.mask_token, rows.total)
    request, offset = placed.request, placed.offset
    inputs = placed.inputs
    if inputs.window_paging is not None and not windowed:
        inputs = replace(inputs, window_paging=None)
    if rows.shared is not None and (excerpt is None or excerpt.skipped is None):
        inputs = replace(inputs, paging=replace(inputs.paging, shared=rows.shared))
    layout = RowLayout(
        placed.token_ids,
        inputs,
        placed.first_row,
        placed.last_row,
        rows.width if rows.total is None else None,
        placed.row_starts,
        None if request is None or offset is None else (request, offset),
    )
    inputs = layout.inputs if rows.tree is None else rows.tree.inputs(layout)
    if excerpt is not None and excerpt.skipped is not None:
        inputs = excerpt.inputs(inputs, layout.of_requests(excerpt.skipped))
    return layout if inputs is layout.inputs else replace(layout, inputs=inputs)
