"""The endpoint /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response

from slipstream.core.sampling_params import SamplingParams
from slipstream.core.structured import StructuredOutput
from slipstream.engine.prompts import EncodedPrompt, Prompt
from slipstream.serve.answer import ChoicesAnswer, check_stream_fields
from slipstream.serve.answer_reader import AnswerReader
from slipstream.serve.conversation import note_ignored, render, require_template
from slipstream.serve.conversation_images import read_images
from slipstream.serve.errors import bad_request
from slipstream.serve.logprobs_format import TokenFields, prompt_logprobs
from slipstream.serve.model_service import ModelService
from slipstream.serve.output.parts import OutputConstraints, OutputPart
from slipstream.serve.prompt_fields import placed, truncation
from slipstream.serve.protocol.base import MOST_INT
from slipstream.serve.protocol.chat import ChatRequest
from slipstream.serve.protocol.usage import CompletionTokensDetails, Usage
from slipstream.serve.sampling import logit_bias, sampling_params, structured_output
from slipstream.serve.tools.call_format import Schemas, ToolFormat
from slipstream.serve.tools.events import AnswerEvent, Arguments, CallBegun, Content, Reasoning
from slipstream.serve.tools.tool_choice import ToolUse, choose_tools
from slipstream.serve.updates import Delta, RequestUpdate, join_deltas


class ChatAnswerChoice:
    """One choice of a chat completion, whole or streamed."""

    def __init__(self, body: ChatRequest, reader: AnswerReader, index: int, role: str) -> None:
        self._body, self._reader, self._index, self._role = body, reader, index, role
        self._token_fields = TokenFields(body)
        self._echo = _last_answer(body) if body.echo else ""
        self._deltas: list[Delta] = []
        self._parts: list[OutputPart] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._num_calls = 0
        self._begun = False

    @property
    def ended(self) -> bool:
        return self._reader.ended

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    def collect(self, delta: Delta) -> None:
        if self.ended:
            return
        increment = self._reader.take(delta)
        found = self._found(increment.events)
        self._deltas.append(increment.delta)
        self._parts += increment.parts or ()
        self._text.append(found.get("content", ""))
        self._reasoning.append(found.get("reasoning", ""))
        for call in found.get("tool_calls", ()):
            if call["index"] == len(self._calls):
                self._calls.append({"id": call["id"], "type": "function", "function": {}})
            whole, more = self._calls[call["index"]]["function"], call["function"]
            whole.setdefault("name", more.get("name"))
            whole["arguments"] = whole.get("arguments", "") + more["arguments"]

    def whole(self) -> dict[str, Any]:
        delta, text = join_deltas(self._deltas), "".join([self._echo, *self._text])
        message: dict[str, Any] = {
            "role": self._role,
            "content": None if self._calls and not text else text,
            "refusal": None,
        }
        reasoning = "".join(self._reasoning)
        if reasoning:
            message.update(_reasoning(reasoning))
        if self._calls:
            message["tool_calls"] = self._calls
        return {"message": message, **self._rest(delta, self._parts or None)}

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of this delta's chunks; empty while the text may begin a tool call."""
        if self.ended:
            return []
        increment = self._reader.take(delta)
        found = self._found(increment.events)
        chunk_choices = []
        if not self._begun:
            self._begun = True
            opening = {"role": self._role, "content": ""}
            begins = [opening, {"content": self._echo}] if self._echo else [opening]
            rest = {**self._rest(_EMPTY, None), "finish_reason": None}
            chunk_choices = [{"delta": it, **rest} for it in begins]
        rest = self._rest(increment.delta, increment.parts)
        if found or self.ended or any(rest.get(name) for name in _TELLING):
            chunk_choices.append({"delta": found, **rest})
        return chunk_choices

    def _found(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        """Convert events to the `delta` field of a chunk."""
        texts = [event.text for event in events if isinstance(event, Content)]
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, CallBegun):
                function = {"name": event.name, "arguments": ""}
                calls[self._num_calls] = {
                    "index": self._num_calls,
                    "id": self._reader.new_call_id(),
                    "type": "function",
                    "function": function,
                }
                self._num_calls += 1
            elif isinstance(event, Arguments):
                last = self._num_calls - 1
                call = calls.setdefault(last, {"index": last, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
        found: dict[str, Any] = {"content": "".join(texts)} if texts else {}
        if reasoning:
            found.update(_reasoning(reasoning))
        return {**found, "tool_calls": list(calls.values())} if calls else found

    def _rest(self, delta: Delta, parts: Sequence[OutputPart] | None) -> dict[str, Any]:
        """The fields of a choice besides its message or delta; `parts` as in `Increment`."""
        body, reader = self._body, self._reader
        rest: dict[str, Any] = {
            "index": self._index,
            "logprobs": None,
            "finish_reason": reader.finish_reason(delta),
            "stop_reason": delta.stop_reason,
            **self._token_fields.of(delta, self.ended and delta is not _EMPTY),
        }
        num_top = MOST_INT if body.logprob_token_ids else body.top_logprobs or 0
        if body.logprobs:
            rest["logprobs"] = reader.logprobs(delta, parts, num_top)
        if body.return_speculation:
            rest["speculation"] = reader.speculation(delta, parts)
        return rest


def _last_answer(body: ChatRequest) -> str:
    """The text that `echo` repeats: the last message's, if it is the assistant's, else ""."""
    last = body.messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    content = last.content
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _reasoning(text: str) -> dict[str, str]:
    """The reasoning under both names of its field; older clients read the second."""
    return {"reasoning": text, "reasoning_content": text}


# A chunk without text is sent only if it has one of these fields.
_TELLING = ("logprobs", "speculation", "token_ids")
_EMPTY = Delta(0, "", [], None, [], None, None)


class ChatEndpoint:
    """Handles POST /v1/chat/completions."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def answer(self, body: ChatRequest) -> Response:
        """Answer a conversation, whole or streamed."""
        service = self._service
        service.thread.check_room(body.n or 1)
        run = service.pool_for(body.messages, body.chat_template)
        if body.chat_template is not None:
            service = await run(service.with_template, body.chat_template)
        chat = await run(prepare, service, body)
        choices = [
            ChatAnswerChoice(body, chat.reader(service, body), index, service.answers.response_role)
            for index in range(body.n or 1)
        ]
        answer = _ChatAnswer(service, body, [chat.prompt], choices)
        return note_ignored(await answer.response(chat.params), chat.ignored)


@dataclass(frozen=True)
class PreparedChat:
    """A conversation that is ready to be submitted to the engine.

    Attributes:
        tools: how the model's tool calls are constrained and parsed.
        params: sampling parameters; their grammar is not compiled yet.
        prompt: the rendered and tokenized conversation.
        ignored: paths of speaker names that the chat template does not render.
    """

    tools: ToolUse
    params: SamplingParams
    prompt: EncodedPrompt
    ignored: Sequence[str]

    def reader(self, service: ModelService, body: ChatRequest) -> AnswerReader:
        return AnswerReader(service, body, self.tools, self.prompt.token_ids)


# Constraints that may themselves allow for tool calls in the text.
_FREE_KINDS = ("regex", "grammar")


def prepare(service: ModelService, body: ChatRequest, ends_early: bool = False) -> PreparedChat:
    """Validate, render and tokenize a conversation of any protocol; slow for large requests.

    Args:
        ends_early: whether prompt and `max_tokens` may together exceed the model's maximum length;
            the answer then ends there.

    Raises:
        ApiError: the request is invalid, or not possible with this model.
    """
    _check(body)
    service.require_logprobs(body.top_logprobs, "top_logprobs")
    service.require_logprobs(body.prompt_logprobs, "prompt_logprobs")
    require_template(service.template)
    tools = choose_tools(body, service)
    params = _params(body, tools, service)
    ignored: list[str] = []
    options = body.mm_processor_kwargs or {}
    images = read_images(service, body.messages, options)
    written = render(service, body.messages, body, tools.in_prompt, ignored)
    given: Prompt = written if isinstance(written, str) else {"prompt_token_ids": written}
    cut = truncation(body, params.max_tokens, service.max_model_len)
    if images:
        if cut is not None:
            raise bad_request(
                "truncate_prompt_tokens could cut an image; leave it out, or leave images out",
                "truncate_prompt_tokens",
            )
        service.require_short([given], "messages")
        name = "prompt" if isinstance(written, str) else "prompt_token_ids"
        media = {"multi_modal_data": {"image": images}, "mm_processor_kwargs": options}
        seen: Any = {name: written, **media}
        given = seen
    special = body.add_special_tokens is True
    [found] = service.encode([given], params, special, "messages", cut)
    prompt = placed(found, body, service.adapter(body.model))
    most, name = _max_tokens(body)
    service.require_room([prompt], None if ends_early else most, name, "messages")
    structured = _structured(body, tools, service, prompt.token_ids)
    return PreparedChat(tools, replace(params, structured=structured), prompt, ignored)


class _ChatAnswer(ChoicesAnswer[ChatAnswerChoice]):
    id_prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    _body: ChatRequest
    _prompt_logprobs: Any = None

    def _deltas(
        self, place: int, update: RequestUpdate
    ) -> Iterator[tuple[ChatAnswerChoice, Delta]]:
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = update.prompt_logprobs
        return super()._deltas(place, update)

    def _usage(self) -> Usage:
        usage = super()._usage()
        if self._service.output_format is not None:
            usage.completion_tokens_details = CompletionTokensDetails(
                reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices)
            )
        return usage

    def _extra_fields(self) -> dict[str, Any]:
        num_top, fields = self._body.prompt_logprobs, self._prompt_fields()
        if num_top is not None:
            token_ids, texts = self._generation.prompts[0].token_ids, self._service.texts
            rows = prompt_logprobs(texts, token_ids, self._prompt_logprobs, num_top)
            fields["prompt_logprobs"] = rows
        return fields

    def _prompt_fields(self) -> dict[str, Any]:
        prompt, fields = self._generation.prompts[0], dict[str, Any]()
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = prompt.token_ids
        if self._body.return_prompt_text:
            text, tokenizer = prompt.text, self._service.tokenizer
            if text is None:
                text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            fields["prompt_text"] = text
        return fields


def _check(body: ChatRequest) -> None:
    """Raise ApiError for contradictory fields."""
    check_stream_fields(body)
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


def _params(body: ChatRequest, tools: ToolUse, service: ModelService) -> SamplingParams:
    """The sampling parameters without `structured`, which depends on the prompt."""
    overrides: dict[str, Any] = {"logit_bias": logit_bias(body, service)}
    # Stop strings end the content: a parser looks for them there, and calls alone have none.
    if service.output_format is not None or tools.only_calls:
        overrides["stop"] = ()
    if tools.keeps_special(service.tokenizer):
        overrides["skip_special_tokens"] = False
    return sampling_params(
        body,
        service.engine.resolved.sampling_defaults,
        _max_tokens(body)[0],
        (body.top_logprobs or 0) if body.logprobs else None,
        **overrides,
    )


def _structured(
    body: ChatRequest, tools: ToolUse, service: ModelService, prompt: Sequence[int]
) -> StructuredOutput | None:
    """The constraint on the output, if any; ApiError if tools and format exclude each other."""
    content, format = structured_output(body, body.response_format), service.output_format
    if tools.grammar is not None:
        _refuse(content, "tools that are strict, required or named say what the answer must be")
    elif isinstance(tools.format, ToolFormat) and content and content.kind not in _FREE_KINDS:
        _refuse(content, "JSON and choices leave no room for tool calls")
    budget = _budget(body, service)
    if format is not None:
        functions: Schemas = {name: {} for name in tools.functions}
        constraints = OutputConstraints(
            content=content, calls=tools.grammar, functions=functions, budget=budget
        )
        return format.framed(constraints, prompt, bool(body.continue_final_message))
    return content if tools.grammar is None else StructuredOutput(grammar=tools.grammar)


def _budget(body: ChatRequest, service: ModelService) -> int | None:
    """Maximum number of reasoning tokens; None: no limit."""
    budget = body.thinking_token_budget
    if budget is None or budget == -1:
        return None
    if service.output_format is None:
        raise bad_request(
            "thinking_token_budget needs a model whose thinking the server can tell apart; leave "
            "it out, or start the server with the --reasoning-parser of this model",
            "thinking_token_budget",
        )
    return None if budget >= service.max_model_len else budget


def _max_tokens(body: ChatRequest) -> tuple[int | None, str]:
    """The maximum number of output tokens (None: not given), and the name of its field."""
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    return body.max_completion_tokens, "max_completion_tokens"


def _refuse(structured: StructuredOutput | None, why: str) -> None:
    if structured is not None:
        raise bad_request(
            f"{why}; leave response_format and the like out, or ask for tool_choice none", "tools"
        )
