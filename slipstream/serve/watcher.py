"""Who is told what happens on the engine's thread: metrics and logs."""

from typing import Protocol

from slipstream.engine.engine import Engine
from slipstream.engine.samples import Submission


class Watcher(Protocol):
    """Is told what happens, on the engine's thread; has to be quick."""

    def gained(self, submission: Submission, num_tokens: int, gap: float | None) -> None:
        """A step gave a request tokens, `gap` seconds after it last got some (None: the first)."""

    def ended(self, request_id: str, submission: Submission, reason: str) -> None:
        """A request ended: "stop", "length", "abort", "error" or "timeout"."""

    def stepped(self, engine: Engine) -> None:
        """A step is done."""
