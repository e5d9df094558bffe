"""A load of requests: a closed loop (fixed concurrency) or an open one (fixed rate)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

from slipstream.bench.datasets import BenchPrompt
from slipstream.bench.record import Record
from slipstream.core.errors import UsageError

Ask = Callable[[BenchPrompt, float | None], Awaitable[Record]]
_POLL_SECONDS = 0.05  # between checks for an interrupt by the user
_NOT_SENT = "not sent, because the turn before failed"


@dataclass(kw_only=True)
class LoadRun:
    """The results of a load.

    Attributes:
        records: of requests that ended, in the order of the prompts and their turns.
        later: prompts of later turns, by id.
        began, ended: seconds of the client's clock.
        num_left: requests that were running or not sent yet when the load was interrupted.
        most_at_once: the highest number of concurrent requests.
    """

    records: list[Record] = field(default_factory=list)
    later: dict[str, BenchPrompt] = field(default_factory=dict)
    began: float = 0.0
    ended: float = 0.0
    num_left: int = 0
    most_at_once: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def num_requests(prompts: Sequence[BenchPrompt]) -> int:
    """The number of requests, with all turns of all conversations."""
    return sum(1 + len(prompt.later_turns) for prompt in prompts)


async def run_load(
    ask: Ask,
    prompts: Sequence[BenchPrompt],
    *,
    due: Sequence[float] | None = None,
    most_at_once: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    advance: Callable[[Record], None] = lambda record: None,
) -> LoadRun:
    """Send all requests and wait for the last answer.

    A conversation counts as one concurrent request from its first turn to its last. Each turn is
    sent when the one before is answered; after a turn that failed, the later ones count as failed.

    Args:
        due: seconds from the start at which each request is due; None sends each as soon as
            `most_at_once` allows.
        most_at_once: maximum concurrent requests; None is no limit.
        stopped: once this returns true, nothing more is sent and running requests are cancelled.
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
        await asyncio.sleep(_POLL_SECONDS)


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
        self._done: dict[int, list[Record]] = {}
        self._under_way = 0
        now = perf_counter()
        self._run = LoadRun(began=now, ended=now)

    async def run(self) -> None:
        """Send all requests within one task group, so that cancelling this cancels them."""
        self._run.began = perf_counter()
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._prompts)):
                due = await self._wait_until_due(index)
                await self._places.acquire()
                group.create_task(self._one(index, due))

    def result(self) -> LoadRun:
        run = self._run
        run.records = [record for index in sorted(self._done) for record in self._done[index]]
        run.num_left = num_requests(self._prompts) - len(run.records)
        return run

    async def _wait_until_due(self, index: int) -> float | None:
        if self._due is None:
            return None
        due = self._run.began + self._due[index]
        left = due - perf_counter()
        if left > 0:
            await asyncio.sleep(left)
        return due

    async def _one(self, index: int, due: float | None) -> None:
        self._under_way += 1
        self._run.most_at_once = max(self._run.most_at_once, self._under_way)
        prompt: BenchPrompt | None = self._prompts[index]
        failed = False
        try:
            while prompt is not None:
                if failed:
                    record = Record(id=prompt.id, sent=perf_counter(), error=_NOT_SENT)
                else:
                    record = await self._ask(prompt, due)
                self._done.setdefault(index, []).append(record)
                self._run.ended = perf_counter()
                self._advance(record)
                failed, due = failed or record.failed, None
                prompt = prompt.after(record.text)
                if prompt is not None:
                    self._run.later[prompt.id] = prompt
        finally:
            self._under_way -= 1
            self._places.release()


def arrival_times(
    count: int, rate: float, burstiness: float = 1.0, seed: int = 0
) -> Sequence[float] | None:
    """Seconds from the start at which each request is due; None for an infinite rate.

    The gaps between requests have a gamma distribution with shape `burstiness`: 1 is a Poisson
    process, less is burstier, more is more regular. They are scaled so that the last request is
    due at (count - 1) / rate, so that the measured rate is the requested one.

    Args:
        rate: requests a second; infinite for a closed loop.

    Raises:
        UsageError: a rate or burstiness that is not a positive number.
    """
    import numpy

    if not rate > 0:
        raise UsageError(f"--request-rate must be above 0 (inf sends at once), not {rate:g}")
    if not (burstiness > 0 and burstiness != float("inf")):
        raise UsageError(f"--burstiness must be a number above 0, not {burstiness:g}")
    if rate == float("inf"):
        return None
    gaps = numpy.random.default_rng(seed).gamma(burstiness, 1 / burstiness, max(0, count - 1))
    ends = numpy.concatenate(([0.0], numpy.cumsum(gaps)))
    if ends[-1] > 0:
        ends *= (count - 1) / rate / ends[-1]
    return [float(end) for end in ends[:count]]
