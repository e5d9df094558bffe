"""The output items of a response, and their events."""

from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

from slipstream.serve.answer_reader import AnswerReader, Increment
from slipstream.serve.tools.events import Arguments, CallBegun, CallEnded, Content, Reasoning

Event = dict[str, Any]

# For each type of item: prefix of its id, type of its text.
_TEXTS: Final = {"message": ("msg", "output_text"), "reasoning": ("rs", "reasoning_text")}


class OutputWriter:
    """Converts answer events to items and stream events, without sequence numbers, and without
    logprobs if `num_top` is None."""

    def __init__(self, reader: AnswerReader, num_top: int | None) -> None:
        self.items: list[dict[str, Any]] = []  # that are complete
        self._reader, self._num_top = reader, num_top
        self._item: dict[str, Any] | None = None
        self._texts: list[str] = []  # text or arguments of the open item
        self._logprobs: list[Any] = []
        self._new_logprobs: list[Any] = []  # not sent in an event yet

    def write(self, increment: Increment) -> list[Event]:
        if self._num_top is not None:
            delta, parts = increment.delta, increment.parts
            found = self._reader.logprobs(delta, parts, self._num_top) or {"content": []}
            self._new_logprobs += found["content"]
        events: list[Event] = []
        for event in increment.events:
            match event:
                case Content(text) if text:
                    events += self._add_text("message", text)
                case Reasoning(text):
                    events += self._add_text("reasoning", text)
                case CallBegun(name):
                    fields = {"call_id": self._reader.new_call_id(), "name": name, "arguments": ""}
                    events += self.close()
                    events += self._open("fc", {"type": "function_call", **fields})
                case Arguments(text):
                    self._texts.append(text)
                    events.append(self._event("response.function_call_arguments.delta", delta=text))
                case CallEnded():
                    events += self.close()
        return events

    def finish(self, status: str) -> list[Event]:
        """The last events; an answer without items gets an empty message."""
        empty = self._add_text("message", "") if self._item is None and not self.items else []
        return [*empty, *self.close(status)]

    def close(self, status: str = "completed") -> list[Event]:
        """End the open item, if there is one."""
        item = self._item
        if item is None:
            return []
        text = "".join(self._texts)
        if item["type"] == "function_call":
            item["arguments"] = text
            done = "response.function_call_arguments.done"
            events = [self._event(done, arguments=text)]
        else:
            fields = {}
            if item["type"] == "message":
                self._take_logprobs()
                fields["logprobs"] = self._logprobs
            part = _part(item["type"], text, self._logprobs)
            item["content"] = [part]
            events = [
                self._event(f"response.{part['type']}.done", content_index=0, text=text, **fields),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        item["status"] = status
        events.append(self._item_event("response.output_item.done", item))
        self.items.append(item)
        self._item, self._texts, self._logprobs = None, [], []
        return events

    def _add_text(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._item is None or self._item["type"] != kind:
            role: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            events += self.close()
            events += self._open(_TEXTS[kind][0], {"type": kind, **role, "content": []})
            added = "response.content_part.added"
            events.append(self._event(added, content_index=0, part=_part(kind, "", [])))
        self._texts.append(text)
        if text:
            fields = {"logprobs": self._take_logprobs()} if kind == "message" else {}
            type = f"response.{_TEXTS[kind][1]}.delta"
            events.append(self._event(type, content_index=0, delta=text, **fields))
        return events

    def _open(self, prefix: str, fields: Mapping[str, Any]) -> list[Event]:
        self._item = {"id": f"{prefix}_{uuid4().hex}", **fields, "status": "in_progress"}
        return [self._item_event("response.output_item.added", {**self._item})]

    def _take_logprobs(self) -> list[Any]:
        """Take the logprobs that were not sent yet; they belong to the open message."""
        taken, self._new_logprobs = self._new_logprobs, []
        self._logprobs += taken
        return taken

    def _event(self, type: str, **fields: Any) -> Event:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.items)}
        return {"type": type, **place, **fields}

    def _item_event(self, type: str, item: Mapping[str, Any]) -> Event:
        return {"type": type, "output_index": len(self.items), "item": item}


def _part(kind: str, text: str, logprobs: list[Any]) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _TEXTS[kind][1], "text": text}
    return {**part, "annotations": [], "logprobs": logprobs} if kind == "message" else part
