"""Loads adapters into slots, and decides which requests may run.

A request runs once its adapter is in a slot. If it is not, another thread loads it into the least
recently used slot whose adapter no running request has. Meanwhile later requests may start, and
steps continue.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count as _count
from typing import Any

from slipstream.core.adapters import NO_ADAPTER, NamedAdapter
from slipstream.core.errors import UsageError
from slipstream.core.request import Request

_WRITE_PART = "write a part of an adapter"
NOT_ENABLED = "this engine serves no adapters; start it with enable_lora (--enable-lora)"


@dataclass(frozen=True)
class OtherRanks:
    """How other ranks get an adapter: a part between two steps, so that no step waits for a whole
    one, and all parts before the first step that needs it.

    Attributes:
        parts: splits an adapter's numbers.
        write_part: writes a part to a slot.
        tell: has other ranks call a function of `Adapters.followed`.
    """

    parts: Callable[[object], Sequence[object]]
    write_part: Callable[[int, Any], None]
    tell: Callable[..., None]


@dataclass(eq=False)
class _Slot:
    """A slot for the numbers of one adapter.

    Attributes:
        adapter: the one that it holds, or that is being loaded.
        loading: not None until the adapter is loaded, here and on other ranks.
        unsent: its parts that other ranks do not have yet.
        used: when it was last used; -1: never.
    """

    adapter: NamedAdapter | None = None
    loading: Future[None] | None = None
    unsent: list[object] = field(default_factory=list)
    used: int = -1


class Adapters:
    """The LoRA adapters of an engine.

    Methods about slots are for the engine's thread, and those about names for one thread, which may
    be another. `read` is slow, and may be called by any thread.

    Args:
        count: number of slots; 0: the engine has no adapters.
        read: reads the numbers of an adapter from a directory and, if given, those of the drafter's
            from another; raises CheckpointError.
        write: writes an adapter's numbers to a slot that is not in use, in the loading thread.
        others: None: there are no other ranks.

    Attributes:
        followed: see `Step`.
    """

    def __init__(
        self,
        count: int = 0,
        read: Callable[[str, str | None], object] | None = None,
        write: Callable[[int, object], None] | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._read, self._write = read, write
        self._named: dict[str, NamedAdapter] = {}
        self._numbers, self._clock = _count(1), _count()
        self._loader: ThreadPoolExecutor | None = None
        self._others = others
        self.followed: Mapping[str, Callable[..., Any]] = {}
        if others is not None:
            self.followed = {_WRITE_PART: others.write_part}

    @property
    def names(self) -> list[str]:
        """The names of all adapters, the oldest first."""
        return list(self._named)

    def read(self, path: str, draft_path: str | None = None) -> object:
        """Read the numbers of an adapter; slow.

        Args:
            draft_path: the directory of the drafter's adapter; None: the drafter has none.

        Raises:
            UsageError: the engine takes no adapters, or its drafter takes none.
            CheckpointError: the adapter is broken or does not fit.
        """
        if self._read is None:
            raise UsageError(NOT_ENABLED)
        return self._read(path, draft_path)

    def add(self, name: str, factors: object, adapts_drafts: bool = False) -> NamedAdapter:
        """Register an adapter under a name; UsageError if the name is in use.

        Args:
            factors: the result of `read`.
            adapts_drafts: whether it has a part for the drafter.
        """
        if name in self._named:
            raise UsageError(
                f"there is an adapter {name!r} already; choose another name, or unload it"
            )
        made = self._named[name] = NamedAdapter(name, next(self._numbers), factors, adapts_drafts)
        return made

    def remove(self, name: str) -> None:
        """Remove a name; requests that have its adapter already run on with it."""
        self.named(name)
        del self._named[name]

    def named(self, name: str) -> NamedAdapter:
        """The adapter of this name; UsageError if there is none."""
        found = self._named.get(name)
        if found is None:
            known = ", ".join(self._named) or "none"
            raise UsageError(f"there is no adapter {name[:100]!r}; there is {known}")
        return found

    def slot_of(self, request: Request) -> int:
        """The slot of a running request's adapter."""
        if request.adapter is None:
            return NO_ADAPTER
        return next(i for i, it in enumerate(self._slots) if it.adapter is request.adapter)

    def next_ready(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        """The first waiting request whose adapter is loaded, or that has none.

        Begins to load the adapters of requests before it. If there is no slot for one of them,
        requests with adapters after it wait as well, so that none waits for ever.
        """
        in_use = {it.adapter for it in running if it.adapter is not None}
        full = False
        for request in waiting:
            adapter = request.adapter
            if adapter is None:
                return request
            if full:
                continue
            slot = self._holder(adapter) or self._take(adapter, in_use)
            full = slot is None
            if slot is not None and self._is_loaded(slot):
                slot.used = next(self._clock)
                return request
            in_use.add(adapter)
        return None

    def wait(self, seconds: float) -> None:
        """Wait until the next slot is loaded, with a timeout; called only if no request can run."""
        loading = [it.loading for it in self._slots if it.loading is not None]
        wait([it for it in loading if not it.done()], seconds, FIRST_COMPLETED)

    def _holder(self, adapter: NamedAdapter) -> _Slot | None:
        return next((it for it in self._slots if it.adapter is adapter), None)

    def _take(self, adapter: NamedAdapter, in_use: set[NamedAdapter]) -> _Slot | None:
        """Begin to load into a slot that no running request needs; None: there is none."""
        now = next(self._clock)
        for slot in self._slots:
            if slot.adapter in in_use:
                slot.used = now
        loading = [it for it in self._slots if it.loading is not None and not it.loading.done()]
        free = [it for it in self._slots if it.adapter not in in_use and it not in loading]
        if not free:
            return None
        slot = min(free, key=lambda it: it.used)
        assert self._write is not None
        if self._loader is None:
            self._loader = ThreadPoolExecutor(1, "adapters")
        # In this order, as an interrupt may come between any two: an empty slot is loaded again.
        slot.adapter = None
        place = self._slots.index(slot)
        if self._others is not None:
            slot.unsent = list(self._others.parts(adapter.factors))
        slot.loading = self._loader.submit(self._write, place, adapter.factors)
        slot.adapter = adapter
        return slot

    def _is_loaded(self, slot: _Slot) -> bool:
        if slot.loading is None:
            return True
        if slot.unsent:
            assert self._others is not None
            self._others.tell(_WRITE_PART, self._slots.index(slot), slot.unsent[0])
            del slot.unsent[0]  # sent again if an interrupt comes before this
        if slot.unsent or not slot.loading.done():
            return False
        try:
            slot.loading.result()
        except BaseException:
            slot.adapter = slot.loading = None
            slot.unsent = []
            raise
        slot.loading = None
        return True

    def check_invariants(self, running: Sequence[Request]) -> None:
        """Raise AssertionError unless these requests have their adapters, each in one slot."""
        held = [it.adapter for it in self._slots if it.adapter is not None]
        assert len(held) == len({*held}), "an adapter is in two slots"
        for request in running:
            if request.adapter is not None:
                slot = self._holder(request.adapter)
                there = slot is not None and slot.loading is None
                assert there, f"{request.request_id} runs without its adapter"
