"""Steps that are broken off: at a seam between their parts, or at any line of Python."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from slipstream.core.batch import Batch
from slipstream.engine.engine import Engine

# Parts of a step in front of and after which it can be broken off, by who has them.
_SEAMS: dict[str, tuple[str, ...]] = {
    "_scheduler": ("schedule", "schedule_ahead", "commit"),
    "adapters": ("next_ready", "slot_of"),
    "_step": ("launch", "launch_ahead", "finish", "_launch", "_verify", "_commit"),
    "_step._drafter": ("prepare", "propose", "observe", "read_prompts", "cached_tokens"),
    "_step._runner": ("forward", "logits"),
    "_step._state": ("apply",),
    "_step._sampling": ("admit", "commit"),
    "_scheduler.policy": ("plan", "observe"),
    "metrics": ("count_step",),
}


class BrokenOffError(Exception):
    """Breaks a step off on purpose."""


def is_meant(error: BaseException | None) -> bool:
    """Whether an error comes of one that breaks steps off on purpose."""
    while error is not None and not isinstance(error, BrokenOffError):
        error = error.__cause__ or error.__context__
    return error is not None


class Traps:
    """Breaks off the steps of an engine.

    Attributes:
        sprung: whether the trap that was set last has broken a step off.
        poisoned: requests that make every step fail that they take part in.
    """

    def __init__(self, engine: Engine) -> None:
        self._left = -1
        self._error: BaseException | None = None
        self.sprung, self.poisoned = False, set[str]()
        for path, names in _SEAMS.items():
            owner: Any = engine
            for part in path.split("."):
                owner = getattr(owner, part)
            for name in names:
                # Frozen dataclasses are among them.
                object.__setattr__(owner, name, self._watched(getattr(owner, name)))
        taking: Any = engine
        taking._take = self._watched(taking._take)
        step: Any = engine._step
        step.launch = self._refusing(step.launch)

    @contextmanager
    def at_seam(self, number: int, error: BaseException) -> Iterator[None]:
        """Break a step off at its seam of this number, counted from 0, if it has so many."""
        self._left, self._error, self.sprung = number, error, False
        try:
            yield
        finally:
            self._error = None

    def disarm(self) -> None:
        """Let the rest of the step pass."""
        self._error = None

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            self._pass()
            result = function(*arguments, **named)
            self._pass()
            return result

        return watched

    def _pass(self) -> None:
        error = self._error
        if error is None:
            return
        self._left -= 1
        if self._left < 0:
            self._error, self.sprung = None, True
            raise error

    def _refusing(self, launch: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        def refusing(batch: Batch) -> Any:
            for item in batch.requests:
                if item.request.request_id.split("/")[0] in self.poisoned:
                    raise BrokenOffError("poisoned")
            return launch(batch)

        return refusing
