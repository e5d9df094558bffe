"""/v1/completions: continue prompts."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from time import time
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from slipstream.core.outputs import RequestMetrics
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.prompts import EncodedPrompt, Prompt
from slipstream.serve.bodies import read_body
from slipstream.serve.errors import bad_request
from slipstream.serve.frames import DONE, EventStream, Frames, failure_frame, unless_gone
from slipstream.serve.generation import Generation, joined
from slipstream.serve.model import ServedModel
from slipstream.serve.pieces import (
    Candidates,
    completion_logprobs,
    prompt_logprobs,
    read_tokens,
    speculation,
)
from slipstream.serve.progress import Delta, Progress
from slipstream.serve.protocol.completions import Completion, CompletionChoice, CompletionRequest
from slipstream.serve.sampling import sampling_params, wanted_shape
from slipstream.serve.token_texts import TokenReader

_DEFAULT_TOKENS = 16
_NOTHING: Sequence[Candidates | None] = ()


class Completions:
    """Answers the requests of one endpoint."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def answer(self, request: Request) -> Response:
        """Run a request to its end, or begin to stream it."""
        body = await read_body(request, CompletionRequest, self._model)
        return await unless_gone(request.receive, self._begin(body))

    async def _begin(self, body: CompletionRequest) -> Response:
        prompts = _prompts(body)
        self._model.thread.check_room(len(prompts) * (body.n or 1))
        params, encoded = await self._model.aside(self._prepare, body, prompts)
        await self._model.compile(params)
        answer = _Answer(self._model, body, encoded)
        if answer.needs_engine:
            await answer.generation.start(self._model.thread, params)
        if body.stream:
            return EventStream(answer.events())
        return Response(await answer.whole(), media_type="application/json")

    def _prepare(
        self, body: CompletionRequest, prompts: Sequence[Prompt]
    ) -> tuple[SamplingParams, list[EncodedPrompt]]:
        """Check and tokenize; takes its time where there is much."""
        _check(body)
        params = _params(body)
        encoded = self._model.encode(prompts, params, body.add_special_tokens is not False)
        self._model.require_room(encoded, body.max_tokens, "max_tokens")
        return params, encoded


class _Answer:
    """One request on its way."""

    def __init__(
        self, model: ServedModel, body: CompletionRequest, prompts: Sequence[EncodedPrompt]
    ) -> None:
        self.id = f"cmpl-{uuid4().hex}"
        self._model, self._body = model, body
        self.generation = Generation(
            prompts, bool(body.return_speculation), counts_output=body.max_tokens != 0
        )
        self._num_samples = body.n or 1
        self._choices = [
            _Choice(model, body, place * self._num_samples + sample, prompt)
            for place, prompt in enumerate(prompts)
            for sample in range(self._num_samples)
        ]
        self._created = int(time())

    @property
    def needs_engine(self) -> bool:
        """Nothing is generated and nothing is to be known of the prompt: it is echoed at most."""
        return self._body.max_tokens != 0 or _num_prompt_logprobs(self._body) is not None

    async def whole(self) -> bytes:
        """The answer in one piece."""
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        async with aclosing(self._steps()) as steps:
            async for place, progress in steps:
                for choice, delta in self._gains(place, progress):
                    deltas[choice.index].append(delta)
        return await self._model.aside(self._document, deltas)

    def _document(self, deltas: Sequence[Sequence[Delta]]) -> bytes:
        """Takes its time where there are many logprobs."""
        answer = Completion(
            **self._head("text_completion"),
            choices=[
                CompletionChoice(**choice.whole(joined(own)))
                for choice, own in zip(self._choices, deltas, strict=True)
            ],
            usage=self.generation.usage(),
        )
        return answer.model_dump_json(exclude_unset=True).encode()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        options = self._body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        frames = Frames(self._head("text_completion"), wants_usage or continuous)
        try:
            async with aclosing(self._steps()) as steps:
                async for place, progress in steps:
                    usage = self.generation.usage() if continuous else None
                    pieces = [
                        frames.chunk([piece], usage)
                        for choice, delta in self._gains(place, progress)
                        for piece in choice.pieces(delta)
                    ]
                    yield b"".join(pieces)
            if wants_usage:
                yield frames.chunk([], self.generation.usage())
            yield DONE
        except Exception as error:
            yield failure_frame(error)

    def _steps(self) -> AsyncGenerator[tuple[int, Progress], None]:
        return self.generation.steps() if self.needs_engine else self._echoed()

    async def _echoed(self) -> AsyncGenerator[tuple[int, Progress], None]:
        for place in range(len(self.generation.prompts)):
            yield place, Progress((), True, RequestMetrics())

    def _gains(self, place: int, progress: Progress) -> Iterator[tuple["_Choice", Delta]]:
        """What the samples of a prompt gained."""
        first = place * self._num_samples
        own = self._choices[first : first + self._num_samples]
        if progress.prompt_logprobs is not None:
            for choice in own:
                choice.prompt_rows = progress.prompt_logprobs
        if self._body.max_tokens == 0:  # nothing is wanted
            return ((choice, _NO_OUTPUT) for choice in own)
        return ((own[delta.index], delta) for delta in progress.deltas)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model.name}


class _Choice:
    """One continuation of one prompt.

    Attributes:
        prompt_rows: logprobs of the prompt, once they are there.
    """

    def __init__(
        self, model: ServedModel, body: CompletionRequest, index: int, prompt: EncodedPrompt
    ) -> None:
        self.index = index
        self.prompt_rows: Sequence[Candidates | None] = _NOTHING
        self._model, self._body, self._prompt = model, body, prompt
        self._skip_special = body.skip_special_tokens is not False
        self._reads = body.logprobs is not None or bool(body.return_speculation)
        self._reader: TokenReader | None = None
        self._begun = False

    def whole(self, delta: Delta) -> dict[str, Any]:
        """The choice in one piece."""
        first, *rest = self.pieces(delta)
        for piece in rest:  # behind the echo
            text, logprobs = first["text"] + piece["text"], first["logprobs"]
            if logprobs is not None:
                logprobs = {name: [*logprobs[name], *piece["logprobs"][name]] for name in logprobs}
            first = {**piece, "text": text, "logprobs": logprobs}
        if self._body.prompt_logprobs is not None:
            first["prompt_logprobs"] = prompt_logprobs(
                self._model.texts,
                self._prompt.token_ids,
                self.prompt_rows,
                self._body.prompt_logprobs,
            )
        return first

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """What a chunk holds, or two at the start of an echo."""
        if self._body.echo and not self._begun:
            self._begun = True
            return [self._echo(), self._piece(delta)]
        return [self._piece(delta)]

    def _piece(self, delta: Delta) -> dict[str, Any]:
        piece = _piece(self.index, delta.text, delta.finish_reason, delta.stop_reason)
        if self._reads:
            if self._reader is None:
                self._reader = TokenReader(self._model.texts, self._skip_special)
            tokens = read_tokens(self._reader, delta.token_ids)
            if self._body.logprobs is not None:
                piece["logprobs"] = completion_logprobs(
                    self._model.texts, tokens, delta.logprobs or _NOTHING, self._body.logprobs
                )
            if self._body.return_speculation:
                piece["speculation"] = speculation(delta, tokens)
        return piece

    def _echo(self) -> dict[str, Any]:
        text = self._prompt_text()
        piece = _piece(self.index, text, None, None)
        if self._body.return_speculation:
            piece["speculation"] = {"tokens": []}
        if self._body.logprobs is not None:
            reader = TokenReader(self._model.texts, not self._shows_special(text))
            tokens = read_tokens(reader, self._prompt.token_ids)
            piece["logprobs"] = completion_logprobs(
                self._model.texts, tokens, self.prompt_rows, self._body.logprobs
            )
        self._reader = TokenReader(self._model.texts, self._skip_special, len(text))
        return piece

    def _prompt_text(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        ids = self._prompt.token_ids
        return self._model.tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _shows_special(self, text: str) -> bool:
        """Whether special tokens stand in the text, or were put around it by the tokenizer."""
        ids = self._prompt.token_ids
        return self._model.tokenizer.decode(ids, skip_special_tokens=False) == text


_NO_OUTPUT = Delta(0, "", [], [], [], "length", None)


def _piece(
    index: int, text: str, finish_reason: str | None, stop_reason: str | int | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def _check(body: CompletionRequest) -> None:
    """What single fields cannot tell."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            f"best_of={body.best_of} differs from n={body.n or 1}: nothing is drawn that is not "
            "returned; leave best_of out and choose among n yourself",
            "best_of",
        )
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options goes with stream: true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request(
            "prompt_logprobs cannot be streamed; leave stream out, or use echo with logprobs",
            "prompt_logprobs",
        )
    if body.max_tokens == 0 and body.min_tokens:
        raise bad_request("min_tokens must not exceed max_tokens, which is 0", "min_tokens")


def _prompts(body: CompletionRequest) -> list[Prompt]:
    given: Any = body.prompt
    listed = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    return [it if isinstance(it, str) else {"prompt_token_ids": it} for it in listed]


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """For an echo with logprobs, for `prompt_logprobs`, or the larger for both."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((it for it in wanted if it is not None), default=None)


def _params(body: CompletionRequest) -> SamplingParams:
    max_tokens = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    shape = wanted_shape(body, body.response_format)
    params = sampling_params(
        body,
        max_tokens or 1,  # the engine gives a token at least, which is left out then
        body.logprobs,
        shape,
        prompt_logprobs=_num_prompt_logprobs(body),
    )
    return params if max_tokens else replace(params, n=1)
