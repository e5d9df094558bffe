"""A CUDA graph that writes the last checkpoint of an ended request.

The host takes longer to launch the kernels of all layers one by one than the device takes to read
the request's last tokens again.
"""

from collections.abc import Callable

import torch

from slipstream.kernels.devices import upload
from slipstream.layers.delta_net import WaitingRows, waiting_inputs, waiting_rows
from slipstream.runner.graphs import Between, Recorder


class CapturedSave:
    """Writes one checkpoint at a time, in steps that all have `num_rows` rows: those that do not
    wait are of a slot of padding, in whose place the rest goes.

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
            self._graph = self._record(lambda _: self._run(), _nothing)
        self._fill(slot, count, place)
        self._graph(_nothing)

    def _run(self) -> None:
        self._save(waiting_inputs(torch.split(self._given, self._sizes), self._num_rows))

    def _fill(self, slot: int, count: int, place: int) -> None:
        numbers = [it for part in self._numbers(slot, count, place) for it in part]
        self._given.copy_(upload(numbers, self._given.device))

    def _numbers(self, slot: int, count: int, place: int) -> list[list[int]]:
        counts = [count, self._num_rows - count]
        return [[*it] for it in waiting_rows([slot, self._padding], counts, [place, self._padding])]


def _nothing(value: torch.Tensor) -> torch.Tensor:
    return value
