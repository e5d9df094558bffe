"""Responses about the server and its model."""

from typing import Literal

from slipstream.serve.protocol.base import ResponseBody


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
    """A name of the served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    has_chat_template: bool
    speculative: ModelSpeculation | None


class ModelList(ResponseBody):
    """All names of the served model."""

    object: Literal["list"]
    data: list[ModelCard]


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
