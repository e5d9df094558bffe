"""Finds the request that makes steps fail: after a failure they are tried one by one."""

from collections.abc import Sequence

from slipstream.core.request import Request
from slipstream.engine.invariants import order
from slipstream.engine.scheduler import Scheduler


class Isolation:
    """Keeps requests apart until it is known which of them makes steps fail.

    When a step fails, everybody is set aside. Those that took part come back one at a time, alone,
    until they got beyond where they were: a request's noise is its own, so it meets the same step
    again. A step that fails is the fault of the request that ran alone in it, and of no other. Once
    that one is found, or nobody is left to be tried, all come back together.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._aside: dict[Request, bool] = {}  # whether they are still to be tried
        self._trial: Request | None = None
        self._trial_steps = 0

    @property
    def holds_any(self) -> bool:
        """Whether anybody is set aside."""
        return bool(self._aside)

    @property
    def is_over(self) -> bool:
        """Whether the request that is tried has stood its trial, or has ended."""
        trial = self._trial
        return trial is not None and (trial.finished or trial.num_steps > self._trial_steps)

    def active(self, requests: Sequence[Request]) -> list[Request]:
        """Those of the requests that are not set aside."""
        return [request for request in requests if request not in self._aside]

    def failed(self, took_part: Sequence[Request], everyone: Sequence[Request]) -> Request | None:
        """A step failed: all are aside now but the one whose fault it is, if that is known."""
        active = self.active(everyone)
        suspects = {*took_part} or {*active}  # nobody ran: planning the step failed
        alone = len(active) == 1 and (active == [*took_part] or active == [self._trial])
        blamed = active[0] if alone else None
        for request in everyone:
            if request is not blamed:
                self._aside[request] = blamed is None and request in suspects
        self._trial = None
        return blamed

    def newcomer(self, request: Request) -> None:
        """While requests are tried, new ones wait."""
        if self._aside or self._trial is not None:
            self._aside[request] = False
            self._scheduler.set_aside(request)

    def release(self, request: Request) -> None:
        """It is about to end, or is to run."""
        if self._aside.pop(request, None) is not None:
            self._scheduler.bring_back(request)

    def end_trial(self) -> None:
        """Set the request aside that was tried; the scheduler has been told to forget it."""
        trial, self._trial = self._trial, None
        if trial is not None and not trial.finished:
            self._aside[trial] = False

    def proceed(self) -> None:
        """Before a step: the next one to be tried comes back, or everybody."""
        if self._trial is not None or not self._aside:
            return
        untried = [request for request, suspected in self._aside.items() if suspected]
        if untried:
            self._trial = min(untried, key=order)
            self._trial_steps = self._trial.num_steps
            self.release(self._trial)
        else:
            for request in [*self._aside]:
                self.release(request)
