"""Bodies of /tokenize and /detokenize."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from slipstream.serve.protocol.base import RequestBody, ResponseBody, TokenId
from slipstream.serve.protocol.chat import Message, Tool


class TokenizeRequest(RequestBody):
    """A text, or messages that the chat template makes a text of.

    Attributes:
        add_special_tokens: also what the tokenizer puts around a text; true for a prompt and false
            for messages where not given.
        return_token_strs: the tokens as the vocabulary spells them, too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of the two")
        only_chat = (
            "tools",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
        )
        if self.prompt is not None:
            for name in only_chat:
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} goes with messages, not with prompt")
        return self


class TokenizeResponse(ResponseBody):
    """Token ids of the text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(ResponseBody):
    """The text of token ids, special tokens included."""

    prompt: str
