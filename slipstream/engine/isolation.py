"""Finds the request that makes steps fail: after a failure they are tried one by one."""

from collections.abc import Sequence

from slipstream.core.request import Request
from slipstream.engine.invariants import order
from slipstream.engine.scheduler import Scheduler

_PROVEN = -1


class Isolation:
    """Keeps requests apart until it is known which of them makes steps fail.

    When a step fails, everybody is set aside. They come back one at a time and are proven once they
    got beyond where they were: a request's noise is its own, so it meets the same step again. A
    step that fails while one of those it runs is not proven is that one's fault.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._aside: dict[Request, int] = {}  # and the verification steps that each had done
        self._trial: Request | None = None
        self._trial_steps = 0

    @property
    def holds_any(self) -> bool:
        """Whether anybody is set aside."""
        return bool(self._aside)

    def active(self, requests: Sequence[Request]) -> list[Request]:
        """Those of the requests that are not set aside."""
        return [request for request in requests if request not in self._aside]

    def failed(self, took_part: Sequence[Request], everyone: Sequence[Request]) -> Request | None:
        """A step failed: all are aside now but the one whose fault it is, if that is known."""
        blamed = self._blamed(took_part)
        for request in self.active(everyone):
            if request is not blamed:
                proven = blamed is not None and request in took_part
                self._aside[request] = _PROVEN if proven else request.num_steps
        self._trial = None
        return blamed

    def newcomer(self, request: Request) -> None:
        """While requests are tried, new ones wait for their turn, too."""
        if self._aside or self._trial is not None:
            self._aside[request] = request.num_steps
            self._scheduler.set_aside(request)

    def release(self, request: Request) -> None:
        """It is about to end."""
        if self._aside.pop(request, None) is not None:
            self._scheduler.bring_back(request)

    def proceed(self) -> None:
        """Before a step: whoever is proven comes back, and one to be tried."""
        trial = self._trial
        if trial is not None and (trial.finished or trial.num_steps > self._trial_steps):
            self._trial = None
        if not self._aside:
            return
        for request in [it for it, steps in self._aside.items() if steps == _PROVEN]:
            self.release(request)
        if self._trial is None and self._aside:
            self._trial = min(self._aside, key=order)
            self._trial_steps = self._aside[self._trial]
            self.release(self._trial)

    def _blamed(self, took_part: Sequence[Request]) -> Request | None:
        if len(took_part) == 1:
            return took_part[0]
        return self._trial if self._trial in took_part else None
