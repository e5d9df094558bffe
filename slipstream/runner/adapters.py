"""Reads LoRA adapters and copies them to their slots while steps run."""

from dataclasses import dataclass
from functools import cached_property

import torch

from slipstream.core.errors import UsageError
from slipstream.core.paths import user_path
from slipstream.layers.adapters import AdapterSlots
from slipstream.models.adapters import Adapter, read_adapter
from slipstream.runner.graphs import CAPTURING


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """A LoRA adapter in the host's memory.

    Attributes:
        draft: the adapter of the drafter; None: the drafter runs without one.
    """

    target: Adapter
    draft: Adapter | None = None


class AdapterLoader:
    """Loads adapters; called from a separate thread.

    Args:
        drafter: the drafter's slots, numbered like the target's; None if it takes no adapters.
    """

    def __init__(self, slots: AdapterSlots, drafter: AdapterSlots | None = None) -> None:
        self._slots, self._drafter = slots, drafter

    def read(self, path: str, draft_path: str | None = None) -> LoadedAdapter:
        """Read the target's adapter from one directory and the drafter's, if any, from another.

        Raises:
            CheckpointError: an adapter cannot be used.
            UsageError: the drafter takes no adapters.
        """
        if draft_path is None:
            return LoadedAdapter(_read(path, self._slots))
        if self._drafter is None:
            raise UsageError(
                "only draft models take adapters, of attention and feed-forward layers without "
                f"experts; leave the drafter's ({draft_path}) out"
            )
        return LoadedAdapter(_read(path, self._slots), _read(draft_path, self._drafter))

    def write(self, slot: int, adapter: object) -> None:
        """Copy a `LoadedAdapter` to a slot that no coming step uses, and wait for the copy."""
        if self._slots.device.type != "cuda":
            self.fill(slot, adapter)
            return
        with CAPTURING, torch.cuda.stream(self._stream):
            self.fill(slot, adapter)
            self._stream.synchronize()

    def fill(self, slot: int, adapter: object) -> None:
        """Copy a `LoadedAdapter` to a slot in the caller's stream, without waiting for it."""
        assert isinstance(adapter, LoadedAdapter)
        self._slots.write(slot, adapter.target.factors)
        if adapter.draft is not None:
            assert self._drafter is not None, "it was read for these slots"
            self._drafter.write(slot, adapter.draft.factors)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._slots.device)  # type: ignore[no-untyped-call]


def _read(path: str, slots: AdapterSlots) -> Adapter:
    return read_adapter(user_path(path), slots.modules, slots.rank, slots.dtype)
