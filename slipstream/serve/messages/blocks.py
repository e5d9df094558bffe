"""The content of an answer as blocks: text, thinking and calls, in their order."""

from collections.abc import Iterator
from typing import Any, Final

from pydantic_core import from_json

from slipstream.serve.answer_reader import AnswerReader
from slipstream.serve.tools.events import (
    AnswerEvent,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
)
from slipstream.serve.updates import Delta

# Clients leave out thinking without a signature when they send it back.
_SIGNATURE: Final = "unsigned"
_STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}


class BlockWriter:
    """Writes one sample's answer events as blocks; a `SampleReader`.

    Attributes:
        stop_reason, stop_sequence: once it has ended.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._reader = reader
        self._open: str | None = None  # type of the block that is being written
        self._index = -1
        self._whole: list[tuple[dict[str, Any], list[str]]] = []

    @property
    def ended(self) -> bool:
        return self._reader.ended

    def collect(self, delta: Delta) -> None:
        for event in self.events(delta):
            if event["type"] == "content_block_start":
                self._whole.append((event["content_block"], []))
            elif event["type"] == "content_block_delta":
                self._whole[-1][1].extend(
                    text
                    for name, text in event["delta"].items()
                    if name not in ("type", "signature")
                )

    def whole(self) -> list[dict[str, Any]]:
        """The blocks that were collected."""
        return [_filled(block, "".join(texts)) for block, texts in self._whole]

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """The protocol's events that a delta becomes; may be none."""
        if self.stop_reason is not None:
            return []
        increment = self._reader.take(delta)
        events = [written for event in increment.events for written in self._written(event)]
        if self.ended:
            events += self._close()
            self._set_stop_reason(increment.delta)
        return events

    def _written(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        match event:
            case Content(text) if text:
                yield from self._begin("text", text="")
                yield self._delta("text_delta", text=text)
            case Reasoning(text) if text:
                yield from self._begin("thinking", thinking="", signature="")
                yield self._delta("thinking_delta", thinking=text)
            case CallBegun(name):
                yield from self._close()
                yield from self._begin(
                    "tool_use", id=self._reader.new_call_id(), name=name, input={}
                )
            case Arguments(text) if text:
                yield self._delta("input_json_delta", partial_json=text)
            case CallEnded():
                yield from self._close()

    def _begin(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._index += 1
            block = {"type": kind, **fields}
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=_SIGNATURE)
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _set_stop_reason(self, delta: Delta) -> None:
        reason = self._reader.finish_reason(delta)
        if reason == "stop" and isinstance(delta.stop_reason, str):
            self.stop_reason, self.stop_sequence = "stop_sequence", delta.stop_reason
        else:
            self.stop_reason = _STOP_REASONS.get(reason or "", "end_turn")


def _filled(block: dict[str, Any], text: str) -> dict[str, Any]:
    match block["type"]:
        case "tool_use":
            return {**block, "input": _input(text)}
        case "thinking":
            return {**block, "thinking": text, "signature": _SIGNATURE}
        case _:
            return {**block, "text": text}


def _input(arguments: str) -> dict[str, Any]:
    """As much as there is of arguments that were cut off; what is no object is told as it is."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": arguments}
