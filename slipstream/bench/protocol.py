"""The OpenAI protocol for a client: bodies of requests, and events of streams."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slipstream.bench.datasets import BenchPrompt
from slipstream.core.errors import UsageError
from slipstream.core.flags import flag, parse_object

AUTO, COMPLETIONS, CHAT = "auto", "completions", "chat"
ENDPOINTS = (AUTO, COMPLETIONS, CHAT)
_MOST_BYTES = 64 << 20  # of one event of a stream
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}


_KEY = "OPENAI_API_KEY"
_HOST, _PORT = "127.0.0.1", 8000
_BACKENDS = {"openai": "completions", "openai-chat": "chat", "vllm": "completions"}


class BrokenStreamError(ValueError):
    """A stream violates the protocol."""


class ServerError(Exception):
    """The server reports an error within a stream."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, and how requests are sent to it."""

    base_url: str | None = flag(
        None,
        f"Address of the server, with or without /v1 at its end. [http://{_HOST}:{_PORT}]",
        panel="Server",
    )
    host: str | None = flag(None, f"In place of --base-url. [{_HOST}]")
    port: int | None = flag(None, f"In place of --base-url. [{_PORT}]", at_least=1, at_most=65535)
    model: str | None = flag(None, "Name of the model on the server. [the only one]")
    endpoint: str = flag(
        "auto", "completions, chat (or their paths), or auto: the one that suits each prompt."
    )
    backend: str | None = flag(
        None,
        "Spelled as in vllm bench serve: openai or vllm are --endpoint completions, openai-chat is "
        "--endpoint chat.",
    )
    api_key: str | None = flag(None, f"Sent as a bearer token. [{_KEY} of the environment]")
    header: tuple[str, ...] = flag(
        (), "Header to send with every request (repeatable).", metavar="<name: value>"
    )
    extra_body: dict[str, Any] | None = flag(
        None, "Fields to add to the body of every request.", metavar="<json>", parse=parse_object
    )
    tokenizer: str | None = flag(
        None,
        "A model's directory, hub name or a demo. Its tokenizer counts tokens where the server "
        "does not, draws random prompts, and renders chats as prompts.",
    )
    request_timeout: float = flag(600.0, "Seconds that one request may take in all.", above=0)
    ready_timeout: float = flag(0.0, "Seconds to wait for the server to start.", at_least=0)

    @cached_property
    def url(self) -> str:
        """The address without /v1; raises UsageError for a bad one."""
        url = self._given_url().rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url must begin with http:// or https://, not {self.base_url}")
        return url

    @cached_property
    def headers(self) -> dict[str, str]:
        """Headers of every request; raises UsageError for a bad one."""
        headers = {}
        for text in self.header:
            name, colon, value = text.partition(":")
            if not colon or not name.strip():
                raise UsageError(f"--header must be such as 'name: value', not {text!r}")
            headers[name.strip()] = value.strip()
        key = self.api_key or os.environ.get(_KEY)
        if key:
            headers.setdefault("Authorization", f"Bearer {key}")
        return headers

    def _given_url(self) -> str:
        if self.base_url is None:
            host = self.host or _HOST
            shown = f"[{host}]" if ":" in host else host
            return f"http://{shown}:{self.port or _PORT}"
        if self.host is not None or self.port is not None:
            raise UsageError("--base-url names host and port; leave --host and --port out")
        return self.base_url

    def wanted_endpoint(self) -> str:
        """The endpoint by --endpoint and --backend; raises UsageError if they disagree."""
        names = {path: name for name, path in PATHS.items()}
        endpoint = names.get(self.endpoint, self.endpoint)
        if endpoint not in ENDPOINTS:
            raise UsageError(
                f"--endpoint must be one of {', '.join(ENDPOINTS)}, not {self.endpoint}"
            )
        if self.backend is None:
            return endpoint
        if self.backend not in _BACKENDS:
            raise UsageError(
                f"--backend must be one of {', '.join(_BACKENDS)}, not {self.backend}: servers are "
                "benchmarked by the OpenAI protocol only"
            )
        meant = _BACKENDS[self.backend]
        if endpoint not in (AUTO, meant):
            raise UsageError(
                f"--backend {self.backend} means --endpoint {meant}, not {self.endpoint}; leave "
                "one out"
            )
        return meant

    def more_fields(self) -> dict[str, Any]:
        """The fields of --extra-body; raises UsageError for those that the benchmark sets."""
        given = self.extra_body or {}
        own = {"model", "prompt", "messages", "stream", "stream_options", "n"} & set(given)
        if own:
            raise UsageError(f"--extra-body may not have {', '.join(sorted(own))}")
        return given


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
        """The path to send the prompt to."""
        return PATHS[self._endpoint(prompt)]

    def body(self, prompt: BenchPrompt) -> bytes:
        """The request's body in UTF-8 JSON.

        Raises:
            UsageError: the endpoint does not accept such a prompt.
        """
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


class EventStream:
    """Splits a byte stream into server-sent events; chunks may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the data of the events that these bytes complete.

        Raises:
            ValueError: an event is not UTF-8 or is too long.
        """
        # An event ends with an empty line; lines end as the standard lets them.
        text = self._rest + data
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""  # a \n may follow
            text = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > _MOST_BYTES:
            raise ValueError("an event of the stream is too long")
        for event in events:
            lines = [
                line[5:].removeprefix(b" ")
                for line in event.split(b"\n")
                if line.startswith(b"data:")
            ]
            if lines:
                yield b"\n".join(lines).decode("utf-8")


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
