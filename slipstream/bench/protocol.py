"""The OpenAI protocol for a client: bodies of requests, and events of streams."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.bench.datasets import BenchPrompt
from slipstream.bench.options import AUTO, CHAT, COMPLETIONS, PATHS
from slipstream.core.errors import UsageError

_MOST_BYTES = 64 << 20  # of one event of a stream


class BrokenStreamError(ValueError):
    """A stream violates the protocol."""


class ServerError(Exception):
    """The server reports an error within a stream."""


@dataclass(frozen=True, kw_only=True)
class RequestForm:
    """How prompts become requests.

    Attributes:
        endpoint: one of ENDPOINTS; `auto` takes the one that suits each prompt.
        max_tokens: for prompts without a length of their own.
        fields: further fields of the body.
    """

    model: str
    endpoint: str = AUTO
    max_tokens: int = 128
    fields: Mapping[str, Any] = field(default_factory=dict)

    def path(self, prompt: BenchPrompt) -> str:
        return PATHS[self._endpoint(prompt)]

    def body(self, prompt: BenchPrompt) -> bytes:
        """The request's body in UTF-8 JSON; UsageError if the endpoint takes no such prompt."""
        document: dict[str, Any] = {
            "model": self.model,
            **self._question(prompt),
            "max_tokens": prompt.max_tokens or self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        return json.dumps(document, ensure_ascii=False).encode("utf-8", errors="surrogatepass")

    def _endpoint(self, prompt: BenchPrompt) -> str:
        if self.endpoint != AUTO:
            return self.endpoint
        return COMPLETIONS if prompt.messages is None else CHAT

    def _question(self, prompt: BenchPrompt) -> dict[str, Any]:
        if self._endpoint(prompt) == COMPLETIONS:
            if prompt.messages is not None:
                raise UsageError(
                    f"the prompt {prompt.id} is a chat, which the completions endpoint does not "
                    "take; give --endpoint auto or chat, or --tokenizer for its chat template"
                )
            return {"prompt": list(prompt.token_ids) if prompt.token_ids else prompt.text}
        if prompt.messages is not None:
            return {"messages": list(prompt.messages)}
        if prompt.text is None:
            raise UsageError(
                f"the prompt {prompt.id} is token ids, which the chat endpoint does not take; give "
                "--endpoint auto or completions"
            )
        return {"messages": [{"role": "user", "content": prompt.text}]}


class EventParser:
    """Splits a byte stream into server-sent events; chunks may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the data of the events that these bytes complete; BrokenStreamError for an event
        that is not UTF-8 or is too long."""
        # An event ends with an empty line; lines end as the standard lets them.
        text = self._rest + data
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""  # a \n may follow
            text = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > _MOST_BYTES:
            raise BrokenStreamError("an event of the stream is too long")
        for event in events:
            lines = [
                line[5:].removeprefix(b" ")
                for line in event.split(b"\n")
                if line.startswith(b"data:")
            ]
            try:
                texts = [b"\n".join(lines).decode("utf-8")] if lines else []
            except UnicodeDecodeError as error:
                raise BrokenStreamError(str(error)) from None
            yield from texts


@dataclass(frozen=True)
class Chunk:
    """The content of one event of a stream.

    Attributes:
        has_output: whether it has tokens (their text may come later).
        num_tokens: their number, where the server gives it.
    """

    text: str = ""
    has_output: bool = False
    num_tokens: int | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None


def read_event(data: str) -> Chunk:
    """Read one event of either endpoint's stream.

    Raises:
        BrokenStreamError: it violates the protocol.
        ServerError: it reports an error.
    """
    try:
        event = json.loads(data)
    except ValueError:
        raise BrokenStreamError("an event of the stream is not JSON") from None
    if not isinstance(event, dict):
        raise BrokenStreamError("an event of the stream is not an object")
    if event.get("error") is not None:
        raise ServerError(error_message(event))
    usage = event.get("usage")
    usage = usage if isinstance(usage, dict) else None
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise BrokenStreamError('an event of the stream has no "choices"')
    if not choices:
        return Chunk(usage=usage)
    choice = choices[0]
    if not isinstance(choice, dict):
        raise BrokenStreamError("a choice of the stream is not an object")
    text, more = _text_of(choice)
    count = _num_tokens(choice, event)
    reason = choice.get("finish_reason")
    return Chunk(
        text=text,
        has_output=bool(text or more or count),
        num_tokens=count,
        finish_reason=reason if isinstance(reason, str) else None,
        usage=usage,
    )


def error_message(document: Any) -> str:
    """The message of an error in OpenAI's form or another."""
    error = document.get("error", document) if isinstance(document, dict) else document
    if isinstance(error, dict):
        error = error.get("message", error)
    return error if isinstance(error, str) else json.dumps(error)


def _text_of(choice: Mapping[str, Any]) -> tuple[str, bool]:
    """The text, and whether there is other output (reasoning, tool calls)."""
    if "text" in choice:
        text, more = choice["text"], False
    else:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            raise BrokenStreamError('a choice of the stream has neither "text" nor "delta"')
        text = delta.get("content")
        more = any(delta.get(key) for key in ("reasoning_content", "reasoning", "tool_calls"))
    if text is None:
        text = ""
    if not isinstance(text, str):
        raise BrokenStreamError("a text of the stream is not a text")
    return text, more


def _num_tokens(choice: Mapping[str, Any], event: Mapping[str, Any]) -> int | None:
    """The number of tokens, if the server sends its verdicts or token ids."""
    for holder in (choice, event):
        speculation = holder.get("speculation")
        if isinstance(speculation, dict) and isinstance(speculation.get("tokens"), list):
            return len(speculation["tokens"])
    ids = choice.get("token_ids")
    return len(ids) if isinstance(ids, list) else None
