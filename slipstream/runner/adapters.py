"""Reading adapters, and bringing them to their slots beside running steps."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from slipstream.core.errors import UsageError
from slipstream.layers.adapters import AdapterSlots
from slipstream.models.adapters import Adapter, read_adapter
from slipstream.runner.graphs import CAPTURING


@dataclass(frozen=True, eq=False)
class Loaded:
    """An adapter in the host's memory.

    Attributes:
        draft: for the drafter; None: it drafts as it is.
    """

    target: Adapter
    draft: Adapter | None = None


class AdapterLoader:
    """What a thread beside the engine does with adapters.

    Args:
        drafter: its slots, of which one belongs to each of the target's; None: it has none.
    """

    def __init__(self, slots: AdapterSlots, drafter: AdapterSlots | None = None) -> None:
        self._slots, self._drafter = slots, drafter

    def read(self, path: str, draft_path: str | None = None) -> Loaded:
        """The adapter in a directory, in the host's memory, and that of the drafter in another.

        Raises:
            CheckpointError: one of them cannot be used.
            UsageError: the drafter takes none.
        """
        if draft_path is None:
            return Loaded(_read(path, self._slots))
        if self._drafter is None:
            raise UsageError(
                "only draft models take adapters, of attention and feed-forward layers without "
                f"experts; leave the drafter's ({draft_path}) out"
            )
        return Loaded(_read(path, self._slots), _read(draft_path, self._drafter))

    def write(self, slot: int, adapter: object) -> None:
        """Fill a slot that no row of a coming step names; returns when its numbers are there."""
        if self._slots.device.type != "cuda":
            self.fill(slot, adapter)
            return
        with CAPTURING, torch.cuda.stream(self._stream):
            self.fill(slot, adapter)
            self._stream.synchronize()

    def fill(self, slot: int, adapter: object) -> None:
        """As `write`, in the stream of the caller."""
        assert isinstance(adapter, Loaded)
        self._slots.write(slot, adapter.target.factors)
        if adapter.draft is not None:
            assert self._drafter is not None, "it was read for these slots"
            self._drafter.write(slot, adapter.draft.factors)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._slots.device)  # type: ignore[no-untyped-call]


def _read(path: str, slots: AdapterSlots) -> Adapter:
    return read_adapter(Path(path).expanduser(), slots.modules, slots.rank, slots.dtype)
