"""The rows of a pass through a network: which tokens they are, and where they stand.

A pass has an exact number of rows for each request, which the host must wait for; or a number of
rows that the host knows before, so that it can be captured in a graph: as many for every request
(padded), or so many in all (packed). `DeviceBatch.rows` knows which, and whoever works on the rows
asks the `RowLayout` of the pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from slipstream.core.spans import Span, end_of_spans
from slipstream.kernels.pass_inputs import PassInputs, TreeInputs
from slipstream.runner.device_state import DeviceState
from slipstream.runner.excerpts import Excerpt
from slipstream.sampling.verification import TreeNodes

_ALL_VISIBLE = -1  # as the ancestors of a row: every bit is set


@dataclass(frozen=True, eq=False)
class TreeRows:
    """Some nodes of each request's tree, one row each.

    Node i is token roots + i of its request, and is kept there; its position is that of a text that
    ends with it, roots + its depth.

    Attributes:
        roots: [R] int64, which token of each request is node 0.
        first: the node of each request's first row; the others follow.
        drafted: [R] bool: the rows of other requests are known tokens, a causal chain.
    """

    nodes: TreeNodes
    roots: Tensor
    first: int
    drafted: Tensor

    def inputs(self, chain: "RowLayout") -> PassInputs:
        """The inputs of rows that were laid out as a chain."""
        request = chain.request
        node = (chain.offset + self.first).clamp_max(self.nodes.depths.shape[1] - 1)
        drafted = self.drafted[request]
        tokens = chain.inputs.rows.positions
        positions = self.roots[request] + self.nodes.depths[request, node]
        # A node has no smaller number than its depth; rows behind the last position stay there.
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
    """The rows of a request in a pass, tokens `first` to before `end`, which have to do with spans:
    with several axes also rows of text up to the last span do."""

    spans: Sequence[Span]
    first: int
    end: int

    @property
    def pieces(self) -> list[tuple[Span, int, int]]:
        """The spans among these rows, and which tokens of the request these are."""
        cut = [(it, max(it.start, self.first), min(it.end, self.end)) for it in self.spans]
        return [(span, first, end) for span, first, end in cut if first < end]


def prompt_rows(spans: Sequence[Span], first: int, end: int) -> PromptRows | None:
    """None where no image is among these rows or behind them."""
    return PromptRows(spans, first, end) if first < end_of_spans(spans) else None


@dataclass(frozen=True, eq=False)
class PassRows:
    """Which tokens a pass computes: for each request, `lengths` rows from `starts` on.

    Attributes:
        slots: [R] int64.
        starts: [R] int64, position of each request's first row.
        lengths: [R] int64.
        width: every request gets this many rows, of which those behind `lengths` write nothing and
            mean nothing; None: exactly `lengths`.
        total: in place of that, so many rows in all, with up to `width` for a request; those that
            `lengths` leave over are behind them. None: no such bound.
        rereads: [R] int64, leading rows of each request that write nothing, because the cache has
            them already and only their features are wanted; None: no request has any. Only of
            exact rows.
        num_known: [R] int64, leading rows of each request whose tokens stay whatever is refused;
            None: all. Only states of layers ask for it.
        saved: see `ModelCache.state_inputs`.
        mask_token: what rows behind the known tokens hold; None: what stands in the state.
        tree: of rows that are nodes of token trees; None where rows are a chain.
        prompts: of exact rows, what they have to do with images, per request; empty: nothing.
        excerpt: what the rows see, where that is not all; `starts` and the roots of trees are then
            places in it.
        adapted: some request has an adapter, through which its rows pass.
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


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Where the rows of a pass stand, request by request.

    Attributes:
        token_ids: [T] int32.
        inputs: for attention; rows behind a request's length write nothing.
        first_row: [R] int64, of each request.
        last_row: [R] int64, the last that means something; of requests without rows some other's.
        width: rows of every request where they are padded; None where they are exact or packed.
        row_starts: `first_row` on the host, and T, where rows are exact; else empty.
    """

    token_ids: Tensor
    inputs: PassInputs
    first_row: Tensor
    last_row: Tensor
    width: int | None
    row_starts: Sequence[int] = ()
    places: tuple[Tensor, Tensor] | None = None  # request and offset, where they are known already

    @property
    def num_requests(self) -> int:
        return self.first_row.shape[0]

    @property
    def is_empty(self) -> bool:
        """Whether it turned out that no request has a row."""
        return bool(self.row_starts) and not self.row_starts[-1]

    @property
    def is_single(self) -> bool:
        """Whether every request has exactly one row."""
        if self.row_starts:
            return [*self.row_starts] == [*range(self.num_requests + 1)]
        return self.width == 1

    @property
    def packed(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(`request`, `offset`, `first_row`) of packed rows; None where they are not."""
        if self.width is not None or self.row_starts:
            return None
        return self.request, self.offset, self.first_row

    @property
    def request(self) -> Tensor:
        """[T] int64, the request that each row belongs to."""
        return self._places[0]

    @property
    def offset(self) -> Tensor:
        """[T] int64, each row's place among the rows of its request."""
        return self._places[1]

    def of_requests(self, values: Tensor) -> Tensor:
        """values [R] -> [T], of each row's request."""
        if self.is_single:
            return values
        if self.width is not None:  # of one request, `flatten` would be a view with stride 0
            return values.unsqueeze(1).expand(-1, self.width).flatten().contiguous()
        return values[self.request]

    def spread(self, values: Tensor) -> Tensor:
        """values [R, W, ...], of each request's first W rows -> [T, ...], of every row."""
        if self.is_single:
            return values[:, 0]
        if self.width is not None:
            return values.flatten(0, 1)
        return values[self.request, self.offset]

    def collect(self, values: Tensor, width: int) -> Tensor:
        """values [T, ...] -> [R, width, ...]: each request's rows, of which it has `width` at most;
        zeros behind them."""
        if self.width is not None:
            return values.view(self.num_requests, width, *values.shape[1:])
        collected = values.new_zeros((self.num_requests, width, *values.shape[1:]))
        collected[self.request, self.offset] = values
        return collected

    def heads(self, values: Tensor, width: int) -> Tensor:
        """values [T, ...] -> [R, width, ...]: each request's first rows; behind them, some row."""
        if self.width == width:
            return values.view(self.num_requests, width, *values.shape[1:])
        place = torch.arange(width, device=self.first_row.device)
        return values[(self.first_row.unsqueeze(1) + place).clamp_max(len(values) - 1)]

    def last(self, values: Tensor) -> Tensor:
        """values [T, ...] -> [R, ...]: each request's last row."""
        return values if self.is_single else values[self.last_row]

    def over_last(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """`last` of what a function of single rows makes of values [T, ...], computed for few rows:
        requests whose chains have ended have none."""
        if self.row_starts and 0 < self.row_starts[-1] < self.num_requests:
            return self.last(function(values))
        return function(self.last(values))

    def tails(self, values: Tensor, counts: Tensor, width: int) -> Tensor:
        """values [T, ...] -> [R, width, ...]: the last counts[r] rows of each request, of which
        there are at most `width`; behind them, some row."""
        place = torch.arange(width, device=counts.device)
        first = self.last_row + 1 - counts
        return values[torch.minimum(first.unsqueeze(1) + place, self.last_row.unsqueeze(1))]

    def ends(self, values: Tensor, counts: Tensor) -> Tensor:
        """values [T, ...] -> [N, ...]: the last counts[r] rows of each request, one behind the
        other; all rows where they are padded or packed."""
        if not self.row_starts:
            return values
        num_rows = int(counts.sum())
        if num_rows == values.shape[0]:
            return values
        request = torch.repeat_interleave(counts, output_size=num_rows)
        place = torch.arange(num_rows, device=counts.device) - (counts.cumsum(0) - counts)[request]
        return values[(self.last_row + 1 - counts)[request] + place]

    def leading(self, counts: Tensor) -> Tensor | slice:
        """An index of the first counts[r] rows of each request; of all rows where they are padded
        or packed."""
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
    """The rows of a pass; waits to learn how many there are where they are exact.

    Args:
        windowed: of a network whose layers with a window have blocks of their own.
    """
    ops, excerpt = state.ops, rows.excerpt
    tables, own = (state.tables, rows.slots) if excerpt is None else (excerpt.tables, excerpt.rows)
    which = tables, own, rows.starts, rows.lengths
    if rows.width is None:
        placed = ops.place_rows(*which, rows.rereads, rows.mask_token)
    else:
        placed = ops.expand_rows(*which, rows.width, rows.mask_token, rows.total)
    request, offset = placed.request, placed.offset
    inputs = placed.inputs
    if inputs.window_paging is not None and not windowed:
        inputs = replace(inputs, window_paging=None)
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
    return replace(layout, inputs=inputs)
