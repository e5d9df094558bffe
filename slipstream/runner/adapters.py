"""Reads LoRA adapters and copies them to their slots while steps run."""

from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.paths import user_path
from slipstream.layers.adapters import AdapterSlots, Factors
from slipstream.models.adapters import Adapter, read_adapter
from slipstream.runner.graphs import CAPTURING

_PART_BYTES = 4 << 20  # what other ranks receive between two steps, in milliseconds


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """A LoRA adapter in the host's memory.

    Attributes:
        draft: the adapter of the drafter; None: the drafter runs without one.
    """

    target: Adapter
    draft: Adapter | None = None


@dataclass(frozen=True, eq=False)
class AdapterPart:
    """Some of the factors of an adapter.

    Attributes:
        of_drafter: they are of the drafter's adapter.
        begins: the first part of this network, with which the slot is cleared.
    """

    factors: Factors
    of_drafter: bool
    begins: bool


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
                f"this engine's drafter takes no adapters (docs/adapters.md has those that do); "
                f"leave the drafter's ({draft_path}) out"
            )
        adapter = _read(path, self._slots)
        try:
            return LoadedAdapter(adapter, _read(draft_path, self._drafter))
        except CheckpointError as error:
            raise CheckpointError(f"the drafter's adapter: {error}") from error

    def write(self, slot: int, adapter: object) -> None:
        """Copy a `LoadedAdapter` to a slot that no coming step uses, and wait for the copy."""
        if self._slots.device.type != "cuda":
            self._fill(slot, adapter)
            return
        with CAPTURING, torch.cuda.stream(self._stream):
            self._fill(slot, adapter)
            self._stream.synchronize()

    def _fill(self, slot: int, adapter: object) -> None:
        for part in _parts(adapter, inf):
            self.write_part(slot, part)

    def parts(self, adapter: object) -> list[AdapterPart]:
        """A `LoadedAdapter` in parts that are written in little time."""
        return _parts(adapter, _PART_BYTES)

    def write_part(self, slot: int, part: AdapterPart) -> None:
        """Copy a part to a slot in the caller's stream, without waiting for it."""
        slots = self._drafter if part.of_drafter else self._slots
        assert slots is not None, "it was read for these slots"
        slots.write(slot, part.factors, clear=part.begins)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._slots.device)  # type: ignore[no-untyped-call]


def _parts(adapter: object, most_bytes: float) -> list[AdapterPart]:
    assert isinstance(adapter, LoadedAdapter)
    parts: list[AdapterPart] = []
    for of_drafter, network in ((False, adapter.target), (True, adapter.draft)):
        if network is None:
            continue
        group: dict[str, tuple[Tensor, Tensor]] = {}
        groups, size = [group], 0
        for name, pair in network.factors.items():
            size += sum(it.nbytes for it in pair)
            if group and size > most_bytes:
                groups.append(group := {})
                size = sum(it.nbytes for it in pair)
            group[name] = pair
        parts += [AdapterPart(it, of_drafter, it is groups[0]) for it in groups]
    return parts


def _read(path: str, slots: AdapterSlots) -> Adapter:
    return read_adapter(user_path(path), slots)
