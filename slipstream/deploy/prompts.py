"""The beginning of a request's prompt as a chain of hashes, without a tokenizer.

Two prompts that begin with equal text begin with equal keys. A key ends every `BLOCK` characters
and at the end of every message, so that all keys of a conversation's turn are keys of its next.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BLOCK = 128  # characters: some 32 tokens
_MOST_KEYS = 4096
_COMMON = ("system", "developer", "tools")
_STORED = re.compile(r"resp_(?P<replica>[0-9a-f]{12})[0-9a-f]{32}")


@dataclass(frozen=True)
class Prompt:
    """The properties of a request that routing uses.

    Attributes:
        keys: a hash for each prefix of the prompt, the shortest first.
        common: number of keys of the prefix that many prompts share: instructions and tools.
        opening: number of keys up to the end of the user's first message; 0 if the request is no
            conversation, or is a conversation's first turn.
        replica: beginning of the id of the replica that stores an object the request refers to.
    """

    keys: tuple[int, ...] = ()
    common: int = 0
    opening: int = 0
    replica: str | None = None


def read_prompt(path: str, body: bytes) -> Prompt:
    """Read a request's prompt; returns an empty `Prompt` if the body cannot be parsed."""
    if path.startswith("/v1/responses/"):
        return Prompt(replica=_stored_at(path.split("/")[3]))
    try:
        fields = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return Prompt()
    if not isinstance(fields, dict):
        return Prompt()
    keys: list[int] = []
    chain = common = opening = users = 0
    try:
        for role, text in _parts(fields):
            for start in range(0, len(text) or 1, BLOCK):
                chain = hash((chain, role, text[start : start + BLOCK]))
                keys.append(chain)
            users += role == "user"
            if users == 0 and role in _COMMON:
                common = len(keys)
            elif users == 1 and role == "user":
                opening = len(keys)
            if len(keys) >= _MOST_KEYS:
                break
    except RecursionError:
        return Prompt()
    replica = _stored_at(fields.get("previous_response_id"))
    return Prompt(tuple(keys[:_MOST_KEYS]), common, opening if users > 1 else 0, replica)


def _stored_at(response: object) -> str | None:
    found = _STORED.fullmatch(response) if isinstance(response, str) else None
    return found["replica"] if found else None


def _parts(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Roles and texts in the order of the prompt."""
    for name in ("instructions", "system"):
        if fields.get(name):
            yield "system", _text(fields[name])
    if fields.get("tools"):
        yield "tools", _text(fields["tools"])
    prompt = fields.get("prompt")
    if prompt is not None:
        yield "prompt", _text(prompt)
    messages = fields.get("messages", fields.get("input"))
    if isinstance(messages, str):
        yield "user", messages
    elif isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict):
                yield str(message.get("role", "")), _text(message.get("content", message))


def _text(value: object) -> str:
    """The text of a content: a string, the joined texts of a list of parts, or else JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(it, dict) and "text" in it for it in value):
        return "".join(str(it["text"]) for it in value)
    return json.dumps(value)
