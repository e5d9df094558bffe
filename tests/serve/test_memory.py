"""Memory goes back while nothing runs, and only then."""

import asyncio
import gc
import os

import pytest

from slipstream.serve import memory


def test_it_is_given_back_once_behind_work_and_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(memory, "_INTERVAL", 0.001)
    monkeypatch.setattr(memory, "_from_c_library", lambda name: trims.append)
    state = {"idle": False, "work": 1}

    async def test() -> None:
        async def turns(expected: int) -> None:
            for _ in range(40):
                await asyncio.sleep(0.005)
            assert len(trims) == expected

        task = asyncio.create_task(
            memory.return_memory(lambda: bool(state["idle"]), lambda: state["work"])
        )
        await turns(0)
        state["idle"] = True
        await turns(1)
        state["work"] = 2
        await turns(2)
        task.cancel()

    asyncio.run(test())


def test_the_library_of_this_machine_can_be_asked() -> None:
    trim = memory._from_c_library("malloc_trim")
    assert trim is None or trim(0) in (0, 1)


def test_the_caches_of_matmuls_are_bounded_unless_somebody_said_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"LRU_CACHE_CAPACITY": "7"})
    memory.keep_few_matmuls()
    assert os.environ == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}


def test_a_collection_passes_by_what_was_there_when_serving_began() -> None:
    before = gc.get_freeze_count()
    kept: list[list[int]] = [[] for _ in range(10_000)]  # before which pytest froze all it had
    try:
        memory.freeze_garbage_collection()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()
