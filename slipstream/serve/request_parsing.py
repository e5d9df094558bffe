"""Parse and validate request bodies; validation errors become plain sentences."""

import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from slipstream.serve.errors import ApiError, bad_request
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol.base import REFUSALS, ModelRequest, RequestBody
from slipstream.serve.protocol.bounds import count_values

Body = TypeVar("Body", bound=ModelRequest)

_LONGEST_NAME = 100  # maximum number of characters of a name in a message
_LARGE = 32 << 10  # bytes; parsing more would block the event loop for milliseconds


async def read_body(request: Request, kind: type[Body], service: ModelService) -> Body:
    """Read and validate the body of a request; raises ApiError, naming the first wrong field.

    The content type must be JSON: browsers send other types across origins without a preflight.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body must be JSON; send it with Content-Type: application/json",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding {encoding!r} is not supported; send the body uncompressed",
        )
    content = await request.body()
    most = service.thread.limits.max_json_values
    if len(content) < _LARGE:
        body = parse_body(content, kind, most)
    else:
        body = await service.parse(parse_body, content, kind, most)
    service.require_name(body.model)
    return body


def parse_body(content: bytes, kind: type[Body], most_values: int) -> Body:
    """Parse and validate a body of at most `most_values` values (see `count_values`)."""
    if 2 * len(content) > most_values and count_values(content) > most_values:
        raise bad_request(
            f"the body holds more than {most_values} values; send fewer at once, or start the "
            "server with a larger --max-json-values",
            code="too_many_values",
        )
    try:
        value = from_json(content.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False), kind) from None


def _refusal(errors: Sequence[ErrorDetails], kind: type[RequestBody]) -> ApiError:
    """Choose the error to report: of a union, that of the member that matched furthest."""
    field = errors[0]["loc"][:1]
    candidates = [error for error in errors if error["loc"][:1] == field]
    error = max(candidates, key=_relevance)
    return bad_request(_sentence(error, kind), str(field[0]) if field else None)


def _relevance(error: ErrorDetails) -> tuple[bool, int, int]:
    too_many = error["type"] == "too_many"  # entries are counted before they are validated
    depth = sum(isinstance(step, int) or _is_field(step) for step in error["loc"])
    if error["type"] == "extra_forbidden":  # may be a misspelt field that is also missing
        return too_many, depth, 2
    return too_many, depth, int(error["type"] not in _WRONG_KIND)


_WRONG_KIND = (*("string_type", "list_type", "dict_type", "int_type", "bool_type", "model_type"),)


# Error types and text of pydantic that mention Python classes or validation.
_OBJECT = ("dict_type", "model_type", "model_attributes_type", "dataclass_type")
_COUNTED = " after validation, not 0"

_REFUSED = ("extra_forbidden", "literal_error", "too_many")


def _sentence(error: ErrorDetails, kind: type[RequestBody]) -> str:
    where, name = _place(error["loc"]), str(error["loc"][-1]) if error["loc"] else ""
    if error["type"] in _REFUSED and name in REFUSALS:
        return f"{where} is not supported: {REFUSALS[name]}"
    if error["type"] == "extra_forbidden":
        return f"unknown field {where}{_suggestion(where, kind)}"
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = error["ctx"]
        name = context["discriminator"].strip("'")
        if context.get("tag") in REFUSALS:
            return f"{where}: {context['tag']} is not supported: {REFUSALS[context['tag']]}"
        tags = context.get("expected_tags", "those in /openapi.json")
        return f"{where}.{name} must be one of {tags}"
    if error["type"] == "missing":
        return f"{where} is missing"
    form = {**_FORMS, **kind.forms}.get(_form_key(where, error["type"]))
    if error["type"] in (*_WRONG_KIND, "literal_error") and form is not None:
        return f"{where} must be {form}"
    if error["type"] in _OBJECT:
        return f"{where}: input should be an object"
    message = error["msg"].removeprefix("Value error, ").removesuffix(_COUNTED)
    if error["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}: {message[:1].lower()}{message[1:]}"


def _form_key(where: str, error: str) -> str:
    """The key of a place in `_FORMS`; `prompt[]` for any entry that is neither text nor list."""
    if where.endswith(".content"):
        return "content"
    return re.sub(r"\[\d+\]$", "[]", where) if error in ("string_type", "list_type") else where


def _place(location: Sequence[int | str]) -> str:
    """Format a location as messages[0].content, without the names of union members."""
    place = ""
    for before, step in zip([None, *location], location, strict=False):
        if isinstance(step, int):
            place += f"[{step}]"
        elif isinstance(before, int) and step in _BLOCK_TYPES and step != location[-1]:
            continue
        elif not place:
            place = step[:_LONGEST_NAME]
        elif _is_field(step) and not place.endswith(step):
            place += f".{step[:_LONGEST_NAME]}"
    return place


def _is_field(step: str) -> bool:
    return step.isidentifier() and step not in _UNION_MEMBERS


# Fields of several types.
_FORMS = {
    "content": "a text or a list of parts of type text",
    "prompt": "a text, token ids, or a list of texts and lists of token ids",
    "prompt[]": "a text or a list of token ids",
    "stop": "a text or a list of texts",
    "tool_choice": '"none", "auto", "required", or a function by its name as /openapi.json has it',
    "background": "false: this server answers while the client waits",
    "input": "a text or a list of items",
    "guided_json": "a JSON schema, as an object or a text",
}

# Names of members of a union that are names of fields, too.
_BLOCK_TYPES = ("image", "text", "thinking", "tool_result", "tool_use")

_UNION_MEMBERS = (
    *("str", "int", "float", "bool", "TextPart", "ChosenTool"),
    *("assistant", "developer", "system", "tool", "user"),
    *("message", "function_call_output", "input_text", "input_image", "output_text"),
    *("ChosenFunctionTool", "base64"),
)


_SPECULATIVE, _NUM_DRAFTS = "speculative", "num_speculative_tokens"


def _suggestion(name: str, kind: type[RequestBody]) -> str:
    if name == _NUM_DRAFTS and _SPECULATIVE in kind.field_names():
        return f'; write "{_SPECULATIVE}": {{"{_NUM_DRAFTS}": ...}}'
    if "." in name:
        return "; nothing is ignored here: leave it out"
    near = get_close_matches(name, kind.field_names(), n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else "; nothing is ignored here: leave it out"
