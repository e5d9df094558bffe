"""Responses about the server and its model."""

from typing import Literal

from pydantic import Field

from slipstream.serve.protocol.base import ModelRequest, ResponseBody


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
    """The drafter of a model, the maximum number of draft tokens per step, and whether the engine
    chooses how many it drafts (`"auto"`)."""

    method: str
    model: str | None
    num_speculative_tokens: int
    adaptive: bool


class ModelCard(ResponseBody):
    """A name of the served model, or an adapter, whose parent the model is.

    Attributes:
        max_images: of a prompt; 0 where images are not read.
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
    """Whether the prefix cache is empty now, which it always is."""

    success: Literal[True]


class Profiling(ResponseBody):
    """Whether a profile is being taken; when it ends, the path of its trace."""

    running: bool
    trace: str | None = None


class Version(ResponseBody):
    """The version of Slipstream."""

    version: str
