"""CUDA graphs of passes over a few hundred rows, among them prompts.

The host takes longer to launch the kernels of such a pass than the device takes to run them: 500
rows of Qwen3-8B take 15 ms on an H200, and their launches 50. So exact passes of up to `MOST_ROWS`
rows are padded to one of some sizes and replayed. The padding belongs to a last request that has no
context and writes nothing.
"""

import logging
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

logger = logging.getLogger("slipstream")

ROWS = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
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
        """The smallest of 2, 8, 32, 128 ... with room for one more: few, since each is captured for
        every number of rows."""
        return 1 << (requests.bit_length() | 1)


class _PagingBuffers:
    """The fixed tensors of a `Paging`.

    Args:
        requests: maximum number of requests, padding included.
        like: the paging of some pass.
    """

    def __init__(self, requests: int, like: Paging) -> None:
        self._slots = like.slots.new_zeros(MOST_ROWS)
        self._context_lens = like.context_lens.new_zeros(requests)
        self._tables = like.block_tables.new_zeros((requests, like.block_tables.shape[1]))

    def of(self, size: PassSize) -> Paging:
        """Views for a pass of this size."""
        tables, lengths = self._tables[: size.requests], self._context_lens[: size.requests]
        return Paging(tables, lengths, self._slots[: size.rows])

    def fill(self, size: PassSize, given: Paging | None) -> None:
        """Copy the paging, and pad it; None: all is padding."""
        rows = requests = 0
        if given is not None:
            rows, requests = len(given.slots), len(given.context_lens)
            self._slots[:rows].copy_(given.slots)
            self._context_lens[:requests].copy_(given.context_lens)
            self._tables[:requests].copy_(given.block_tables)
        self._slots[rows : size.rows].fill_(-1)
        self._context_lens[requests : size.requests].fill_(0)


class _Buffers:
    """The fixed tensors that graphs of all sizes read.

    Args:
        requests: maximum number of requests, padding included.
        like: the inputs of some pass.
    """

    def __init__(self, requests: int, like: PassInputs) -> None:
        positions, query_start = like.rows.positions, like.rows.query_start
        self.token_ids = positions.new_zeros(MOST_ROWS, dtype=torch.int32)
        self._positions = positions.new_zeros(MOST_ROWS)
        self._query_start = query_start.new_zeros(requests + 1)
        self._paging = _PagingBuffers(requests, like.paging)
        windowed = like.window_paging
        self._windowed = None if windowed is None else _PagingBuffers(requests, windowed)

    def inputs(self, size: PassSize) -> PassInputs:
        """The inputs of a pass of this size, views of the buffers."""
        places = self._query_start[: size.requests + 1], self._positions[: size.rows]
        windowed = None if self._windowed is None else self._windowed.of(size)
        rows = RowPlaces(*places, max_rows=size.rows)
        return PassInputs(rows, self._paging.of(size), window_paging=windowed)

    def fill(self, size: PassSize, token_ids: Tensor, inputs: PassInputs) -> None:
        """Copy a pass, and pad it."""
        rows, requests = len(token_ids), len(inputs.paging.context_lens)
        self.token_ids[:rows].copy_(token_ids)
        self._positions[:rows].copy_(inputs.rows.positions)
        self._query_start[:requests].copy_(inputs.rows.query_start[:requests])
        self._pad(size, rows, requests, inputs.paging, inputs.window_paging)

    def clear(self, size: PassSize) -> None:
        """Let a pass consist of padding."""
        self._pad(size, 0, 0, None, None)

    def _pad(
        self,
        size: PassSize,
        rows: int,
        requests: int,
        paging: Paging | None,
        windowed: Paging | None,
    ) -> None:
        self._query_start[requests : size.requests].fill_(rows)
        self._query_start[size.requests].fill_(size.rows)
        self._paging.fill(size, paging)
        if self._windowed is not None:
            self._windowed.fill(size, windowed)


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
        self._too_large = set[PassSize]()

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
            self._buffers = _Buffers(self._most_requests, inputs)
        if size not in self._graphs and not self._capture(size, self._buffers):
            return None
        self._buffers.fill(size, token_ids, inputs)
        hidden, streams = self._graphs[size](_nothing)
        # The next replay overwrites them.
        rows = len(token_ids)
        return hidden[:rows].clone(), [stream[:rows].clone() for stream in streams]

    def _capture(self, size: PassSize, buffers: _Buffers) -> bool:
        """Capture a size; False: there is no memory for its results, now or earlier."""
        if size in self._too_large:
            return False

        def call(between: Between) -> _Result:
            given = buffers.token_ids[: size.rows], buffers.inputs(size)
            return self._network(*given, self._cache.layers, self._stream_layers)

        buffers.clear(size)
        try:
            self._graphs[size] = self._record(call, _nothing)
        except torch.OutOfMemoryError:
            logger.warning("no memory to capture passes of %d rows: they are launched", size.rows)
            self._too_large.add(size)
            return False
        return True


def _nothing(value: Any) -> Any:
    return value


def _is_plain(inputs: PassInputs) -> bool:
    """Whether the buffers hold everything that the layers read."""
    others = (
        *(inputs.rows.places, inputs.adapters, inputs.states),
        *(inputs.layer_inputs, inputs.embedded, inputs.pooled_rows),
    )
    sees = inputs.sees
    simple = sees.causal and not sees.first_seen and sees.tree is None and sees.last_seen is None
    return simple and not inputs.prepared and all(it is None for it in others)
