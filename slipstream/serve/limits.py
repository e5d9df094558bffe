"""What the server takes on, and what it says when it does not."""

from dataclasses import dataclass

from slipstream.core.errors import UsageError
from slipstream.core.wording import counted


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """Bounds that keep the server alive under any load; `None` is without a bound.

    Args:
        max_waiting: requests that may wait for a place in the engine; more are refused (429).
        request_timeout: seconds a request may take in all; then it ends with an error (504).
        drain_timeout: seconds that running requests have to finish once the server is to stop.
        max_body_bytes: of one HTTP request's body (413).
        max_json_depth: how deep its JSON may be nested (400).
        max_header_bytes: of one HTTP request's line and headers (431).
        max_connections: open at once; beyond it, whoever has waited longest without sending a whole
            request is cut off (and the newcomer, with 503, where nobody waits).
        receive_timeout: seconds in which a client must have sent a request's headers, and then its
            body (408).
        send_timeout: seconds that a client may leave its answer unread before it is cut off.
        keep_alive_timeout: seconds that an idle connection stays open.
    """

    max_waiting: int = 512
    request_timeout: float | None = 600.0
    drain_timeout: float | None = None
    max_body_bytes: int = 4 << 20
    max_json_depth: int = 64
    max_header_bytes: int = 32 << 10
    max_connections: int = 4096
    receive_timeout: float = 20.0
    send_timeout: float = 60.0
    keep_alive_timeout: float = 30.0

    def __post_init__(self) -> None:
        if self.max_waiting < 0:
            raise UsageError(f"max_waiting must be at least 0, not {self.max_waiting}")
        for name in (
            "max_body_bytes",
            "max_json_depth",
            "max_header_bytes",
            "max_connections",
            "receive_timeout",
            "send_timeout",
            "keep_alive_timeout",
            "request_timeout",
            "drain_timeout",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} must be above 0, not {value}")


class RequestRefused(Exception):  # noqa: N818 - says what happened
    """The server does not run this request now; the message is for the client."""


class QueueFull(RequestRefused):
    """Too many requests wait (429).

    Attributes:
        retry_after: whole seconds after which a place is likely to be free.
    """

    def __init__(self, num_waiting: int, retry_after: int) -> None:
        super().__init__(
            f"the queue is full ({counted(num_waiting, 'request')}); try again in {retry_after} s"
        )
        self.retry_after = retry_after


class Draining(RequestRefused):
    """The server is about to stop (503)."""

    def __init__(self) -> None:
        super().__init__("the server is about to stop and takes no new requests")


class Stopped(RequestRefused):
    """The server stopped before the request was done (503)."""

    def __init__(self) -> None:
        super().__init__("the server stopped before the request was done")


class EngineFailed(RequestRefused):
    """The engine does not run any more (503)."""

    def __init__(self) -> None:
        super().__init__("the engine has failed; the server has to be started again")


class RequestFailed(Exception):  # noqa: N818 - says what happened
    """This request ended by a fault that is not its user's (500); the cause is chained."""

    def __init__(self) -> None:
        super().__init__("the request failed inside the engine; the server's log says why")


class DeadlineExceeded(Exception):  # noqa: N818 - says what happened
    """The request was not done in its time (504)."""

    def __init__(self) -> None:
        super().__init__(
            "the request did not finish in the time that this server gives one; ask for fewer "
            "tokens, or raise --request-timeout"
        )
