"""Token counts and, if asked for, statistics of speculation."""

from typing import Literal

from slipstream.serve.protocol.base import OnlyFalse, RequestBody, ResponseBody


class StreamOptions(RequestBody):
    """Options of a streamed response.

    Attributes:
        include_usage: end with a chunk that has the usage and no choices.
        continuous_usage_stats: every chunk has the usage so far.
        include_obfuscation: chunks are never padded, so only false is accepted.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: OnlyFalse | None = None


class SpeculativeOptions(RequestBody):
    """Speculation of one request.

    Attributes:
        num_speculative_tokens: maximum number of draft tokens per step, 0 to the server's K, which
            it is if not given.
    """

    num_speculative_tokens: int | None = None


class PromptTokensDetails(ResponseBody):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(ResponseBody):
    """Output tokens that are reasoning, if the model's format separates it."""

    reasoning_tokens: int


class SpeculationUsage(ResponseBody):
    """Statistics of speculation, summed over a request's samples.

    Attributes:
        steps_by_draft_tokens: steps with output tokens by their number of draft tokens: 0, 1, ...
        estimated_speedup: over plain decoding; None if the costs of steps are unknown.
        decode_seconds: time of the steps that `estimated_speedup` is about.
        refused_drafting_seconds: time spent on rejected draft tokens.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    steps: int
    steps_by_draft_tokens: list[int]
    acceptance_length: float
    estimated_speedup: float | None = None
    decode_seconds: float
    refused_drafting_seconds: float


class Usage(ResponseBody):
    """Token counts, summed over a request's prompts and samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    speculation: SpeculationUsage | None = None


class WeightVersion(ResponseBody):
    """The version of the weights that generated tokens `start` to before `end` of an output."""

    version: str
    start: int
    end: int


class AnswerBody(ResponseBody):
    """Fields of all answers and chunks."""

    id: str
    object: str
    created: int
    model: str


class SpeculatedToken(ResponseBody):
    """A token and its origin.

    Attributes:
        text: what it adds to the text.
        kind: "accepted": a draft token. The target's own tokens are "bonus" after a draft that was
            accepted whole, "recovered" in place of a refused draft token, and "plain" in a step
            without a draft.
        position: in the draft, from 0; None for a plain token.
        logprob: if logprobs were asked for.
        part: the part of the answer, if the model's format separates parts; "markup" is not text.
    """

    text: str
    kind: Literal["accepted", "bonus", "recovered", "plain"]
    position: int | None
    logprob: float | None
    part: Literal["reasoning", "content", "call", "markup"] | None = None


class SpeculatedTokens(ResponseBody):
    """The tokens of a choice or a chunk."""

    tokens: list[SpeculatedToken]


class ChoiceBody(ResponseBody):
    """Fields of all choices, whole or in increments."""

    index: int
    stop_reason: str | int | None
    speculation: SpeculatedTokens | None = None
    token_ids: list[int] | None = None
    weight_versions: list[WeightVersion] | None = None
