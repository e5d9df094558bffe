"""CUDA graphs of passes over a few hundred rows, among them prompts, and of last checkpoints.

The host takes longer to launch the kernels of such a pass than the device takes to run them: 500
rows of Qwen3-8B take 15 ms on an H200, and their launches 50. So exact passes of up to `MOST_ROWS`
rows are padded to one of some sizes and replayed. The padding belongs to a last request that has no
context and writes nothing.

Whatever tensors a pass reads (those of `PassInputs`, and its tokens or features) are copied to
buffers, and whatever it returns is copied out of buffers. All sizes share these, so a graph has no
memory of its own besides its list of kernels.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.devices import upload
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.layers.delta_net import WaitingRows, waiting_inputs, waiting_rows
from slipstream.runner.graphs import Between, Recorder, pass_on

logger = logging.getLogger("slipstream")

ROWS = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
MOST_ROWS = ROWS[-1]
# A capture takes as long as three passes that are launched one by one.
WANTED_BEFORE_CAPTURE = 2
MOST_GRAPHS = 160  # of one kind of passes: each holds a list of hundreds of kernels

# Computes the inputs' rows, of which the other tensors have one entry each -> tensors likewise. It
# reads no other tensors, except those that always stay in their place, such as weights and caches.
Pass = Callable[..., Sequence[Tensor]]

_QUERY_START = "rows.query_start"
# The tensors of the inputs with one entry for each request; all others have one for each row.
_OF_REQUESTS = {
    *(_QUERY_START, "sees.tree.starts"),
    *("paging.block_tables", "window_paging.block_tables"),
    *("paging.context_lens", "window_paging.context_lens"),
    *("paging.shared.tokens", "paging.shared.members"),
    *("states.slots", "states.num_known", "states.pending", "states.save_at", "states.saved"),
}
# What padding has in them; in other tensors it has whatever was there.
_PADDING = {
    **{"paging.slots": -1, "window_paging.slots": -1, "adapters": -1},
    **{"paging.context_lens": 0, "window_paging.context_lens": 0},
    **{"paging.shared.tokens": 0, "paging.shared.members": 0},
    **{"states.num_known": 0, "states.pending": 0, "states.save_at": -1},
}


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
        """The smallest of 2, 3, 5, 9, 17 ... with room for one more. Attention divides the device
        among so many requests, so there should not be many more than have rows."""
        return 1 + (1 << (requests - 1).bit_length())


# A size, and which tensors the inputs have: their names and shapes without the first dimension.
_Key = tuple[PassSize, tuple[Any, ...]]


class CapturedPasses:
    """Passes of one kind, each captured when its size is wanted again.

    Args:
        call: computes a pass, from its inputs and then the other tensors that it reads.
        num_slots: number of slots of the device state; the last one is for padding.
        record: captures calls; its graphs are not those whose results a step still reads while
            these passes run.
    """

    def __init__(self, call: Pass, num_slots: int, record: Recorder) -> None:
        self._call, self._record = call, record
        self._most_requests = PassSize.padded(num_slots)
        self._padding = {**_PADDING, "states.slots": num_slots - 1, "states.saved": num_slots - 1}
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._results: list[Tensor] | None = None
        self._wanted = Counter[_Key]()
        self._graphs: dict[_Key, Callable[[Between], None]] = {}
        self._too_large = set[_Key]()

    def run(self, inputs: PassInputs, *given: Tensor) -> list[Tensor] | None:
        """What `call` returns for these exact rows; None: the pass is not captured."""
        rows, requests = len(given[0]), len(inputs.paging.context_lens)
        size = PassSize.of(rows, requests)
        # Ranks that share experts compute rows of each other.
        if size is None or inputs.pooled_rows is not None:
            return None
        key = size, _form(inputs, given)
        self._wanted[key] += 1
        if self._wanted[key] < WANTED_BEFORE_CAPTURE:
            return None
        if key not in self._graphs and not self._capture(key, inputs, given):
            return None
        self._fill(size, inputs, given, rows, requests)
        self._graphs[key](pass_on)
        # The next replay overwrites the buffers.
        return [result[:rows].clone() for result in self._results or ()]

    def _capture(self, key: _Key, inputs: PassInputs, given: Sequence[Tensor]) -> bool:
        """Capture passes like this one; False: there is no memory for it, or there are too many."""
        if key in self._too_large or len(self._graphs) >= MOST_GRAPHS:
            return False
        size = key[0]
        try:
            # Of padding alone: the pass itself would change recurrent states more than once.
            padding, own = self._fill(size, inputs, given, 0, 0)

            def call(between: Between) -> None:
                # A new copy of the inputs each time: none has prepared anything yet.
                results = self._call(replace(padding), *own)
                if self._results is None:
                    self._results = [it.new_empty((MOST_ROWS, *it.shape[1:])) for it in results]
                for kept, result in zip(self._results, results, strict=True):
                    kept[: size.rows].copy_(result)

            self._graphs[key] = self._record(call, pass_on)
        except torch.OutOfMemoryError:
            logger.warning("no memory to capture passes of %d rows: they are launched", size.rows)
            self._too_large.add(key)
            return False
        return True

    def _fill(
        self, size: PassSize, inputs: PassInputs, given: Sequence[Tensor], rows: int, requests: int
    ) -> tuple[PassInputs, list[Tensor]]:
        """Copy the first rows and requests of a pass to the buffers, and pad them to this size.
        Returns views of the buffers."""

        def padded(name: str, tensor: Tensor) -> Tensor:
            count, end, most = rows, size.rows, MOST_ROWS
            if name in _OF_REQUESTS:
                count, end, most = requests, size.requests, self._most_requests
            shape = tensor.shape[1:]
            buffer = self._buffers.get((name, shape))
            if buffer is None:
                buffer = self._buffers[name, shape] = tensor.new_zeros((most + 1, *shape))
            buffer[:count].copy_(tensor[:count])
            if name == _QUERY_START:  # all but the last request of padding have no rows
                buffer[count:end].fill_(rows)
                buffer[end].fill_(size.rows)
                return buffer[: end + 1]
            if name in self._padding:
                buffer[count:end].fill_(self._padding[name])
            return buffer[:end]

        views: PassInputs = _with_tensors(inputs, padded)
        views = replace(views, rows=replace(views.rows, max_rows=size.rows))
        return views, [padded(f"given {index}", it) for index, it in enumerate(given)]


def _form(inputs: PassInputs, given: Sequence[Tensor]) -> tuple[Any, ...]:
    """Which tensors a pass reads, and what else distinguishes it from others of its size."""
    found: list[tuple[str, torch.Size]] = []

    def note(name: str, tensor: Tensor) -> Tensor:
        found.append((name, tensor.shape[1:]))
        return tensor

    _with_tensors(inputs, note)
    sees = inputs.sees
    return sees.causal, sees.first_seen, *found, *(it.shape[1:] for it in given)


def _with_tensors(part: Any, give: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """A copy of a dataclass in which give(name, tensor) replaces every tensor."""
    changes = {}
    for it in fields(part):
        value, name = getattr(part, it.name), f"{path}{it.name}"
        if isinstance(value, Tensor):
            changes[it.name] = give(name, value)
        elif is_dataclass(value):
            changes[it.name] = _with_tensors(value, give, f"{name}.")
    return replace(part, **changes)


class CapturedSave:
    """A graph that writes the last checkpoint of an ended request, one at a time. The host takes
    longer to launch the kernels of all layers than the device to read the last tokens again.

    Each has `num_rows` rows: those that do not wait are of a slot of padding, in whose place the
    rest goes.

    Args:
        save: writes checkpoints.
        num_rows: the most rows that may wait in a slot.
        padding: a slot that no request has.
        record: captures the call of `save` when it is needed for the first time.
    """

    def __init__(
        self,
        save: Callable[[WaitingRows], None],
        num_rows: int,
        padding: int,
        device: torch.device,
        record: Recorder,
    ) -> None:
        self._save, self._num_rows, self._padding, self._record = save, num_rows, padding, record
        self._sizes = [len(it) for it in self._numbers(padding, 0, padding)]
        self._given = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self._graph: Callable[[Between], None] | None = None

    def __call__(self, slot: int, count: int, place: int) -> None:
        """Write the checkpoint at `place` with the first `count` rows that wait in a slot."""
        if self._graph is None:
            self._fill(self._padding, 0, self._padding)
            self._graph = self._record(lambda _: self._run(), pass_on)
        self._fill(slot, count, place)
        self._graph(pass_on)

    def _run(self) -> None:
        self._save(waiting_inputs(torch.split(self._given, self._sizes), self._num_rows))

    def _fill(self, slot: int, count: int, place: int) -> None:
        numbers = [it for part in self._numbers(slot, count, place) for it in part]
        self._given.copy_(upload(numbers, self._given.device))

    def _numbers(self, slot: int, count: int, place: int) -> list[list[int]]:
        counts = [count, self._num_rows - count]
        return [[*it] for it in waiting_rows([slot, self._padding], counts, [place, self._padding])]
