"""Token counts and, where asked for, what speculation did."""

from typing import Literal

from slipstream.serve.protocol.base import RequestBody, ResponseBody


class StreamOptions(RequestBody):
    """Of a streamed answer.

    Attributes:
        include_usage: end with a chunk without choices that has the usage.
        continuous_usage_stats: have the usage so far in every chunk.
        include_obfuscation: chunks are never padded, so only false is taken.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SpeculativeOptions(RequestBody):
    """Of one request.

    Attributes:
        num_speculative_tokens: draft tokens a step at most, 0 to the server's K.
    """

    num_speculative_tokens: int


class PromptTokensDetails(ResponseBody):
    """What of the prompt was in the prefix cache."""

    cached_tokens: int


class SpeculationUsage(ResponseBody):
    """What speculation did for a request, its samples summed."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    steps: int
    acceptance_length: float


class Usage(ResponseBody):
    """Tokens of a request, its prompts and samples summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    speculation: SpeculationUsage | None = None


class SpeculatedToken(ResponseBody):
    """A token and how it came about.

    Attributes:
        text: what it adds to the text.
        kind: an accepted draft token; the target's own behind a wholly accepted draft (bonus), in
            place of a refused draft token (recovered), or of a step without a draft (plain).
        position: place in the draft, from 0; None for a plain token.
        logprob: where logprobs were asked for.
    """

    text: str
    kind: Literal["accepted", "bonus", "recovered", "plain"]
    position: int | None
    logprob: float | None


class SpeculatedTokens(ResponseBody):
    """The tokens of a choice, or of a chunk of it."""

    tokens: list[SpeculatedToken]
