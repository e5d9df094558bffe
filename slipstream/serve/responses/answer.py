"""The answer to a request to /v1/responses, whole or streamed."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from time import time
from typing import Any, Final
from uuid import uuid4

from pydantic import TypeAdapter
from pydantic_core import to_json

from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.prompts import EncodedPrompt
from slipstream.serve.answer import Answer
from slipstream.serve.answer_reader import AnswerReader, Increment
from slipstream.serve.model_service import ModelService, has_images
from slipstream.serve.protocol.base import MOST_INT
from slipstream.serve.protocol.responses import Item, ResponsesRequest
from slipstream.serve.responses.messages import MessageBuilder, dump_messages
from slipstream.serve.responses.output import Event, OutputWriter
from slipstream.serve.responses.store import ResponseStore, StoredResponse
from slipstream.serve.sse import stream_error
from slipstream.serve.updates import Delta

_ITEMS: Final = TypeAdapter[list[Item]](list[Item])


class Increments:
    """A `SampleReader` that keeps increments until they are taken."""

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self.finish_reason: str | None = None
        self._kept: list[Increment] = []

    @property
    def ended(self) -> bool:
        return self.reader.ended

    def collect(self, delta: Delta) -> None:
        if not self.ended:
            increment = self.reader.take(delta)
            self._kept.append(increment)
            self.finish_reason = self.reader.finish_reason(increment.delta)

    def taken(self) -> list[Increment]:
        """The increments since the last call."""
        taken, self._kept = self._kept, []
        return taken


class ResponsesAnswer(Answer[Increments]):
    """An answer as a list of items.

    Args:
        store: where the answer is kept; None: it is not.
    """

    id_prefix = "resp_"
    _body: ResponsesRequest

    def __init__(
        self,
        service: ModelService,
        body: ResponsesRequest,
        prompt: EncodedPrompt,
        params: SamplingParams,
        reader: AnswerReader,
        conversation: MessageBuilder,
        store: ResponseStore | None,
    ) -> None:
        self._increments = Increments(reader)
        super().__init__(service, body, [prompt], [self._increments])
        # a new id that others cannot guess
        self.id = f"{self.id_prefix}{service.options.replica}{uuid4().hex}"
        self._params, self._conversation = params, conversation
        self._store = store if store is not None and store.keeps else None
        num_top = MOST_INT if params.logprob_token_ids else params.logprobs
        self._writer = OutputWriter(reader, num_top)
        self._tokens: list[Any] = []  # with their origins, if requested
        self._num_events = 0

    def _document(self) -> bytes:
        self._write()
        self._writer.finish(self._status())
        return self._completed()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        workers = self._service.workers
        try:
            begun = await workers(self._response, "in_progress")
            yield self._lifecycle("created", begun) + self._lifecycle("in_progress", begun)
            async with aclosing(self._updates()) as updates:
                async for place, update in updates:
                    for increments, delta in self._deltas(place, update):
                        increments.collect(delta)
                    if events := self._write():
                        yield self._encode(events)
            status = self._status()
            yield self._encode(self._writer.finish(status))
            yield self._lifecycle(status, await workers(self._completed))
        except Exception as error:
            api_error = stream_error(error)
            internal = api_error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            code = "server_error" if internal else "invalid_prompt"
            failure = {"code": code, "message": api_error.message}
            yield self._lifecycle("failed", self._response("failed", error=failure))

    def _write(self) -> list[Event]:
        """Write the increments since the last call to the items."""
        events = []
        for increment in self._increments.taken():
            if self._body.return_speculation:
                speculation = self._increments.reader.speculation(increment.delta, increment.parts)
                self._tokens += speculation["tokens"]
            events += self._writer.write(increment)
        return events

    def _status(self) -> str:
        return "incomplete" if self._increments.finish_reason == "length" else "completed"

    def _completed(self) -> bytes:
        """The complete response, which is also stored."""
        status = self._status()
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        speculation = {"speculation": {"tokens": self._tokens}} if self._tokens else {}
        document = self._response(
            status,
            completed_at=int(time()) if status == "completed" else None,
            incomplete_details=details,
            usage=self._response_usage(),
            **speculation,
        )
        if self._store is not None:
            self._conversation.add(_ITEMS.validate_python(_remembered(self._writer.items)))
            messages = self._conversation.messages
            kept = StoredResponse(document, dump_messages(messages), has_images(messages))
            self._store.put(self.id, kept)
        return document

    def _response(self, status: str, **fields: Any) -> bytes:
        body = self._body
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._service.answers_as(body.model),
            "output": self._writer.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self._store is not None,
            "temperature": self._params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }
        return to_json({**response, **fields}, by_alias=True, inf_nan_mode="null")

    def _response_usage(self) -> dict[str, Any]:
        usage = self._usage()
        cached = usage.prompt_tokens_details
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": cached.cached_tokens if cached else 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self._increments.reader.num_reasoning_tokens
            },
            "total_tokens": usage.total_tokens,
        }
        return counts if usage.speculation is None else {**counts, "speculation": usage.speculation}

    def _encode(self, events: Sequence[Event]) -> bytes:
        return b"".join(
            self._numbered(event["type"], to_json(event, inf_nan_mode="null")) for event in events
        )

    def _lifecycle(self, name: str, response: bytes) -> bytes:
        kind = f"response.{name}"
        return self._numbered(kind, b'{"type":"%s","response":%s}' % (kind.encode(), response))

    def _numbered(self, kind: str, event: bytes) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = b'%s,"sequence_number":%d}' % (event[:-1], number)
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def _remembered(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Convert items of an answer to input items, without logprobs and without calls that were cut
    off, which cannot be answered."""
    kept: list[Mapping[str, Any]] = []
    for item in items:
        if item["type"] == "message":
            parts = [{"type": part["type"], "text": part["text"]} for part in item["content"]]
            kept.append({**item, "content": parts})
        elif item["type"] == "reasoning" or item["status"] == "completed":
            kept.append(item)
    return kept
