"""Request ids and log formats."""

import json
import logging
import re
from collections.abc import Callable
from contextvars import ContextVar
from logging.config import dictConfig
from math import isfinite
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.core.errors import UsageError
from slipstream.serve.options import LogOptions
from slipstream.serve.protocol.base import REQUEST_ID

logger = logging.getLogger("slipstream.serve.access")

# Key of the scope for the outermost `send`. Middleware only changes the start of a response, so the
# chunks of a stream may bypass it.
SEND_BODY = "slipstream.send_body"

_TRACE = 5  # uvicorn's level below DEBUG
_GIVEN = re.compile(REQUEST_ID)
# Paths that monitoring polls: logged at level DEBUG only.
_ROUTINE = frozenset({"/health", "/load", "/metrics", "/ping"})
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def current_request_id() -> str:
    """The id of the current HTTP request; "" if there is none."""
    return _request_id.get()


class RequestIds:
    """Gives every HTTP request an id, and writes the access log.

    A client's `X-Request-Id` is used if it is short and plain; every response has the id.

    Args:
        answered: called with the method and status (0: no response) of every request that is not
            to a path that monitoring polls.
    """

    def __init__(self, app: ASGIApp, answered: Callable[[str, int], None] | None = None) -> None:
        self._app, self._answered = app, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, sent = perf_counter(), 0, 0
        request_id = _id_of(scope)
        header = (b"x-request-id", request_id.encode("ascii"))

        async def send_with_id(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        scope[SEND_BODY] = send_with_id
        token = _request_id.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            _log_answer(scope, status, perf_counter() - began, sent)
            if self._answered is not None and scope["path"] not in _ROUTINE:
                self._answered(scope["method"], status)
            _request_id.reset(token)


def _id_of(scope: Scope) -> str:
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    text = given[0].decode("latin-1") if given else ""
    return text if _GIVEN.fullmatch(text) else f"req-{uuid4().hex}"


def _log_answer(scope: Scope, status: int, seconds: float, sent: int) -> None:
    """Log one line, without the query of the URL, which may contain anything."""
    level = logging.DEBUG if scope["path"] in _ROUTINE else logging.INFO
    client = scope.get("client")
    logger.log(
        level,
        "%s %s %s in %.3f s",
        scope["method"],
        scope["path"],
        status or "left unanswered",
        seconds,
        extra={
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
            "sent_bytes": sent,
            "client": client[0] if client else None,
        },
    )


class PlainFormatter(logging.Formatter):
    """A line of plain text: time, level, message, request id."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, a hook of logging
        """Format as one line; control characters, which clients may send, are escaped."""
        return _printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Format the line and the request id, with a traceback indented below."""
        text = super().format(record)
        request_id = getattr(record, "request_id", "")
        indented = "\n    ".join(map(_printable, text.split("\n")))
        return f"{indented} [{_printable(request_id)}]" if request_id else indented


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the record's other fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format as ASCII JSON, so that no character can break the line."""
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        line = {
            name: str(it) if isinstance(it, float) and not isfinite(it) else it
            for name, it in line.items()
            if it != ""
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, allow_nan=False)


class _AddRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = current_request_id()
        return True


def set_up_logs(options: LogOptions) -> None:
    """Write the logs of the server and of uvicorn to standard error; raises UsageError for a
    `log_config_file` that cannot be applied."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if options.log_json else PlainFormatter())
    handler.addFilter(_AddRequestId())
    levels = {"slipstream": options.log_level}
    levels["uvicorn"] = options.uvicorn_log_level or options.log_level
    for name, level in levels.items():
        own = logging.getLogger(name)
        own.handlers[:] = [handler]
        own.setLevel(_TRACE if level == "trace" else level.upper())
        own.propagate = False
    logger.disabled = options.disable_uvicorn_access_log
    config = options.config()
    if config is not None:
        try:
            dictConfig(config)
        except (ValueError, TypeError, AttributeError, ImportError) as error:
            raise UsageError(
                f"--log-config-file {options.log_config_file} is not for "
                f"logging.config.dictConfig: {error}"
            ) from None


def _printable(text: str) -> str:
    return "".join(
        char if char.isprintable() or char == "\t" else repr(char)[1:-1] for char in text
    )
