"""One pass of one model over rows of several requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.cache.kv_cache import KVCache
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.preparation import PlacedRows, preparation_for
from slipstream.layers.embedding import LanguageModelHead
from slipstream.models.decoder import Decoder
from slipstream.runner.device_state import DeviceState
from slipstream.runner.tree_rows import TreeRows


@dataclass(frozen=True, eq=False)
class Rows:
    """Which tokens a pass computes: for each request, `lengths` rows from `starts` on.

    Attributes:
        slots: [R] int64.
        starts: [R] int64, position of each request's first row.
        lengths: [R] int64.
        rereads: [R] int64, leading rows of each request that write nothing, because the cache has
            them already and only their features are wanted; None: no request has any. Only where
            rows are laid out exactly.
        most: every request gets this many rows, of which those behind `lengths` write nothing and
            mean nothing; None lays out exactly `lengths`, for which the host waits.
        mask_token: what rows behind the known tokens hold; None: what stands in the state.
        tree: of rows that are nodes of token trees; None where rows are a chain.
    """

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    most: int | None
    rereads: Tensor | None = None
    mask_token: int | None = None
    tree: TreeRows | None = None


@dataclass(frozen=True, eq=False)
class Forward:
    """The result of a pass.

    Attributes:
        hidden: [T, hidden_size], after the final norm, request by request.
        first_row: [R] int64, of each request.
        last_row: [R] int64, the last that means something; of requests without rows some other's.
        streams: the residual streams that were asked for, each [T, hidden_size].
        row_starts: `first_row` on the host, and T; empty where every request has as many rows.
        inputs: where the rows stood.
    """

    hidden: Tensor
    first_row: Tensor
    last_row: Tensor
    row_starts: Sequence[int]
    streams: Sequence[Tensor] = ()
    inputs: PassInputs | None = None

    @property
    def places(self) -> Tensor:
        """[T] int64, where each row's keys and values went; -1 for nowhere."""
        assert self.inputs is not None
        return self.inputs.paging.slots

    def last(self) -> Tensor:
        """[R, hidden_size], each request's last row."""
        requests = self.last_row.shape[0]
        if self.hidden.shape[0] == requests and (
            not self.row_starts or [*self.row_starts] == [*range(requests + 1)]
        ):
            return self.hidden  # one row each
        return self.hidden[self.last_row]

    def ends(self, counts: Tensor, num_rows: int) -> Tensor:
        """[num_rows, hidden_size]: the last counts[r] rows of each request; `num_rows` in all."""
        if num_rows == self.hidden.shape[0]:
            return self.hidden
        request = torch.repeat_interleave(counts, output_size=num_rows)
        place = torch.arange(num_rows, device=counts.device) - (counts.cumsum(0) - counts)[request]
        first = self.last_row + 1 - counts
        return self.hidden[first[request] + place]

    def tails(self, counts: Tensor, width: int) -> Tensor:
        """[R, width, hidden_size]: the last counts[r] rows of each request, of which there are at
        most `width`; behind them, some row or other."""
        place = torch.arange(width, device=counts.device)
        first = self.last_row + 1 - counts
        rows = torch.minimum(first.unsqueeze(1) + place, self.last_row.unsqueeze(1))
        return self.hidden[rows]


def lay_out(state: DeviceState, rows: Rows) -> PlacedRows:
    """The rows of a pass; waits to learn how many there are where they are laid out exactly."""
    ops = preparation_for(state.device)
    which = state.tables, rows.slots, rows.starts, rows.lengths
    if rows.most is None:
        placed = ops.place_rows(*which, rows.rereads, rows.mask_token)
    else:
        placed = ops.expand_rows(*which, rows.most, rows.mask_token)
    if rows.tree is None:
        return placed
    inputs = rows.tree.inputs(placed.inputs, placed.request, placed.offset)
    return replace(placed, inputs=inputs)


class ModelRunner:
    """Expands requests to flat rows, runs the network, and turns hidden states into logits.

    Args:
        head: in place of the network's own, one over some of its tokens.
        stream_layers: layers whose incoming residual stream every pass keeps (`Forward.streams`).
    """

    def __init__(
        self,
        network: Decoder,
        cache: KVCache,
        state: DeviceState,
        head: LanguageModelHead | None = None,
        stream_layers: Sequence[int] = (),
    ) -> None:
        self._network, self._cache, self._state = network, cache, state
        self._head = head or network.head
        self._stream_layers = tuple(stream_layers)

    def forward(self, rows: Rows) -> Forward:
        """Compute `rows`, whose ids stand in the device state, and write their keys and values."""
        laid = lay_out(self._state, rows)
        hidden, streams = self._network(
            laid.token_ids, laid.inputs, self._cache.layers, self._stream_layers
        )
        return Forward(hidden, laid.first_row, laid.last_row, laid.row_starts, streams, laid.inputs)

    def keep_path(self, slots: Tensor, path: Tensor, counts: Tensor) -> None:
        """Of the trees that the last pass has read, keep the way from the root to an accepted node,
        where a chain would stand.

        Args:
            slots: [R] int64; the root is the last known token.
            path: [R, W] int64, the nodes of the way, the root (0) first.
            counts: [R] int64, how many follow the root; 0 also where there is no tree.
        """
        roots = self._state.num_tokens[slots] - 1
        keep = preparation_for(self._state.device).keep_path
        keep(self._state.tables, slots, roots, path, counts, self._cache.pages)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, vocab_size (of the head)] float32."""
        return self._head(hidden)
