"""Reading adapters, and bringing them to their slots beside running steps."""

from functools import cached_property
from pathlib import Path

import torch

from slipstream.layers.adapters import AdapterSlots
from slipstream.models.adapters import Adapter, read_adapter
from slipstream.runner.graphs import CAPTURING


class AdapterLoader:
    """What a thread beside the engine does with adapters."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots

    def read(self, path: str) -> Adapter:
        """The adapter in a directory, in the host's memory; CheckpointError where it cannot be
        used."""
        slots = self._slots
        return read_adapter(Path(path).expanduser(), slots.modules, slots.rank, slots.dtype)

    def write(self, slot: int, adapter: object) -> None:
        """Fill a slot that no row of a coming step names; returns when its numbers are there."""
        assert isinstance(adapter, Adapter)
        if self._slots.device.type != "cuda":
            self._slots.write(slot, adapter.factors)
            return
        with CAPTURING, torch.cuda.stream(self._stream):
            self._slots.write(slot, adapter.factors)
            self._stream.synchronize()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._slots.device)  # type: ignore[no-untyped-call]
