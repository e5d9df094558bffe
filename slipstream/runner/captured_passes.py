"""CUDA graphs of passes over a few hundred rows, among them prompts.

The host takes longer to launch the kernels of such a pass than the device takes to run them: 512
rows of Qwen3-8B take 10 ms on an H200, and their launches 60. So exact passes of up to `MOST_ROWS`
rows are padded to one of some sizes and replayed. The padding belongs to a last request that has no
context and writes nothing.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.cache.spec import ModelCache
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces
from slipstream.models.decoder import Decoder
from slipstream.runner.graphs import Between, Recorder

ROWS = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
MOST_ROWS = ROWS[-1]
# A capture takes as long as three passes that are launched one by one.
WANTED_BEFORE_CAPTURE = 2

_Result = tuple[Tensor, list[Tensor]]


@dataclass(frozen=True)
class PassSize:
    """Rows and requests of a graph, both with padding."""

    rows: int
    requests: int

    @classmethod
    def of(cls, rows: int, requests: int) -> "PassSize | None":
        """The smallest size with room for these and a request of padding; None: there is none."""
        if not 0 < rows <= MOST_ROWS:
            return None
        return cls(next(it for it in ROWS if it >= rows), cls.padded(requests))

    @staticmethod
    def padded(requests: int) -> int:
        """The smallest power of two with room for one more."""
        return 1 << requests.bit_length()


class _Buffers:
    """The fixed tensors that graphs of all sizes read.

    Args:
        requests: maximum number of requests, padding included.
        table: a row of a block table.
    """

    def __init__(self, requests: int, table: Tensor) -> None:
        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=table.device)

        self.token_ids = numbers(MOST_ROWS, dtype=torch.int32)
        self.positions, self.slots = numbers(MOST_ROWS), numbers(MOST_ROWS)
        self.query_start, self.context_lens = numbers(requests + 1), numbers(requests)
        self.tables = numbers(requests, len(table), dtype=table.dtype)

    def inputs(self, size: PassSize) -> PassInputs:
        """The inputs of a pass of this size, views of the buffers."""
        rows, requests = size.rows, size.requests
        places = self.query_start[: requests + 1], self.positions[:rows]
        paged = self.tables[:requests], self.context_lens[:requests], self.slots[:rows]
        return PassInputs(RowPlaces(*places, max_rows=rows), Paging(*paged))

    def clear(self, size: PassSize) -> None:
        """Let a pass consist of padding."""
        self._pad(size, 0, 0)

    def fill(self, size: PassSize, token_ids: Tensor, inputs: PassInputs) -> None:
        """Copy a pass, and pad it."""
        rows, requests = len(token_ids), len(inputs.paging.context_lens)
        self.token_ids[:rows].copy_(token_ids)
        self.positions[:rows].copy_(inputs.rows.positions)
        self.slots[:rows].copy_(inputs.paging.slots)
        self.query_start[: requests + 1].copy_(inputs.rows.query_start)
        self.context_lens[:requests].copy_(inputs.paging.context_lens)
        self.tables[:requests].copy_(inputs.paging.block_tables)
        self._pad(size, rows, requests)

    def _pad(self, size: PassSize, rows: int, requests: int) -> None:
        self.slots[rows : size.rows].fill_(-1)
        self.query_start[requests : size.requests].fill_(rows)
        self.query_start[size.requests].fill_(size.rows)
        self.context_lens[requests : size.requests].fill_(0)


class CapturedPasses:
    """Passes of a network over its caches, each captured when its size is wanted again.

    Args:
        most_requests: maximum number of requests of a pass.
        record: captures calls; its graphs are not those whose results a step still reads while the
            network runs.
    """

    def __init__(
        self,
        network: Decoder,
        cache: ModelCache,
        stream_layers: Sequence[int],
        most_requests: int,
        record: Recorder,
    ) -> None:
        self._network, self._cache, self._record = network, cache, record
        self._stream_layers = stream_layers
        self._most_requests = PassSize.padded(most_requests)
        self._buffers: _Buffers | None = None
        self._wanted = Counter[PassSize]()
        self._graphs: dict[PassSize, Callable[[Between], _Result]] = {}

    def run(self, token_ids: Tensor, inputs: PassInputs) -> _Result | None:
        """What the network returns for these exact rows; None: the pass is not captured."""
        requests = len(inputs.paging.context_lens)
        size = PassSize.of(len(token_ids), requests) if _is_plain(inputs) else None
        if size is None:
            return None
        self._wanted[size] += 1
        if self._wanted[size] < WANTED_BEFORE_CAPTURE:
            return None
        if self._buffers is None:
            self._buffers = _Buffers(self._most_requests, inputs.paging.block_tables[0])
        if size not in self._graphs:
            self._buffers.clear(size)
            self._graphs[size] = self._captured(size, self._buffers)
        self._buffers.fill(size, token_ids, inputs)
        hidden, streams = self._graphs[size](_nothing)
        # The next replay overwrites them.
        rows = len(token_ids)
        return hidden[:rows].clone(), [stream[:rows].clone() for stream in streams]

    def _captured(self, size: PassSize, buffers: _Buffers) -> "Callable[[Between], _Result]":
        def call(between: Between) -> _Result:
            given = buffers.token_ids[: size.rows], buffers.inputs(size)
            return self._network(*given, self._cache.layers, self._stream_layers)

        return self._record(call, _nothing)


def _nothing(value: Any) -> Any:
    return value


def _is_plain(inputs: PassInputs) -> bool:
    """Whether the buffers hold everything that the layers read."""
    others = (
        *(inputs.rows.places, inputs.adapters, inputs.window_paging, inputs.states),
        *(inputs.layer_inputs, inputs.embedded, inputs.pooled_rows),
    )
    sees = inputs.sees
    simple = sees.causal and not sees.first_seen and sees.tree is None and sees.last_seen is None
    return simple and not inputs.prepared and all(it is None for it in others)
