"""Converts items of responses to chat messages."""

from collections.abc import Sequence
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from slipstream.serve.errors import bad_request
from slipstream.serve.protocol import chat, responses
from slipstream.serve.protocol.bounds import MOST_MESSAGES, MOST_PARTS

_MESSAGES: Final = TypeAdapter[list[chat.Message]](list[chat.Message])

Parts = Sequence[responses.InputText | responses.InputImage | responses.EarlierText]


def parse_messages(document: bytes) -> list[chat.Message]:
    """Parse what `dump_messages` wrote; ApiError if it exceeds the limits of a request."""
    try:
        messages = _MESSAGES.validate_json(document)
    except ValidationError:
        raise bad_request(
            "the conversation so far is more than a request may hold; begin a new one",
            "previous_response_id",
        ) from None
    for message in messages:
        if isinstance(message.content, list):
            message.content = [
                chat.ImagePart.at("an image of previous_response_id", part.image_url.url)
                if isinstance(part, chat.ImagePart)
                else part
                for part in message.content
            ]
    return messages


def dump_messages(messages: Sequence[chat.Message]) -> bytes:
    return to_json(messages, exclude_none=True)


class MessageBuilder:
    """Combines items to messages: adjacent reasoning, text and calls are one message of the
    assistant, as in the answer to a chat request.

    Args:
        earlier: messages before the items; the last one is complete.
        keeps_reasoning: whether the chat template renders reasoning; if not, it is dropped.
    """

    def __init__(self, earlier: Sequence[chat.Message], keeps_reasoning: bool) -> None:
        self.messages = [*earlier]
        self._keeps_reasoning = keeps_reasoning
        self._answer: chat.AssistantMessage | None = None  # the next item may continue it
        self._call_ids = {
            call.id
            for message in earlier
            if isinstance(message, chat.AssistantMessage)
            for call in message.tool_calls or ()
        }

    def add(self, items: Sequence[responses.Item]) -> None:
        """Add items; ApiError names an item that is not allowed in its place."""
        for place, item in enumerate(items):
            match item:
                case responses.MessageItem(role="assistant"):
                    self._open().content = _content(item.content, "")
                case responses.FunctionCallItem():
                    self._called(item)
                case responses.ReasoningItem():
                    self._thought(item)
                case responses.FunctionOutputItem():
                    self._require_call(item.call_id, place)
                    content = _content(item.output, f"input[{place}].output")
                    self._add_message(
                        chat.ToolMessage(role="tool", content=content, tool_call_id=item.call_id)
                    )
                case responses.MessageItem():
                    role: Any = item.role
                    content = _content(item.content, f"input[{place}].content")
                    self._add_message(chat.PlainMessage(role=role, content=content))

    def require_few(self) -> None:
        """Raise ApiError for more messages, or calls in a message, than a chat may have."""
        num_calls = [
            len(message.tool_calls or ())
            for message in self.messages
            if isinstance(message, chat.AssistantMessage)
        ]
        if len(self.messages) > MOST_MESSAGES or max(num_calls, default=0) > MOST_PARTS:
            raise bad_request(
                f"the conversation has more than {MOST_MESSAGES} messages, or more than "
                f"{MOST_PARTS} tool calls in a row; begin a new one",
                "input",
            )

    def _add_message(self, message: chat.Message) -> None:
        self.messages.append(message)
        self._answer = None

    def _open(self, called: bool = False) -> chat.AssistantMessage:
        """The message that the next item is added to; a call may follow text and other calls."""
        answer = self._answer
        if answer is None or (not called and (answer.content or answer.tool_calls)):
            answer = self._answer = chat.AssistantMessage(role="assistant", content="")
            self.messages.append(answer)
        return answer

    def _thought(self, item: responses.ReasoningItem) -> None:
        texts = [part.text for part in item.content or item.summary or ()]
        answer = self._open()
        if self._keeps_reasoning and texts:
            answer.reasoning = "\n".join([*filter(None, [answer.reasoning]), *texts])

    def _called(self, item: responses.FunctionCallItem) -> None:
        answer = self._open(called=True)
        function = chat.CalledFunction(name=item.name, arguments=item.arguments)
        if answer.tool_calls is None:
            answer.tool_calls, answer.content = [], answer.content or None
        answer.tool_calls.append(chat.MessageToolCall(id=item.call_id, function=function))
        self._call_ids.add(item.call_id)

    def _require_call(self, call_id: str, place: int) -> None:
        if call_id not in self._call_ids:
            raise bad_request(
                f"input[{place}].call_id names {call_id[:100]!r}, which no tool call before it "
                "has; send the function_call too, or previous_response_id",
                "input",
            )


def _content(given: str | Parts, where: str) -> Any:
    if isinstance(given, str):
        return given
    parts = [
        chat.ImagePart.at(f"{where}[{number}]", part.image_url)
        if isinstance(part, responses.InputImage)
        else chat.TextPart(type="text", text=part.text)
        for number, part in enumerate(given)
    ]
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], chat.TextPart) else parts
