"""One choice of an answer to a conversation: text, tool calls, logprobs."""

from collections.abc import Sequence
from typing import Any

from slipstream.serve.logprobs_format import chat_logprobs, read_tokens, speculation
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol.chat import ChatRequest
from slipstream.serve.token_texts import TokenReader
from slipstream.serve.tools.choice import ToolUse
from slipstream.serve.tools.events import Arguments, CallBegun, CallEnded, Content, ToolEvent
from slipstream.serve.updates import Delta, join_deltas


class ChatAnswerChoice:
    """An `AnswerChoice`: finds tool calls in the text of one sample."""

    def __init__(
        self, service: ModelService, body: ChatRequest, tools: ToolUse, index: int
    ) -> None:
        self.ended = False
        self._service, self._body, self._tools, self._index = service, body, tools, index
        skip_special = body.skip_special_tokens is not False
        self._parser = tools.parser(service.tokenizer, skip_special)
        self._reader = TokenReader(service.texts, skip_special)
        self._deltas: list[Delta] = []
        self._text: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._num_calls = 0
        self._begun = False

    def collect(self, delta: Delta) -> None:
        if self.ended:
            return
        self._deltas.append(delta)
        found = self._take(delta)
        self._text.append(found.pop("content", ""))
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
        if self._calls:
            message["tool_calls"] = self._calls
        return {"message": message, **self._rest(delta)}

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """None while the text may turn out to be a call."""
        if self.ended:
            return []
        found = self._take(delta)
        pieces = []
        if not self._begun:
            self._begun = True
            opening = {"role": "assistant", "content": ""}
            pieces.append({"delta": opening, **self._rest(_EMPTY)})
        rest = self._rest(delta)
        if found or self.ended or rest["logprobs"] or "speculation" in rest:
            pieces.append({"delta": found, **rest})
        return pieces

    def _take(self, delta: Delta) -> dict[str, Any]:
        """The field `delta` of a chunk."""
        over = delta.finish_reason is not None
        if self._parser is None:
            self.ended = over
            return {"content": delta.text}
        events = [*self._parser.feed(delta.text), *(self._parser.finish() if over else ())]
        if self._tools.single:
            events = self._up_to_first_call(events)
        self.ended = self.ended or over
        return self._found(events)

    def _up_to_first_call(self, events: list[ToolEvent]) -> list[ToolEvent]:
        for place, event in enumerate(events):
            if isinstance(event, CallEnded):
                self.ended = True
                return events[: place + 1]
        return events

    def _found(self, events: Sequence[ToolEvent]) -> dict[str, Any]:
        text = "".join(event.text for event in events if isinstance(event, Content))
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
        return {**found, "tool_calls": list(calls.values())} if calls else found

    def _new_id(self) -> str:
        assert self._tools.format is not None
        return self._tools.format.call_id()

    def _rest(self, delta: Delta) -> dict[str, Any]:
        """All fields but the text and the calls."""
        rest: dict[str, Any] = {
            "index": self._index,
            "logprobs": None,
            "finish_reason": self._finish_reason(delta),
            "stop_reason": delta.stop_reason,
        }
        if self._body.logprobs and delta.logprobs:
            num_top = self._body.top_logprobs or 0
            rest["logprobs"] = chat_logprobs(
                self._service.texts, delta.token_ids, delta.logprobs, num_top
            )
        if self._body.return_speculation:
            rest["speculation"] = speculation(delta, read_tokens(self._reader, delta.token_ids))
        return rest

    def _finish_reason(self, delta: Delta) -> str | None:
        if self.ended and self._num_calls and delta.finish_reason != "length":
            return "tool_calls"
        return delta.finish_reason


_EMPTY = Delta(0, "", [], None, [], None, None)
