"""Error responses in the format of the OpenAI protocol or of the Messages protocol."""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from starlette.responses import Response

from slipstream.core.errors import UsageError
from slipstream.serve.limits import QueueFullError, RequestError

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
MESSAGES_PATH: Final = "/v1/messages"
# Error types of the Messages protocol, which has types for server errors, too.
_MESSAGES_TYPES = {
    **_TYPES,
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_FIELD_NAME = re.compile(r"[a-z]+(_[a-z]+)*")
_ONE_OF_SEVERAL = re.compile(r"prompt \d+ of \d+: ")  # as `about_prompt` says


class ApiError(Exception):
    """An error response; `param` is the wrong field, and `code` tells programs the error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self, path: str = "") -> bytes:
        """The JSON body, in ASCII, in the format of the protocol at `path`."""
        if is_messages(path):
            kind = _MESSAGES_TYPES.get(HTTPStatus(self.status), "invalid_request_error")
            body = {"type": "error", "error": {"type": kind, "message": self.message}}
            return json.dumps(body).encode("ascii")
        error = {
            "message": self.message,
            "type": "server_error"
            if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            else _TYPES.get(HTTPStatus(self.status), "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}, allow_nan=False).encode("ascii")

    def response(self, path: str) -> Response:
        return Response(self.body(path), self.status, self.headers, media_type="application/json")


def is_messages(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Rename fields in the error of a translated request to those of the original protocol.

    A name without an underscore may be an ordinary word, so it is only renamed before an index.
    """
    marks = [name + (r"\b" if "_" in name else r"(?=\[)") for name in names]
    pattern = rf"\b(?:{'|'.join(marks)})"
    error.message = re.sub(pattern, lambda match: names[match[0]], error.message)
    error.param = names.get(error.param or "", error.param)
    return error


def generation_failed(message: str) -> ApiError:
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="generation_failed")


def as_api_error(error: Exception) -> ApiError:
    """Convert an exception to an API error; details of internal errors are not revealed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return _from_usage_error(str(error))
    if isinstance(error, RequestError):
        headers = (
            {"Retry-After": str(error.retry_after)} if isinstance(error, QueueFullError) else None
        )
        return ApiError(error.status, str(error), code=error.code, headers=headers)
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "an internal error occurred; the server's log says why",
        code="internal_error",
    )


# Fields that the protocol names differently from the engine: the new name, and its top field.
_NAMES = {
    "prompt_token_ids": ("prompt", "prompt"),
    "num_speculative_tokens": ("speculative.num_speculative_tokens", "speculative"),
}


def _from_usage_error(message: str) -> ApiError:
    message = message.replace("or None", "or null", 1)  # as JSON has it
    which = _ONE_OF_SEVERAL.match(message)
    place = which[0] if which else ""
    message = message.removeprefix(place)
    first, _, rest = message.partition(" ")
    if first in _NAMES:
        name, param = _NAMES[first]
        return bad_request(f"{place}{name} {rest}", param)
    return bad_request(place + message, _field(message))


def _field(message: str) -> str | None:
    """The field that a message is about, if the message begins with its name."""
    if message.startswith("the prompt "):
        return "prompt"
    first = message.split(" ", 1)[0]
    match = _FIELD_NAME.match(first)
    return (
        match[0]
        if match and ("_" in first or first in ("n", "priority", "seed", "temperature"))
        else None
    )


# Exceptions that handlers may raise, all with a message for the client.
CLIENT_ERRORS = (ApiError, UsageError, RequestError)
