"""How ranks open each other's memory, with a driver that only counts."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any

import pytest
import torch

from slipstream.kernels.inboxes import Inboxes
from slipstream.runner.collectives import open_store
from slipstream.runner.peer_memory import connect_inboxes

SIZE, CONTEXT = 3, 0x7F00DEAD0000
CPU = torch.device("cpu")


class Driver:
    """Hands out addresses; a handle has the address in its first bytes. Memory that another process
    has opened is 1 further on.

    Attributes:
        out_of_reach: the address that cannot be opened.
    """

    def __init__(self) -> None:
        self.given: list[int] = []
        self.freed: list[int] = []
        self.closed: list[int] = []
        self.out_of_reach = 0
        self._contexts = local()

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = CONTEXT
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> None:  # noqa: N802
        self._contexts.pushed = context.value

    def cuCtxPopCurrent_v2(self, context: Any) -> None:  # noqa: N802
        del self._contexts.pushed

    def cuMemAlloc_v2(self, address: Any, room: Any) -> int:  # noqa: N802
        address._obj.value = (len(self.given) + 1) << 12
        self.given.append(address._obj.value)
        return 0

    def cuMemsetD8_v2(self, *arguments: Any) -> int:  # noqa: N802
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:  # noqa: N802
        ctypes.memmove(ctypes.byref(handle._obj), ctypes.byref(address), 8)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        found = int.from_bytes(bytes(handle.reserved)[:8], "little")
        address._obj.value = found + 1
        return 217 if found == self.out_of_reach else 0

    def cuMemFree_v2(self, address: Any) -> None:  # noqa: N802
        assert self._contexts.pushed == CONTEXT
        self.freed.append(address.value)

    def cuIpcCloseMemHandle(self, address: Any) -> None:  # noqa: N802
        assert self._contexts.pushed == CONTEXT
        self.closed.append(address.value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return made


def connected() -> list[Inboxes | None]:
    first = open_store(0, SIZE, leads=True)
    stores = [first, *(open_store(first.port, SIZE, leads=False) for _ in range(SIZE - 1))]

    def connect(rank: int) -> Inboxes | None:
        return connect_inboxes(stores[rank], rank, SIZE, CPU)

    with ThreadPoolExecutor(SIZE) as ranks:
        return list(ranks.map(connect, range(SIZE)))


def test_each_rank_has_the_memory_of_all(driver: Driver) -> None:
    inboxes = connected()
    own = [it.addresses[it.rank] for it in inboxes if it is not None]
    assert sorted(own) == driver.given
    assert [it and it.addresses for it in inboxes] == [
        [address + (rank != other) for other, address in enumerate(own)] for rank in range(SIZE)
    ]
    assert not driver.freed
    del inboxes
    assert sorted(driver.freed) == driver.given, "with the inboxes their memory goes"
    assert len(driver.closed) == SIZE * (SIZE - 1)


def test_where_one_does_not_reach_another_none_has_inboxes(driver: Driver) -> None:
    driver.out_of_reach = 1 << 12
    assert connected() == [None] * SIZE
    assert sorted(driver.freed) == driver.given


def test_a_channel_is_not_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counter would start again with each replay."""
    device, ended = torch.device("cuda"), torch.zeros(1, dtype=torch.int32)
    inboxes = Inboxes(0, 2, [0, 1 << 20], 1 << 20, device, ended, 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(AssertionError, match="is run once before it is captured"):
        inboxes.channel(1, 8, 4)


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name} is not there")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert connected() == [None] * SIZE
