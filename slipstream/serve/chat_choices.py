"""One choice of an answer to a conversation: reasoning, text, tool calls, logprobs."""

from collections.abc import Sequence
from typing import Any

from slipstream.serve.answer_reader import AnswerReader
from slipstream.serve.logprobs_format import TokenFields
from slipstream.serve.output.parts import Part
from slipstream.serve.protocol.base import MOST_INT
from slipstream.serve.protocol.chat import ChatRequest
from slipstream.serve.tools.events import AnswerEvent, Arguments, CallBegun, Content, Reasoning
from slipstream.serve.updates import Delta, join_deltas


class ChatAnswerChoice:
    """An `AnswerChoice` in the form of chats.

    Args:
        role: of the message.
    """

    def __init__(self, body: ChatRequest, reader: AnswerReader, index: int, role: str) -> None:
        self._body, self._reader, self._index, self._role = body, reader, index, role
        self._token_fields = TokenFields(body)
        self._echo = _last_answer(body) if body.echo else ""
        self._deltas: list[Delta] = []
        self._parts: list[Part] = []
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
        """So far, where the model's format tells them apart."""
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

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """None while the text may turn out to be a call."""
        if self.ended:
            return []
        increment = self._reader.take(delta)
        found = self._found(increment.events)
        pieces = []
        if not self._begun:
            self._begun = True
            opening = {"role": self._role, "content": ""}
            begins = [opening, {"content": self._echo}] if self._echo else [opening]
            rest = {**self._rest(_EMPTY, None), "finish_reason": None}
            pieces = [{"delta": it, **rest} for it in begins]
        rest = self._rest(increment.delta, increment.parts)
        if found or self.ended or any(rest.get(name) for name in _TELLING):
            pieces.append({"delta": found, **rest})
        return pieces

    def _found(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        """The field `delta` of a chunk."""
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

    def _rest(self, delta: Delta, parts: Sequence[Part] | None) -> dict[str, Any]:
        """All fields but the text and the calls.

        Args:
            parts: of the delta's tokens; None where they are not told apart.
        """
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
    """The text that `echo` begins with: of the last message, if that is the assistant's."""
    last = body.messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    content = last.content
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _reasoning(text: str) -> dict[str, str]:
    """Both names of the field: older clients read the second."""
    return {"reasoning": text, "reasoning_content": text}


# Fields for the sake of which a chunk without text is sent.
_TELLING = ("logprobs", "speculation", "token_ids")
_EMPTY = Delta(0, "", [], None, [], None, None)
