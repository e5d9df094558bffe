"""Bodies of /tokenize, /detokenize and /tokenizer_info."""

from typing import Annotated

from pydantic import model_validator

from slipstream.serve.protocol.base import ModelRequest, ResponseBody, TokenId
from slipstream.serve.protocol.bounds import MOST_TOKEN_IDS, AtMost
from slipstream.serve.protocol.chat import Messages, TemplateFields


class TokenizeRequest(ModelRequest, TemplateFields):
    """A text, or messages that the chat template renders.

    Attributes:
        add_special_tokens: whether the tokenizer adds its special tokens around the text; true for
            a prompt and false for messages by default.
        return_token_strs: also return the tokens as the vocabulary spells them.
    """

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of the two")
        if self.prompt is not None:
            for name in TemplateFields.model_fields:
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} goes with messages, not with prompt")
        return self


class TokenizeResponse(ResponseBody):
    """Token ids of the text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(ModelRequest):
    """Token ids to decode."""

    tokens: Annotated[list[TokenId], AtMost(MOST_TOKEN_IDS)]


class DetokenizeResponse(ResponseBody):
    """The text, special tokens included."""

    prompt: str


class TokenizerInfo(ResponseBody):
    """What tokenizer_config.json says, and the chat template in use where there is one.

    Attributes:
        tokenizer_class: the name that transformers has for it.
        eos_token, bos_token, unk_token, pad_token: texts of special tokens; null without one.
        chat_template: of several named templates the default one.
    """

    tokenizer_class: str | None
    eos_token: str | None
    bos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
