"""Bodies that say what the server is and how it does."""

from typing import Literal

from slipstream.serve.protocol.base import ResponseBody


class ErrorObject(ResponseBody):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseBody):
    """An error in OpenAI's form."""

    error: ErrorObject


class ModelSpeculation(ResponseBody):
    """What drafts for a model, and how many tokens a step at most."""

    method: str
    model: str | None
    num_speculative_tokens: int


class ModelCard(ResponseBody):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    speculative: ModelSpeculation | None


class ModelList(ResponseBody):
    """All of them."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(ResponseBody):
    """That the server takes requests."""

    status: Literal["ok"]


class Profiling(ResponseBody):
    """Whether a profile is being taken; behind one, where its trace is."""

    running: bool
    trace: str | None = None


class Version(ResponseBody):
    """Of Slipstream."""

    version: str
