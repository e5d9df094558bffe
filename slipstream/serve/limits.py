"""Limits of the server, and the errors for requests that exceed them."""

from dataclasses import dataclass
from http import HTTPStatus

from slipstream.core.errors import counted
from slipstream.core.flags import check_fields, flag, parse_bytes, rare_flag


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """Limits that protect the server under high load; None means no limit."""

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
        remedy="give 0 for no limit",
    )
    drain_timeout: float | None = flag(
        None,
        "Seconds that running requests have to finish when the server stops; 0 is no limit.",
        stands_for_none=0.0,
        above=0,
        remedy="give 0 for no limit",
    )
    max_body_bytes: int = flag(
        4 << 20,
        "Largest body of a request (413): bytes, 512K, 4M. [4M]",
        parse=parse_bytes,
        at_least=1,
    )
    max_json_values: int = flag(
        1 << 18,
        "Most values in a body's JSON (400): a token id counts 1, a field of an object about 4.",
        at_least=1,
    )
    max_stored_responses: int = flag(
        1024, "Most responses of /v1/responses that are kept; 0 keeps none.", at_least=0
    )
    max_stored_bytes: int = flag(
        64 << 20,
        "Most memory of the responses that are kept: bytes, 64M. [64M]",
        parse=parse_bytes,
        at_least=1,
    )
    max_header_bytes: int = flag(
        32 << 10,
        "Largest headers of a request, its first line included (431). [32K]",
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
    stream_interval: int = rare_flag(
        1,
        "New tokens of a choice that an event of a stream waits for; the first and the last do "
        "not wait.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))


class RequestError(Exception):
    """A request cannot be served; the message is for the client."""

    status: HTTPStatus
    code: str
    message: str

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or self.message)


class QueueFullError(RequestError):
    """The waiting queue is full.

    Attributes:
        retry_after: estimated seconds until there is room, a whole number.
    """

    status, code = HTTPStatus.TOO_MANY_REQUESTS, "queue_full"

    def __init__(self, num_waiting: int, retry_after: int) -> None:
        super().__init__(
            f"the queue is full ({counted(num_waiting, 'request')}); try again in {retry_after} s"
        )
        self.retry_after = retry_after


class DrainingError(RequestError):
    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"
    message = "the server is about to stop and takes no new requests"


class StoppedError(RequestError):
    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"
    message = "the server stopped before the request was done"


class EngineFailedError(RequestError):
    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"
    message = "the engine has failed; the server has to be started again"


class RequestFailedError(RequestError):
    """An internal error ended the request; `__cause__` is that error."""

    status, code = HTTPStatus.INTERNAL_SERVER_ERROR, "request_failed"
    message = "the request failed inside the engine; the server's log says why"


class DeadlineExceededError(RequestError):
    status, code = HTTPStatus.GATEWAY_TIMEOUT, "timeout"
    message = (
        "the request did not finish in the time that this server gives one; ask for fewer tokens, "
        "or raise --request-timeout"
    )
