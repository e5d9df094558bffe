"""Finds the request that makes steps fail, by running requests one by one after a failure."""

from collections.abc import Sequence

from slipstream.core.request import Request
from slipstream.engine.invariants import order
from slipstream.engine.scheduler import Scheduler


class Isolation:
    """Runs requests one at a time until it is known which of them makes steps fail.

    When a step fails, all requests are set aside. Those that took part run one at a time, each
    alone, until it has made a step's progress: noise is keyed by request, so it repeats the same
    step. If a request's step fails while it runs alone, it is to blame. Once that one is found, or
    all have been tried, the others come back together.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set_aside: dict[Request, bool] = {}  # True: still to be tried
        self._trial: Request | None = None
        self._trial_steps = 0

    @property
    def holds_any(self) -> bool:
        """Whether any request is set aside."""
        return bool(self._set_aside)

    @property
    def is_over(self) -> bool:
        """Whether the request that runs alone has made progress, or has ended."""
        trial = self._trial
        return trial is not None and (trial.finished or trial.num_steps > self._trial_steps)

    def active(self, requests: Sequence[Request]) -> list[Request]:
        """The given requests without those that are set aside."""
        return [request for request in requests if request not in self._set_aside]

    def failed(self, took_part: Sequence[Request], everyone: Sequence[Request]) -> Request | None:
        """Set all requests aside after a failed step; returns the one to blame, if it is known."""
        active = self.active(everyone)
        suspects = {*took_part} or {*active}  # no request ran if planning failed
        alone = len(active) == 1 and (active == [*took_part] or active == [self._trial])
        blamed = active[0] if alone else None
        for request in everyone:
            if request is not blamed:
                self._set_aside[request] = blamed is None and request in suspects
        self._trial = None
        return blamed

    def add(self, request: Request) -> None:
        """Set a new request aside while others are tried."""
        if self._set_aside or self._trial is not None:
            self._set_aside[request] = False
            self._scheduler.set_aside(request)

    def release(self, request: Request) -> None:
        """Bring a request back, because it is to run or about to end."""
        if self._set_aside.pop(request, None) is not None:
            self._scheduler.bring_back(request)

    def end_trial(self) -> None:
        """Set the request aside that was tried; the scheduler has dropped it already."""
        trial, self._trial = self._trial, None
        if trial is not None and not trial.finished:
            self._set_aside[trial] = False

    def proceed(self) -> None:
        """Before a step, bring back the next request to be tried, or all if none is left."""
        if self._trial is not None or not self._set_aside:
            return
        untried = [request for request, suspected in self._set_aside.items() if suspected]
        if untried:
            self._trial = min(untried, key=order)
            self._trial_steps = self._trial.num_steps
            self.release(self._trial)
        else:
            for request in [*self._set_aside]:
                self.release(request)
