"""Requests in a closed loop (so many at once) or an open one (so many a second)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

from slipstream.bench.datasets import BenchPrompt
from slipstream.bench.record import Record

Ask = Callable[[BenchPrompt, float | None], Awaitable[Record]]
_LOOK_EVERY = 0.05  # seconds, whether the user had enough


@dataclass(kw_only=True)
class LoadRun:
    """What a load did.

    Attributes:
        records: of requests that ended, in the order of the prompts.
        began, ended: seconds of the client's clock.
        num_left: requests that were under way or not sent yet when it was interrupted.
        most_at_once: the most requests under way.
    """

    records: list[Record] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    num_left: int = 0
    most_at_once: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began


async def run_load(
    ask: Ask,
    prompts: Sequence[BenchPrompt],
    *,
    due: Sequence[float] | None = None,
    most_at_once: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    advance: Callable[[Record], None] = lambda record: None,
) -> LoadRun:
    """Send everything and wait for the last answer.

    Args:
        due: seconds from the start at which each request is due; None sends as places get free.
        most_at_once: places; None for as many as there are requests.
        stopped: once this is true, nothing more is sent and what is under way is given up.
        advance: called with every request that ended.
    """
    load = _Load(ask, prompts, due, most_at_once, advance)
    work = asyncio.create_task(load.run())
    watch = asyncio.create_task(_watch(stopped))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (watch, work):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    return load.result()


async def _watch(stopped: Callable[[], bool]) -> None:
    while not stopped():
        await asyncio.sleep(_LOOK_EVERY)


class _Load:
    def __init__(
        self,
        ask: Ask,
        prompts: Sequence[BenchPrompt],
        due: Sequence[float] | None,
        most_at_once: int | None,
        advance: Callable[[Record], None],
    ) -> None:
        self._ask, self._prompts, self._due, self._advance = ask, prompts, due, advance
        self._places = asyncio.Semaphore(most_at_once or max(1, len(prompts)))
        self._done: dict[int, Record] = {}
        self._under_way = self._most = 0
        self._began = self._ended = perf_counter()

    async def run(self) -> None:
        """Within a group: whoever gives this up gives up what is under way."""
        self._began = perf_counter()
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._prompts)):
                due = await self._wait_until_due(index)
                await self._places.acquire()
                group.create_task(self._one(index, due))

    def result(self) -> LoadRun:
        return LoadRun(
            records=[self._done[index] for index in sorted(self._done)],
            began=self._began,
            ended=self._ended,
            num_left=len(self._prompts) - len(self._done),
            most_at_once=self._most,
        )

    async def _wait_until_due(self, index: int) -> float | None:
        if self._due is None:
            return None
        due = self._began + self._due[index]
        left = due - perf_counter()
        if left > 0:
            await asyncio.sleep(left)
        return due

    async def _one(self, index: int, due: float | None) -> None:
        self._under_way += 1
        self._most = max(self._most, self._under_way)
        try:
            record = await self._ask(self._prompts[index], due)
        finally:
            self._under_way -= 1
            self._places.release()
        self._done[index] = record
        self._ended = perf_counter()
        self._advance(record)
