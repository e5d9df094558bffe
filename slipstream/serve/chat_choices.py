"""One choice of an answer to a conversation: reasoning, text, tool calls, logprobs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from slipstream.serve.logprobs_format import chat_logprobs, read_tokens, speculation
from slipstream.serve.model_service import ModelService
from slipstream.serve.output.parts import AnswerParser, CallsInText, Part, Piece, Reading
from slipstream.serve.protocol.chat import ChatRequest
from slipstream.serve.token_texts import TokenReader
from slipstream.serve.tools.choice import ToolUse
from slipstream.serve.tools.events import (
    AnswerEvent,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
)
from slipstream.serve.updates import Delta, join_deltas


class ChatAnswerChoice:
    """An `AnswerChoice`: finds reasoning and tool calls in the output of one sample.

    Attributes:
        num_reasoning_tokens: so far, where the model's format tells them apart.
    """

    def __init__(
        self,
        service: ModelService,
        body: ChatRequest,
        tools: ToolUse,
        prompt: Sequence[int],
        index: int,
    ) -> None:
        self.ended = False
        self.num_reasoning_tokens = 0
        self._service, self._body, self._tools, self._index = service, body, tools, index
        skip_special = body.skip_special_tokens is not False
        self._parser = _parser(service, body, tools, prompt)
        self._reader = TokenReader(service.texts, skip_special)
        self._deltas: list[Delta] = []
        self._parts: list[Part] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._num_calls = 0
        self._begun = False

    def collect(self, delta: Delta) -> None:
        if self.ended:
            return
        delta, parts, found = self._take(delta)
        self._deltas.append(delta)
        self._parts += parts or ()
        self._text.append(found.get("content", ""))
        self._reasoning.append(found.get("reasoning", ""))
        for call in found.get("tool_calls", ()):
            if call["index"] == len(self._calls):
                self._calls.append({"id": call["id"], "type": "function", "function": {}})
            whole, more = self._calls[call["index"]]["function"], call["function"]
            whole.setdefault("name", more.get("name"))
            whole["arguments"] = whole.get("arguments", "") + more["arguments"]

    def whole(self) -> dict[str, Any]:
        delta, text = join_deltas(self._deltas), "".join(self._text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not text else text,
            "refusal": None,
        }
        reasoning = "".join(self._reasoning)
        if reasoning:
            message.update(_reasoning(reasoning))
        if self._calls:
            message["tool_calls"] = self._calls
        return {"message": message, **self._rest(delta, self._parts or None)}

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """None while the text may turn out to be a call."""
        if self.ended:
            return []
        delta, parts, found = self._take(delta)
        pieces = []
        if not self._begun:
            self._begun = True
            opening = {"role": "assistant", "content": ""}
            pieces.append({"delta": opening, **self._rest(_EMPTY, None)})
        rest = self._rest(delta, parts)
        if found or self.ended or rest["logprobs"] or "speculation" in rest:
            pieces.append({"delta": found, **rest})
        return pieces

    def _take(self, delta: Delta) -> tuple[Delta, Sequence[Part] | None, dict[str, Any]]:
        """As much of the delta as belongs to the answer, the parts of its tokens where they are
        told apart, and the field `delta` of a chunk."""
        over = delta.finish_reason is not None
        if self._parser is None:
            self.ended = over
            return delta, None, {"content": delta.text}
        piece = self._parser.feed(delta)
        if piece.stop is not None:
            delta, over = _cut(delta, piece), True
        self.num_reasoning_tokens += sum(part is Part.REASONING for part in piece.parts or ())
        events = [*piece.events, *(self._parser.finish() if over else ())]
        if self._tools.single:
            events = self._up_to_first_call(events)
        self.ended = self.ended or over
        return delta, piece.parts, self._found(events)

    def _up_to_first_call(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        for place, event in enumerate(events):
            if isinstance(event, CallEnded):
                self.ended = True
                return events[: place + 1]
        return events

    def _found(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        text = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, CallBegun):
                function = {"name": event.name, "arguments": ""}
                calls[self._num_calls] = {
                    "index": self._num_calls,
                    "id": self._new_id(),
                    "type": "function",
                    "function": function,
                }
                self._num_calls += 1
            elif isinstance(event, Arguments):
                last = self._num_calls - 1
                call = calls.setdefault(last, {"index": last, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
        found: dict[str, Any] = {"content": text} if text else {}
        if reasoning and self._body.include_reasoning is not False:
            found.update(_reasoning(reasoning))
        return {**found, "tool_calls": list(calls.values())} if calls else found

    def _new_id(self) -> str:
        assert self._tools.format is not None
        return self._tools.format.call_id()

    def _rest(self, delta: Delta, parts: Sequence[Part] | None) -> dict[str, Any]:
        """All fields but the text and the calls.

        Args:
            parts: of the delta's tokens; None where they are not told apart.
        """
        rest: dict[str, Any] = {
            "index": self._index,
            "logprobs": None,
            "finish_reason": self._finish_reason(delta),
            "stop_reason": delta.stop_reason,
        }
        if self._body.logprobs and delta.logprobs:
            num_top = self._body.top_logprobs or 0
            tokens, rows = [*delta.token_ids], [*delta.logprobs]
            if parts is not None:
                own = [part is Part.CONTENT for part in parts]
                tokens, rows = [*compress(tokens, own)], [*compress(rows, own)]
            if rows:
                rest["logprobs"] = chat_logprobs(self._service.texts, tokens, rows, num_top)
        if self._body.return_speculation:
            told = speculation(delta, read_tokens(self._reader, delta.token_ids))
            for token, part in zip(told["tokens"], parts or (), strict=False):
                token["part"] = part.value
            rest["speculation"] = told
        return rest

    def _finish_reason(self, delta: Delta) -> str | None:
        if self.ended and self._num_calls and delta.finish_reason != "length":
            return "tool_calls"
        return delta.finish_reason


def _parser(
    service: ModelService, body: ChatRequest, tools: ToolUse, prompt: Sequence[int]
) -> AnswerParser | None:
    """None where all text is content."""
    skip_special = body.skip_special_tokens is not False
    if service.output_format is None:
        parser = tools.parser(service.tokenizer, skip_special)
        return None if parser is None else CallsInText(parser)
    reading = Reading(
        prompt=prompt,
        functions=tools.functions if tools.format is not None else None,
        skip_special=skip_special,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        include_stop=body.include_stop_str_in_output is True,
        min_tokens=body.min_tokens or 0,
    )
    return service.output_format.parser(service.texts, reading)


def _cut(delta: Delta, piece: Piece) -> Delta:
    """Up to the token that completed a stop string."""
    end = len(piece.parts or ())
    return replace(
        delta,
        token_ids=delta.token_ids[:end],
        logprobs=None if delta.logprobs is None else delta.logprobs[:end],
        origins=delta.origins[:end],
        finish_reason="stop",
        stop_reason=piece.stop,
    )


def _reasoning(text: str) -> dict[str, str]:
    """Both names of the field: older clients read the second."""
    return {"reasoning": text, "reasoning_content": text}


_EMPTY = Delta(0, "", [], None, [], None, None)
