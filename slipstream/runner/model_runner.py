"""One pass of one model over rows of several requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.cache.kv_cache import KVCache
from slipstream.kernels.table import AttentionInputs
from slipstream.layers.embedding import LanguageModelHead
from slipstream.models.decoder import Decoder
from slipstream.runner.device_state import DeviceState


@dataclass(frozen=True, eq=False)
class Rows:
    """Which tokens a pass computes: for each request, `lengths` rows from `starts` on.

    Attributes:
        slots: [R] int64.
        starts: [R] int64, position of each request's first row.
        lengths: [R] int64.
        most: every request gets this many rows, of which those behind `lengths` write nothing and
            mean nothing; None lays out exactly `lengths`, for which the host waits.
    """

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    most: int | None


@dataclass(frozen=True, eq=False)
class Forward:
    """The result of a pass.

    Attributes:
        hidden: [T, hidden_size], after the final norm, request by request.
        first_row: [R] int64, of each request.
        lengths: [R] int64, rows that mean something.
        row_starts: `first_row` on the host, and T; empty where every request has as many rows.
    """

    hidden: Tensor
    first_row: Tensor
    lengths: Tensor
    row_starts: Sequence[int]

    def last(self) -> Tensor:
        """[R, hidden_size], each request's last row; of requests without rows some other's."""
        last = self.first_row + self.lengths - 1
        return self.hidden[last.clamp(0, len(self.hidden) - 1)]

    def ends(self, counts: Tensor, num_rows: int) -> Tensor:
        """[num_rows, hidden_size]: the last counts[r] rows of each request; `num_rows` in all."""
        request = torch.repeat_interleave(counts, output_size=num_rows)
        place = torch.arange(num_rows, device=counts.device) - (counts.cumsum(0) - counts)[request]
        first = self.first_row + self.lengths - counts
        return self.hidden[first[request] + place]


class ModelRunner:
    """Expands requests to flat rows, runs the network, and turns hidden states into logits.

    Args:
        head: in place of the network's own, one over some of its tokens.
    """

    def __init__(
        self,
        network: Decoder,
        cache: KVCache,
        state: DeviceState,
        head: LanguageModelHead | None = None,
    ) -> None:
        self._network, self._cache, self._state = network, cache, state
        self._head = head or network.head

    @torch.inference_mode()
    def forward(self, rows: Rows) -> Forward:
        """Compute `rows`, whose ids stand in the device state, and write their keys and values."""
        if rows.most is None:
            request, offset, first_row, row_starts = _ragged(rows.lengths)
        else:
            request, offset, first_row = _padded(len(rows.slots), rows.most, rows.slots.device)
            row_starts = []
        query_start = torch.cat((first_row, first_row.new_full((1,), len(request))))
        token_ids, inputs = self._expand(rows, request, offset, query_start, row_starts)
        hidden = self._network(token_ids, inputs, self._cache.layers)
        return Forward(hidden, first_row, rows.lengths, row_starts)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, vocab_size (of the head)] float32."""
        return self._head(hidden)

    def _expand(
        self,
        rows: Rows,
        request: Tensor,
        offset: Tensor,
        query_start: Tensor,
        row_starts: Sequence[int],
    ) -> tuple[Tensor, AttentionInputs]:
        """(token ids [T], where the rows stand), for row t = row `offset[t]` of `request[t]`."""
        state = self._state
        slots = rows.slots[request]
        real = offset < rows.lengths[request]
        positions = (rows.starts[request] + offset).clamp_max(state.max_model_len - 1)
        blocks = state.block_tables[slots, positions // state.block_size].long()
        places = blocks * state.block_size + positions % state.block_size
        most = rows.most
        if most is None:
            most = max(end - start for start, end in pairwise(row_starts))
        inputs = AttentionInputs(
            query_start=query_start,
            context_lens=rows.starts + rows.lengths,
            block_tables=state.block_tables[rows.slots],
            positions=positions,
            slots=torch.where(real, places, -1),
            max_rows=most,
        )
        return state.token_ids[slots, positions], inputs


def _ragged(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """(request [T], offset [T], first_row [R], row_starts): rows as they are; waits for them."""
    row_starts = [0]
    for length in lengths.tolist():
        row_starts.append(row_starts[-1] + length)
    first_row = lengths.cumsum(0) - lengths
    request = torch.repeat_interleave(lengths, output_size=row_starts[-1])
    offset = torch.arange(row_starts[-1], device=lengths.device) - first_row[request]
    return request, offset, first_row, row_starts


def _padded(requests: int, most: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(request [T], offset [T], first_row [R]) with `most` rows for every request."""
    row = torch.arange(requests * most, device=device)
    return row // most, row % most, torch.arange(requests, device=device) * most
