"""What the server takes on, and what it says when it does not."""

from dataclasses import dataclass

from slipstream.core.flags import check_fields, flag, parse_bytes
from slipstream.core.wording import counted


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """Bounds that keep the server alive under any load; None is no bound."""

    max_waiting: int = flag(
        512,
        "Maximum number of requests that wait for a place in the engine; more are refused (429).",
        panel="Limits",
        also=("--max-queue",),
        at_least=0,
    )
    request_timeout: float | None = flag(
        600.0,
        "Seconds that a request may take in all (504); 0 is no limit.",
        stands_for_none=0.0,
        above=0,
    )
    drain_timeout: float | None = flag(
        None,
        "Seconds that running requests have to finish when the server stops; 0 is no limit.",
        stands_for_none=0.0,
        above=0,
    )
    max_body_bytes: int = flag(
        4 << 20,
        "Largest body of a request (413): bytes, 512K, 4M. [4M]",
        metavar="<bytes>",
        parse=parse_bytes,
        at_least=1,
    )
    max_json_values: int = flag(
        1 << 18,
        "Most values in a body's JSON (400): a token id counts 1, a field of an object about 4.",
        at_least=1,
    )
    max_header_bytes: int = flag(
        32 << 10,
        "Largest headers of a request, its first line included (431). [32K]",
        metavar="<bytes>",
        parse=parse_bytes,
        at_least=1,
    )
    max_connections: int = flag(
        4096,
        "Maximum number of open connections; beyond it the one that has waited longest without "
        "sending a whole request is closed (or the newest refused, with 503, if none waits).",
        at_least=1,
    )
    receive_timeout: float = flag(
        20.0, "Seconds in which a request's headers, then its body, must arrive (408).", above=0
    )
    send_timeout: float = flag(
        60.0, "Seconds that a client may leave its answer unread before it is cut off.", above=0
    )
    keep_alive_timeout: float = flag(30.0, "Seconds that an idle connection stays open.", above=0)

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))


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
