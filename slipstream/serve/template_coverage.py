"""What a chat template leaves out of a conversation, found by trying."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple
from uuid import uuid4

from slipstream.core.errors import UsageError
from slipstream.serve.errors import bad_request

_Message = dict[str, Any]


class _Field(NamedTuple):
    """A text within the messages: its place in words, what holds it, and its key there."""

    where: str
    holder: _Message
    key: str


def require_coverage(
    render: Callable[[Sequence[_Message]], str], messages: Sequence[_Message], text: str
) -> None:
    """Raise ApiError for a name, a tool call or a content that the model would never see.

    Each gets a mark that can be found again in the text of the whole; what cannot was not read. A
    template that takes offence at marks has at least looked at them.

    Args:
        render: the template.
        messages: as they were rendered.
        text: of them.
    """
    marked = deepcopy([*messages])
    fields = [*_fields(marked, text)]
    if not fields:
        return
    marks = [str(uuid4().int) for _ in fields]  # of digits: in every alphabet, case and language
    for field, mark in zip(fields, marks, strict=True):
        field.holder[field.key] = mark
    try:
        found = render(marked)
    except UsageError:
        return
    for field, mark in zip(fields, marks, strict=True):
        if mark not in found:
            raise bad_request(
                f"{field.where} would be ignored: the chat template of this model does not read "
                "it; leave it out, or say it in the content of a message that is read",
                "messages",
            )


def _fields(messages: Sequence[_Message], text: str) -> Iterator[_Field]:
    called: dict[str, str] = {}
    for place, message in enumerate(messages):
        where, calls = f"messages[{place}]", message.get("tool_calls") or ()
        for call in calls:
            called[call["id"]] = call["function"]["name"]
        # The name of a tool says nothing new where it is that of the call.
        if "name" in message and message["name"] != called.get(message.get("tool_call_id", "")):
            yield _Field(f"{where}.name", message, "name")
        for number, call in enumerate(calls):
            yield _Field(f"{where}.tool_calls[{number}]", call["function"], "name")
        # Some leave out what is said beside a call, as the model was taught; most that is said
        # stands in the text as it is.
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        if content and not calls and content.strip() not in text:
            yield _Field(f"{where}.content", message, "content")
