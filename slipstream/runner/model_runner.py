"""One pass of one model over rows of several requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.kv_cache import KVCache
from slipstream.kernels.table import AttentionInputs
from slipstream.layers.embedding import LanguageModelHead
from slipstream.models.decoder import Decoder
from slipstream.runner.device_state import DeviceState


@dataclass(frozen=True)
class Rows:
    """Which tokens a pass computes: for each request, `lengths` rows from `starts` on.

    Attributes:
        slots: [R] int64.
        starts: [R] int64, position of each request's first row.
        lengths: rows of each request, on the host.
    """

    slots: Tensor
    starts: Tensor
    lengths: Sequence[int]


@dataclass(frozen=True)
class Forward:
    """The result of a pass.

    Attributes:
        hidden: [T, hidden_size], after the final norm, request by request.
        row_starts: first row of each request, on the host; one more entry holds T.
    """

    hidden: Tensor
    row_starts: Sequence[int]


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
        token_ids, inputs, row_starts = self._expand(rows)
        hidden = self._network(token_ids, inputs, self._cache.layers)
        return Forward(hidden, row_starts)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, vocab_size (of the head)] float32."""
        return self._head(hidden)

    def _expand(self, rows: Rows) -> tuple[Tensor, AttentionInputs, list[int]]:
        state, device = self._state, self._state.device
        row_starts = [0]
        for length in rows.lengths:
            row_starts.append(row_starts[-1] + length)
        query_start = torch.tensor(row_starts, device=device)
        lengths = query_start.diff()
        request = torch.repeat_interleave(lengths, output_size=row_starts[-1])
        offset = torch.arange(row_starts[-1], device=device) - query_start[request]
        positions = rows.starts[request] + offset
        slots = rows.slots[request]
        blocks = state.block_tables[slots, positions // state.block_size].long()
        inputs = AttentionInputs(
            query_start=query_start,
            context_lens=rows.starts + lengths,
            block_tables=state.block_tables[rows.slots],
            positions=positions,
            slots=blocks * state.block_size + positions % state.block_size,
            max_rows=max(rows.lengths),
        )
        return state.token_ids[slots, positions], inputs, row_starts
