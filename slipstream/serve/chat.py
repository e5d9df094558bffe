"""/v1/chat/completions: answer conversations."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from time import time
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.prompts import EncodedPrompt
from slipstream.serve.bodies import read_body
from slipstream.serve.chat_choice import ChatAnswerChoice
from slipstream.serve.conversation import render, require_template
from slipstream.serve.errors import bad_request
from slipstream.serve.frames import DONE, EventStream, Frames, failure_frame, unless_gone
from slipstream.serve.generation import Generation
from slipstream.serve.model import ServedModel
from slipstream.serve.pieces import prompt_logprobs
from slipstream.serve.progress import Progress
from slipstream.serve.protocol.chat import ChatChoice, ChatCompletion, ChatRequest
from slipstream.serve.sampling import sampling_params, wanted_shape
from slipstream.serve.tools.choice import ToolUse, choose_tools


class Chats:
    """Answers the requests of one endpoint."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def answer(self, request: Request) -> Response:
        """Run a request to its end, or begin to stream it."""
        body = await read_body(request, ChatRequest, self._model)
        return await unless_gone(request.receive, self._begin(body))

    async def _begin(self, body: ChatRequest) -> Response:
        model = self._model
        model.thread.check_room(body.n or 1)
        tools, params, prompts = await model.aside(self._prepare, body)
        await model.compile(params)
        generation = Generation(prompts, bool(body.return_speculation))
        answer = _Answer(model, body, generation, tools)
        await generation.start(model.thread, params)
        if body.stream:
            return EventStream(answer.events())
        return Response(await answer.whole(), media_type="application/json")

    def _prepare(self, body: ChatRequest) -> tuple[ToolUse, SamplingParams, list[EncodedPrompt]]:
        """Check, render and tokenize; takes its time where there is much."""
        model = self._model
        _check(body)
        require_template(model.template)
        tools = choose_tools(body, model)
        params = _params(body, tools, model)
        text = render(model.template, body, tools.told)
        prompts = model.encode([text], params, body.add_special_tokens is True, "messages")
        model.require_room(prompts, *_asked_tokens(body), "messages")
        return tools, params, prompts


class _Answer:
    """One request on its way."""

    def __init__(
        self, model: ServedModel, body: ChatRequest, generation: Generation, tools: ToolUse
    ) -> None:
        self.id = f"chatcmpl-{uuid4().hex}"
        self._model, self._body, self._generation = model, body, generation
        self._choices = [
            ChatAnswerChoice(model, body, tools, index) for index in range(body.n or 1)
        ]
        self._prompt_rows: Any = None
        self._created = int(time())

    async def whole(self) -> bytes:
        """The answer in one piece."""
        async with aclosing(self._steps()) as steps:
            async for progress in steps:
                for delta in progress.deltas:
                    self._choices[delta.index].collect(delta)
        return await self._model.aside(self._document)

    def _document(self) -> bytes:
        """Takes its time where there are many logprobs."""
        rows = {}
        if self._body.prompt_logprobs is not None:
            rows["prompt_logprobs"] = self._of_prompt(self._body.prompt_logprobs)
        answer = ChatCompletion(
            **self._head("chat.completion"),
            choices=[ChatChoice(**choice.whole()) for choice in self._choices],
            usage=self._generation.usage(),
            **rows,
        )
        return answer.model_dump_json(exclude_unset=True).encode()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        options = self._body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        frames = Frames(self._head("chat.completion.chunk"), wants_usage or continuous)
        try:
            async with aclosing(self._steps()) as steps:
                async for progress in steps:
                    usage = self._generation.usage() if continuous else None
                    pieces = [
                        frames.chunk([piece], usage)
                        for delta in progress.deltas
                        for piece in self._choices[delta.index].pieces(delta)
                    ]
                    if pieces:
                        yield b"".join(pieces)
            if wants_usage:
                yield frames.chunk([], self._generation.usage())
            yield DONE
        except Exception as error:
            yield failure_frame(error)

    async def _steps(self) -> AsyncGenerator[Progress, None]:
        """Until all choices have all they want, which may be before the engine is done."""
        async with aclosing(self._generation.steps()) as steps:
            async for _, progress in steps:
                if progress.prompt_logprobs is not None:
                    self._prompt_rows = progress.prompt_logprobs
                yield progress
                if all(choice.ended for choice in self._choices):
                    return

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model.name}

    def _of_prompt(self, num_top: int) -> Any:
        prompt = self._generation.prompts[0]
        return prompt_logprobs(self._model.texts, prompt.token_ids, self._prompt_rows, num_top)


def _check(body: ChatRequest) -> None:
    """What single fields cannot tell."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options goes with stream: true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed; leave stream out", "prompt_logprobs")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs goes with logprobs: true", "top_logprobs")
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise bad_request(
            "max_tokens is the older name of max_completion_tokens; give one of them", "max_tokens"
        )
    if 0 in (older, newer):
        name = "max_tokens" if older == 0 else "max_completion_tokens"
        raise bad_request(f"{name} must be at least 1", name)


def _params(body: ChatRequest, tools: ToolUse, model: ServedModel) -> SamplingParams:
    shape = wanted_shape(body, body.response_format)
    if tools.grammar is not None:
        _refuse(shape, "tools that are strict, required or named say what the answer must be")
        shape = {"grammar": tools.grammar}
    elif tools.format is not None and not {"regex", "grammar"} & set(shape):
        _refuse(shape, "JSON and choices leave no room for tool calls")
    overrides: dict[str, Any] = {}
    if tools.keeps_special(model.tokenizer):
        overrides["skip_special_tokens"] = False
    return sampling_params(
        body,
        _asked_tokens(body)[0],
        (body.top_logprobs or 0) if body.logprobs else None,
        shape,
        **overrides,
    )


def _asked_tokens(body: ChatRequest) -> tuple[int | None, str]:
    """Most output tokens, if the request says, and the name of its field."""
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    return body.max_completion_tokens, "max_completion_tokens"


def _refuse(shape: Mapping[str, Any], why: str) -> None:
    if shape:
        raise bad_request(
            f"{why}; leave response_format and the like out, or ask for tool_choice none", "tools"
        )
