"""Requests and responses about the server, its model and its tokenizer."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from slipstream.serve.protocol.base import ModelRequest, ResponseBody, TokenId
from slipstream.serve.protocol.bounds import MOST_TOKEN_IDS, AtMost
from slipstream.serve.protocol.chat import Messages, TemplateFields


class ErrorObject(ResponseBody):
    """An error, and the name of the wrong field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseBody):
    """An error in the form of the OpenAI protocol."""

    error: ErrorObject


class ModelSpeculation(ResponseBody):
    """The drafter of a model, its maximum number of draft tokens per step, and whether the engine
    adapts that number (`"auto"`)."""

    method: str
    model: str | None
    num_speculative_tokens: int
    adaptive: bool


class ModelCard(ResponseBody):
    """A name of the served model, or an adapter, whose parent the model is.

    Attributes:
        max_images: maximum images in a prompt; 0 if images are not supported.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    has_chat_template: bool
    max_images: int
    speculative: ModelSpeculation | None


class ModelList(ResponseBody):
    """All names of the served model."""

    object: Literal["list"]
    data: list[ModelCard]


class LoadAdapter(ModelRequest):
    """An adapter to load, from a folder of the server's machine, and perhaps the drafter's from
    another."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    draft_lora_path: str | None = Field(None, min_length=1, max_length=4096)


class UnloadAdapter(ModelRequest):
    """An adapter to unload."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None


class AdapterChange(ResponseBody):
    """An adapter that was loaded or unloaded."""

    id: str
    object: Literal["adapter"]
    loaded: bool


class Health(ResponseBody):
    """The server accepts requests."""

    status: Literal["ok"]


class Load(ResponseBody):
    """The number of generating requests whose answers are not complete."""

    server_load: int


class PrefixCacheReset(ResponseBody):
    """Confirms that the prefix cache was emptied."""

    success: Literal[True]


class Profiling(ResponseBody):
    """Whether a profile is being taken; when it ends, the path of its trace."""

    running: bool
    trace: str | None = None


class Version(ResponseBody):
    """The version of Slipstream."""

    version: str


class TokenizeRequest(ModelRequest, TemplateFields):
    """A text, or messages that the chat template renders.

    Attributes:
        add_special_tokens: whether the tokenizer adds its special tokens around the text; true for
            a prompt and false for messages by default.
        return_token_strs: also return the tokens as the vocabulary spells them.
    """

    forms: ClassVar[Mapping[str, str]] = {"prompt": "a text"}
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
    """Values of tokenizer_config.json, and the chat template in use, if there is one.

    Attributes:
        tokenizer_class: its class in transformers.
        eos_token, bos_token, unk_token, pad_token: texts of special tokens; null without one.
        chat_template: the default one, if there are several.
    """

    tokenizer_class: str | None
    eos_token: str | None
    bos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
