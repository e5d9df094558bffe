"""Splits one sample's output into reasoning, content and tool calls, for all chat protocols."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from slipstream.serve.logprobs_format import chat_logprobs, read_tokens, speculation
from slipstream.serve.model_service import ModelService
from slipstream.serve.output.parts import (
    AnswerParser,
    CallsInText,
    OutputPart,
    ParsedOutput,
    Reading,
)
from slipstream.serve.protocol.chat import ChatRequest
from slipstream.serve.token_texts import TokenReader
from slipstream.serve.tools.events import AnswerEvent, CallBegun, CallEnded, Content, Reasoning
from slipstream.serve.tools.tool_choice import ToolUse
from slipstream.serve.updates import Delta


@dataclass(frozen=True, slots=True)
class Increment:
    """The result of parsing one delta.

    Attributes:
        events: new events; without reasoning if the request excludes it.
        delta: the delta, cut off after the token that completed a stop string.
        parts: the part of the answer that each token belongs to; None if unknown.
    """

    events: Sequence[AnswerEvent]
    delta: Delta
    parts: Sequence[OutputPart] | None = None


class AnswerReader:
    """Finds reasoning, content and tool calls in the output of one sample.

    Attributes:
        ended: whether the answer is complete; further output is ignored.
        num_reasoning_tokens: reasoning tokens so far; 0 if the model's format does not mark them.
        num_calls: number of tool calls so far.
    """

    def __init__(
        self, service: ModelService, body: ChatRequest, tools: ToolUse, prompt: Sequence[int]
    ) -> None:
        self.ended = False
        self.num_reasoning_tokens = self.num_calls = 0
        self._in_call = False
        self._service, self._body, self._tools = service, body, tools
        self._names = service.token_names(body.return_tokens_as_token_ids)
        self._parser = _parser(service, body, tools, prompt)
        self._reader = TokenReader(service.texts, body.skip_special_tokens is not False)

    def take(self, delta: Delta) -> Increment:
        """Parse the next delta; must not be called after `ended`."""
        over = delta.finish_reason is not None
        if self._parser is None:
            self.ended = over
            return Increment([Content(delta.text)], delta)
        parsed = self._parser.feed(delta)
        if parsed.stop is not None:
            delta, over = _cut(delta, parsed), True
        self.num_reasoning_tokens += sum(
            part is OutputPart.REASONING for part in parsed.parts or ()
        )
        events = [*parsed.events, *(self._parser.finish() if over else ())]
        if self._tools.single and not self._tools.only_calls:  # else its grammar ends the answer
            events = self._up_to_first_call(events)
        if self._tools.only_calls:  # of a call that is cut short, a mark may be left
            events = [event for event in events if not isinstance(event, Content)]
        self.ended = self.ended or over
        for event in events:
            if isinstance(event, CallBegun):
                self.num_calls, self._in_call = self.num_calls + 1, True
            elif isinstance(event, CallEnded):
                self._in_call = False
        if self._body.include_reasoning is False:
            events = [event for event in events if not isinstance(event, Reasoning)]
        return Increment(events, delta, parsed.parts)

    def finish_reason(self, delta: Delta) -> str | None:
        """The finish reason in the protocol's terms; None if the answer goes on."""
        cut_off = self._in_call or (delta.finish_reason == "length" and not self._tools.single)
        if self.ended and self.num_calls and not cut_off:
            return "tool_calls"
        return delta.finish_reason

    def new_call_id(self) -> str:
        """A new id for a tool call, in the format of the model's family."""
        assert self._tools.format is not None
        return self._tools.format.call_id()

    def logprobs(
        self, delta: Delta, parts: Sequence[OutputPart] | None, num_top: int
    ) -> dict[str, Any] | None:
        """The logprobs of the content's tokens in the chat format; None if there are none."""
        tokens, rows = [*delta.token_ids], [*(delta.logprobs or ())]
        if parts is not None:
            own = [part is OutputPart.CONTENT for part in parts]
            tokens, rows = [*compress(tokens, own)], [*compress(rows, own)]
        return chat_logprobs(self._names, tokens, rows, num_top) if rows else None

    def speculation(self, delta: Delta, parts: Sequence[OutputPart] | None) -> dict[str, Any]:
        """The tokens of a delta with their origins; must be called in the order of the deltas."""
        described = speculation(delta, read_tokens(self._reader, delta.token_ids))
        for token, part in zip(described["tokens"], parts or (), strict=False):
            token["part"] = part.value
        return described

    def _up_to_first_call(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        for place, event in enumerate(events):
            if isinstance(event, CallEnded):
                self.ended = True
                return events[: place + 1]
        return events


def _parser(
    service: ModelService, body: ChatRequest, tools: ToolUse, prompt: Sequence[int]
) -> AnswerParser | None:
    """The parser of the output; None if all text is content."""
    skip_special = body.skip_special_tokens is not False
    if service.output_format is None:
        parser = tools.parser(service.tokenizer, skip_special)
        return None if parser is None else CallsInText(parser)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or ()
    reading = Reading(
        prompt=prompt,
        continues=bool(body.continue_final_message),
        functions=tools.functions if tools.format is not None else None,
        calls=tools.parser(service.tokenizer, skip_special),
        call_marks=tools.marks(service.tokenizer),
        keeps_special=tools.keeps_special(service.tokenizer),
        skip_special=skip_special,
        stop=() if tools.only_calls else stop,
        include_stop=body.include_stop_str_in_output is True,
        min_tokens=body.min_tokens or 0,
    )
    return service.output_format.parser(service.texts, reading)


def _cut(delta: Delta, parsed: ParsedOutput) -> Delta:
    """Cut a delta off after the token that completed a stop string."""
    end = len(parsed.parts or ())
    return replace(
        delta,
        token_ids=delta.token_ids[:end],
        logprobs=None if delta.logprobs is None else delta.logprobs[:end],
        origins=delta.origins[:end],
        finish_reason="stop",
        stop_reason=parsed.stop,
    )
