"""Errors in the form that clients of the OpenAI protocol read."""

import json
from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import Response

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: what is wrong and what to do about it.
        param: the field that is to blame.
        code: a word for programs.
        headers: of the response, such as Retry-After.
    """

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

    def body(self) -> bytes:
        """The JSON document; plain ASCII, whatever the request held."""
        error = {
            "message": self.message,
            "type": error_type(self.status),
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode("ascii")

    def response(self) -> Response:
        """The answer to the request."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def error_type(status: int) -> str:
    """The protocol's name for a kind of error."""
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    return _TYPES.get(HTTPStatus(status), "invalid_request_error")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is wrong as it is."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)
