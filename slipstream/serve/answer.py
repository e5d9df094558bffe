"""Answers to generating requests, whole or streamed: the base classes of all protocols."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from time import time
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

from pydantic_core import to_json
from starlette.responses import Response

from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.prompts import EncodedPrompt
from slipstream.serve.errors import bad_request
from slipstream.serve.generation import Generation
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol.sampling import SamplingFields
from slipstream.serve.protocol.usage import Usage
from slipstream.serve.sse import DONE, ChunkWriter, EventStream, error_event
from slipstream.serve.updates import Delta, RequestUpdate


class SampleReader(Protocol):
    """Reads the deltas of one sample. Once it has `ended`, further ones would be ignored."""

    @property
    def ended(self) -> bool: ...

    def collect(self, delta: Delta) -> None:
        """Add a delta to the whole answer."""


class AnswerChoice(SampleReader, Protocol):
    """Converts the deltas of one sample to a choice of the protocol."""

    def whole(self) -> dict[str, Any]:
        """The choice of a whole answer, from all collected deltas."""

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks to send for a delta; may be empty."""


Reader = TypeVar("Reader", bound=SampleReader)
Choice = TypeVar("Choice", bound=AnswerChoice)


class Answer(ABC, Generic[Reader]):
    """Converts the output of a generation to an HTTP response."""

    id_prefix: str

    def __init__(
        self,
        service: ModelService,
        body: SamplingFields,
        prompts: Sequence[EncodedPrompt],
        choices: Sequence[Reader],
        counts_output: bool = True,
    ) -> None:
        self.id = f"{self.id_prefix}{body.request_id or uuid4().hex}"
        self._service, self._body = service, body
        self._generation = Generation(prompts, bool(body.return_speculation), counts_output)
        self._choices = choices
        self._created = int(time())

    async def response(self, params: SamplingParams, generates: bool = True) -> Response:
        """Run the prompts and answer; a streamed response reads the updates while it is sent.

        Args:
            generates: whether the engine is needed.
        """
        await self._service.compile(params)
        if generates:
            await self._generation.start(self._service.thread, params, self._body)
        if self._body.stream:
            return EventStream(self._events())
        async with aclosing(self._updates()) as updates:
            async for place, update in updates:
                for choice, delta in self._deltas(place, update):
                    choice.collect(delta)
        document = await self._service.workers(self._document)  # slow if there are many logprobs
        return Response(document, media_type="application/json")

    @abstractmethod
    def _document(self) -> bytes:
        """The whole answer as JSON."""

    @abstractmethod
    def _events(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer; errors are sent as events."""

    async def _updates(self) -> AsyncGenerator[tuple[int, RequestUpdate], None]:
        """Updates until all choices have ended, which may be before the engine is done."""
        async with aclosing(self._generation.updates()) as updates:
            async for place, update in updates:
                yield place, update
                if all(choice.ended for choice in self._choices):
                    return

    def _deltas(self, place: int, update: RequestUpdate) -> Iterator[tuple[Reader, Delta]]:
        """Pair each delta of an update with its choice; `place` is the prompt's index."""
        for delta in update.deltas:
            yield self._choices[delta.index], delta

    def _usage(self) -> Usage:
        return self._generation.usage()


class ChoicesAnswer(Answer[Choice]):
    """An answer that has one choice per sample.

    Attributes:
        kind, chunk_kind: the field `object` of a whole answer and of a chunk.
    """

    kind: str
    chunk_kind: str

    def _document(self) -> bytes:
        answer = {
            **self._common(self.kind),
            "choices": [choice.whole() for choice in self._choices],
            "usage": self._usage().model_dump(exclude_unset=True),
            **self._extra_fields(),
        }
        return to_json(answer, inf_nan_mode="null")

    async def _events(self) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options
        forced = self._service.answers.enable_force_include_usage
        wants_usage = forced or (options is not None and bool(options.include_usage))
        continuous = options is not None and bool(options.continuous_usage_stats)
        writer = ChunkWriter(self._common(self.chunk_kind), wants_usage or continuous)
        first: Mapping[str, Any] = self._prompt_fields()
        try:
            async with aclosing(self._updates()) as updates:
                async for place, update in updates:
                    chunk_choices = [
                        chunk_choice
                        for choice, delta in self._deltas(place, update)
                        for chunk_choice in choice.chunk_choices(delta)
                    ]
                    if chunk_choices:
                        usage = self._usage() if continuous else None
                        yield b"".join(
                            writer.chunk([chunk_choice], usage, None if place else first)
                            for place, chunk_choice in enumerate(chunk_choices)
                        )
                        first = {}
            if wants_usage:
                yield writer.chunk([], self._usage())
            yield DONE
        except Exception as error:
            yield error_event(error)

    def _extra_fields(self) -> dict[str, Any]:
        """Further fields of a whole answer."""
        return {}

    def _prompt_fields(self) -> dict[str, Any]:
        """Further fields of the first chunk."""
        return {}

    def _common(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._service.answers_as(self._body.model),
        }


def check_stream_fields(body: SamplingFields) -> None:
    """Raise ApiError for fields that are not allowed with this value of `stream`."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options goes with stream: true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request(
            "prompt_logprobs cannot be streamed; leave stream out, or use echo with logprobs in "
            "/v1/completions",
            "prompt_logprobs",
        )
