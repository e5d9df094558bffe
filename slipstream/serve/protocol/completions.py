"""Bodies of /v1/completions."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from slipstream.serve.protocol.base import Count, ResponseBody, TokenIds
from slipstream.serve.protocol.bounds import MOST_PROMPTS, AtMost
from slipstream.serve.protocol.sampling import MOST_LOGPROBS, ResponseFormat, SamplingFields
from slipstream.serve.protocol.usage import AnswerBody, ChoiceBody, Usage

_FEW = AtMost(MOST_PROMPTS, "send them in several requests", "prompts")
_TEXT, _IDS, _SEVERAL = "a text", "token ids", "several prompts"


def _form_of(given: object) -> str:
    """The form of `prompt`; for a list, its first entry decides."""
    if not isinstance(given, list):
        return _TEXT
    return _IDS if given and isinstance(given[0], int | float) else _SEVERAL


Prompts = Annotated[
    Annotated[str, Tag(_TEXT)]
    | Annotated[TokenIds, Tag(_IDS)]
    | Annotated[list[str | TokenIds], Field(min_length=1), _FEW, Tag(_SEVERAL)],
    Discriminator(_form_of),
]


class CompletionRequest(SamplingFields):
    """Continue one prompt or several.

    Attributes:
        prompt: a text, token ids, or a list of either or both.
        best_of: must equal `n`, since all samples are returned.
        echo: begin with the prompt; with `max_tokens` 0 nothing is generated.
        logprobs: number of alternatives per token.
        max_tokens: default 16.
        suffix: the text after the one that is to be filled in.
    """

    prompt: Prompts
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    max_tokens: Count | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None


class CompletionLogprobs(ResponseBody):
    """One entry per token; the first token of a prompt has no logprob."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(ResponseBody):
    """A candidate for a token of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChunkChoice(ChoiceBody):
    """An increment of a choice; the last one has the finish reason."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionChunkChoice):
    """One continuation of one prompt: `index` is prompt x n + sample."""

    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptLogprobs | None = None


class Completion(AnswerBody):
    """The response."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(AnswerBody):
    """One event of a streamed response."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
