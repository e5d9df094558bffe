"""What event loop and engine's thread send each other."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.prompts import EncodedPrompt
from slipstream.serve.progress import Progress
from slipstream.serve.stream import Channel


@dataclass(frozen=True, slots=True, eq=False)
class Add:
    """A request for the engine."""

    request_id: str
    prompt: EncodedPrompt
    params: SamplingParams
    deadline: float
    channel: Channel


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Something else to do."""

    function: Callable[[], None]
    done: "Future[None]"

    def do(self) -> None:
        """It, and let its sender know; nothing where the sender does not wait any more."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.function()
        except Exception as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class Note(Enum):
    """What there is to say of a request besides its increments."""

    ACCEPTED = "the engine has it"
    GONE = "it ended at its reader's wish"


Letter = Add | Work | Channel  # a channel: its reader left
News = Progress | Exception | Note
