"""Find what a chat template leaves out of a conversation."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple
from uuid import uuid4

from slipstream.core.errors import UsageError
from slipstream.serve.errors import bad_request

_Message = dict[str, Any]


class _Field(NamedTuple):
    """A text in the messages: its path, the object that holds it, and its key there."""

    where: str
    holder: _Message
    key: str


def require_coverage(
    render: Callable[[Sequence[_Message]], str], messages: Sequence[_Message], text: str
) -> list[str]:
    """The names of speakers that are not in the rendered text; ApiError for a tool call or a
    content that is not.

    Each is replaced by a unique mark, and the messages are rendered again: a field whose mark is
    not in the new text was not read. A template that raises an error for marks has read them.

    Args:
        render: the template.
        messages: as they were rendered.
        text: the rendered text.
    """
    marked = deepcopy([*messages])
    fields = [*_fields(marked, text)]
    if not fields:
        return []
    marks = [str(uuid4().int) for _ in fields]  # digits: templates that change case keep them
    for field, mark in zip(fields, marks, strict=True):
        field.holder[field.key] = mark
    try:
        found = render(marked)
    except UsageError:
        return []
    unread = [it for it, mark in zip(fields, marks, strict=True) if mark not in found]
    for field in unread:
        if not field.where.endswith(".name"):
            raise bad_request(
                f"{field.where} would be ignored: the chat template of this model does not read "
                "it; leave it out, or say it in the content of a message that is read",
                "messages",
            )
    return [field.where for field in unread]


def _fields(messages: Sequence[_Message], text: str) -> Iterator[_Field]:
    called: dict[str, str] = {}
    for place, message in enumerate(messages):
        where, calls = f"messages[{place}]", message.get("tool_calls") or ()
        for call in calls:
            called[call["id"]] = call["function"]["name"]
        # A tool's name that repeats the call's may be left out.
        if "name" in message and message["name"] != called.get(message.get("tool_call_id", "")):
            yield _Field(f"{where}.name", message, "name")
        for number, call in enumerate(calls):
            yield _Field(f"{where}.tool_calls[{number}]", call["function"], "name")
        # Templates may leave out content beside a call, as in the model's training data. Most
        # other content is in the text unchanged, so that no mark is needed.
        content = message.get("content")
        if isinstance(content, list):
            if any(part["type"] != "text" for part in content):  # whose places are counted
                continue
            content = "\n".join(part["text"] for part in content)
        if content and not calls and content.strip() not in text:
            yield _Field(f"{where}.content", message, "content")
