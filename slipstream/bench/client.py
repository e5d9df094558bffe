"""A client of an OpenAI-compatible server that times streams and records failures."""

import json
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import aiohttp

from slipstream.bench.datasets import BenchPrompt, TextEncoder
from slipstream.bench.options import Server
from slipstream.bench.protocol import (
    BrokenStreamError,
    EventParser,
    RequestForm,
    ServerError,
    error_message,
    read_event,
)
from slipstream.bench.record import CHUNKS, TOKENIZER, USAGE, Arrival, Record

# Servers close idle connections after 5 s or more; one that is about to be closed is not reused.
_IDLE_SECONDS = 2.0
_DONE = "[DONE]"
_MOST_OF_A_MESSAGE = 200


class Client:
    """Connections to a server; enter it to open them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=self._server.request_timeout),
            headers=self._server.headers,
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.close()

    async def complete(
        self,
        prompt: BenchPrompt,
        form: RequestForm,
        encoder: TextEncoder | None = None,
        due: float | None = None,
    ) -> Record:
        """Send a request and read its answer; errors are recorded, not raised."""
        path, body = form.path(prompt), form.body(prompt)
        record = Record(id=prompt.id, sent=perf_counter(), due=due)
        try:
            await self._stream(path, body, record)
        except TimeoutError:
            record.error = f"no end within {self._server.request_timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            record.error = connection_error(error)
        except BrokenStreamError as error:
            record.error = f"broken stream: {error}"
        except ServerError as error:
            record.error = f"error in the stream: {_short(str(error))}"
        _count(record, prompt, encoder)
        return record

    async def get(self, path: str) -> tuple[int, str]:
        """Get a path: its status and body; raises OSError or aiohttp.ClientError."""
        async with self._opened.get(self._server.url + path) as response:
            return response.status, await response.text(errors="replace")

    async def post(self, path: str) -> int:
        """Post an empty request: its status; raises OSError or aiohttp.ClientError."""
        async with self._opened.post(self._server.url + path) as response:
            return response.status

    @property
    def _opened(self) -> aiohttp.ClientSession:
        assert self._session is not None, "enter the client first"
        return self._session

    async def _stream(self, path: str, body: bytes, record: Record) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._opened.post(
            self._server.url + path, data=body, headers=headers
        ) as response:
            if response.status != 200:
                text = await response.text(errors="replace")
                record.error = f"HTTP {response.status}: {_short(_message(text))}"
                return
            await self._read(response, record)

    async def _read(self, response: aiohttp.ClientResponse, record: Record) -> None:
        stream, texts, done = EventParser(), [], False
        try:
            async for data in response.content.iter_any():
                now = perf_counter()
                for event in stream.feed(data):
                    if event == _DONE:
                        done = True
                        continue
                    chunk = read_event(event)
                    if chunk.has_output:
                        record.arrivals.append(Arrival(now, chunk.num_tokens))
                        texts.append(chunk.text)
                    record.finish_reason = chunk.finish_reason or record.finish_reason
                    record.usage = chunk.usage or record.usage
        finally:
            record.text = "".join(texts)
        if not done and record.finish_reason is None:
            raise BrokenStreamError("it ended without a finish_reason and without [DONE]")
        if not record.arrivals:
            record.error = "no tokens"


def connection_error(error: Exception) -> str:
    """A message that is equal for all requests with this error, so that they can be counted."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection broke off within the answer"
    return f"{type(error).__name__}: {_short(str(error))}"


def _count(record: Record, prompt: BenchPrompt, encoder: TextEncoder | None) -> None:
    """Count tokens by the server's usage, else by a tokenizer, else by chunks."""
    reported = _count_of(record.usage, "completion_tokens")
    if reported is not None:
        record.num_tokens, record.counted_by = reported, USAGE
    elif encoder is not None:
        record.num_tokens = len(encoder.encode(record.text, add_special_tokens=False))
        record.counted_by = TOKENIZER
    else:
        record.num_tokens, record.counted_by = len(record.arrivals), CHUNKS
    if not record.failed and record.num_tokens == 0:
        record.error = "no tokens"
    given = _count_of(record.usage, "prompt_tokens")
    record.num_prompt_tokens = _prompt_tokens(prompt, encoder) if given is None else given


def _count_of(usage: Mapping[str, Any], key: str) -> int | None:
    value = usage.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _prompt_tokens(prompt: BenchPrompt, encoder: TextEncoder | None) -> int:
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    if encoder is None:
        return 0
    texts = [prompt.text or "", *(str(it.get("content", "")) for it in prompt.messages or ())]
    return sum(len(encoder.encode(text, add_special_tokens=False)) for text in texts)


def _message(body: str) -> str:
    try:
        return error_message(json.loads(body))
    except ValueError:
        return body


def _short(text: str) -> str:
    """Shorten to one line."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_OF_A_MESSAGE else f"{line[: _MOST_OF_A_MESSAGE - 1]}…"
