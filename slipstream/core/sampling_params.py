"""The sampling parameters of a request, which are checked on construction, and their defaults."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import IntEnum
from math import isfinite
from typing import Any, Self

from slipstream.core.errors import UsageError
from slipstream.core.flags import flag, parse_object
from slipstream.core.structured import StructuredOutput


class Verification(IntEnum):
    """How a request's drafts are verified. All backends use these values."""

    # A draft token is accepted with probability min(1, p / q); after a rejection, max(p - q, 0) is
    # sampled. The text for a seed depends on the drafted tokens.
    REJECTION = 0
    # The target samples every position with noise that depends on (seed, position) only; a draft
    # token is accepted if it equals that sample. The text equals plain decoding with any drafter.
    COUPLED = 1
    # Block verification: a draft is verified as a whole, which accepts more than REJECTION.
    BLOCK = 2


MOST_PATTERN = 128  # tokens; all sizes up to the maximum are tried after every token
MOST_REPEATS = 64


@dataclass(frozen=True, kw_only=True)
class RepetitionDetection:
    """Ends an output whose last tokens repeat a pattern.

    Args:
        max_pattern_size, min_pattern_size: number of tokens of the pattern. A minimum of 0 means 1;
            a maximum of 0 disables the detection.
        min_count: minimum number of consecutive occurrences.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size <= MOST_PATTERN:
            raise UsageError(
                "repetition_detection needs 0 <= min_pattern_size <= max_pattern_size <= "
                f"{MOST_PATTERN}"
            )
        if self.max_pattern_size and not 2 <= self.min_count <= MOST_REPEATS:
            raise UsageError(f"repetition_detection needs a min_count from 2 to {MOST_REPEATS}")

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens at the end of the output that `found` reads."""
        return self.max_pattern_size * self.min_count

    def found(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens end with a repeated pattern."""
        last = len(tokens) - 1
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            repeated = size * (self.min_count - 1)
            if repeated + size > len(tokens):
                return False  # larger patterns do not fit either
            if tokens[last] == tokens[last - size] and (
                tokens[-repeated:] == tokens[-repeated - size : -size]
            ):
                return True
        return False


SEED_BITS = 64
_LEAST = {"n": 1, "min_tokens": 0}
_LEAST_IF_GIVEN = {
    "max_tokens": 1,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "num_speculative_tokens": 0,
}


def _parse_bias(name: str, text: str) -> dict[int, float] | None:
    """Read a JSON object of token ids and numbers; JSON has no integer keys, so ids are strings."""
    given = parse_object(name, text)
    try:
        return None if given is None else {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise UsageError(f"{name} keys must be token ids, in {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request. All apply at every verified position, with and without
    speculation.

    Args:
        n: number of samples of one prompt.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most probable tokens with a total probability of top_p.
        min_p: keep tokens of at least min_p times the largest probability.
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens.
        repetition_penalty: divides (or multiplies, below zero) the logits of tokens of the prompt
            and the output.
        logit_bias: token id -> number added to its logit.
        allowed_token_ids: only these tokens are sampled; None: all.
        bad_words: texts that must not occur in the output.
        min_tokens: no stop token before this many output tokens. A grammar may end the output
            earlier; `stop_reason` then says so.
        max_tokens: maximum number of output tokens; None: up to `max_model_len`.
        stop, stop_token_ids: end the output; a stop string is cut from the text unless
            `include_stop_str_in_output`.
        ignore_eos: the model's EOS tokens do not end the output.
        seed: equal seeds give equal texts, with and without speculation, whatever is drafted and
            whatever else runs, as far as the device's results allow (docs/architecture.md, "Seeds
            and batch invariance"). If `rejection_sample_method` is set to anything but `coupled`,
            texts are equal only for equal drafts.
        logprobs, prompt_logprobs: number of alternatives to report per token (0: only the token),
            from the target's raw logits, before penalties and temperature.
        logprob_token_ids: report these tokens instead of the most probable ones, with `logprobs`.
        repetition_detection: ends an output that repeats itself, after `min_tokens`.
        num_speculative_tokens: draft tokens per step for this request, 0 to the engine's K.
        structured: constrains the output, which ends when no token can follow. Needs the extra
            `structured`.
    """

    n: int = 1
    temperature: float = flag(1.0, "0 is greedy.", panel="Sampling", also=("-t",))
    top_p: float = flag(
        1.0, "Sample from the smallest set of tokens whose probabilities reach this sum."
    )
    top_k: int = flag(0, "Sample from the k most probable tokens; 0 is all.")
    min_p: float = flag(
        0.0, "Leave out tokens below this share of the most probable token's probability."
    )
    presence_penalty: float = flag(
        0.0, "Lower the logits of tokens that the output has already: -2 to 2."
    )
    frequency_penalty: float = flag(
        0.0, "Lower the logits of tokens by how often the output has them: -2 to 2."
    )
    repetition_penalty: float = flag(
        1.0, "Above 1, make tokens of the prompt and the output less probable; 1 has no effect."
    )
    logit_bias: Mapping[int, float] | None = flag(
        None,
        "Values to add to the logits of token ids: '{\"42\": -100}'",
        metavar="<json>",
        parse=_parse_bias,
    )
    allowed_token_ids: Sequence[int] | None = flag(
        None, "Sample only these tokens (repeatable).", metavar="<id>"
    )
    bad_words: Sequence[str] = flag((), "Never write this text (repeatable).", metavar="<text>")
    min_tokens: int = flag(0, "Ignore stop tokens and stop texts before this many output tokens.")
    max_tokens: int | None = flag(16, "Maximum output tokens.")
    stop: str | Sequence[str] = flag((), "Stop at this text (repeatable).", metavar="<text>")
    stop_token_ids: Sequence[int] = flag((), "Stop at this token (repeatable).", metavar="<id>")
    include_stop_str_in_output: bool = flag(False, "Keep the stop text in the output.")
    skip_special_tokens: bool = flag(True, "Leave special tokens out of the text.")
    ignore_eos: bool = flag(False, "Do not stop at the model's end-of-sequence token.")
    seed: int | None = flag(
        None, "Random seed: the same text again, whatever the drafter and number of draft tokens."
    )
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    num_speculative_tokens: int | None = None
    repetition_detection: RepetitionDetection | None = None
    structured: StructuredOutput | None = None

    def __new__(cls, **values: Any) -> Self:
        """Raise UsageError for the name of an unknown parameter."""
        known = cls.__dataclass_fields__
        for name in values.keys() - known.keys():
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"SamplingParams has no parameter {name}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # Other engines accept None for these.
        for name in ("stop", "bad_words", "stop_token_ids"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        self._check_counts()
        self._check_numbers()
        self._check_words()
        _require(
            self.structured is None or isinstance(self.structured, StructuredOutput),
            f"structured must be a StructuredOutput, not {self.structured!r}",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_counts(self) -> None:
        _require(
            _is_int(self.top_k) and self.top_k >= -1,
            f"top_k must be an integer of at least 1, or 0 or -1 for all, not {self.top_k!r}",
        )
        for name, least in (_LEAST | _LEAST_IF_GIVEN).items():
            value, optional = getattr(self, name), name in _LEAST_IF_GIVEN
            _require(
                (optional and value is None) or (_is_int(value) and value >= least),
                f"{name} must be an integer of at least {least}{', or None' * optional}, "
                f"not {value!r}",
            )
        if self.max_tokens is not None:
            _require(
                self.min_tokens <= self.max_tokens,
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
            )
        _require(
            self.seed is None or (_is_int(self.seed) and -(1 << 63) <= self.seed < 1 << SEED_BITS),
            f"seed must be a 64-bit integer or None, not {self.seed!r}",
        )

    def _check_numbers(self) -> None:
        _require(
            _in(self.temperature, 0.0, float("inf")),
            f"temperature must be 0 (greedy) or more, not {self.temperature!r}",
        )
        _require(
            _in(self.top_p, 0.0, 1.0) and self.top_p > 0,
            f"top_p must be above 0 and at most 1, not {self.top_p!r}"
            + ("; for greedy output use temperature 0" if self.top_p == 0 else ""),
        )
        _require(_in(self.min_p, 0.0, 1.0), f"min_p must be between 0 and 1, not {self.min_p!r}")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(
                _in(getattr(self, name), -2.0, 2.0),
                f"{name} must be between -2 and 2, not {getattr(self, name)!r}",
            )
        _require(
            _in(self.repetition_penalty, 0.0, float("inf")) and self.repetition_penalty > 0,
            f"repetition_penalty must be above 0, not {self.repetition_penalty!r}",
        )

    def _check_words(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, words in (("stop", stop), ("bad_words", self.bad_words)):
            _require(
                _is_collection(words) and all(isinstance(word, str) and word for word in words),
                f"{name} must hold non-empty strings",
            )
        self._check_bias()
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            ids = getattr(self, name)
            _require(
                ids is None or (_is_collection(ids) and all(_is_token_id(token) for token in ids)),
                f"{name} must hold token ids of at least 0",
            )
        _require(
            self.logprob_token_ids is None or self.logprobs is not None,
            "logprob_token_ids goes with logprobs",
        )
        _require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids must not be empty; leave it out to allow every token",
        )

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        _require(
            isinstance(self.logit_bias, Mapping),
            f"logit_bias must map token ids to numbers, not {self.logit_bias!r}",
        )
        for token, bias in self.logit_bias.items():
            _require(_is_token_id(token), f"logit_bias keys must be token ids, not {token!r}")
            _require(
                _in(bias, -100.0, 100.0),
                f"logit_bias of token {token} must be between -100 and 100, not {bias!r}",
            )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_collection(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str)


def _in(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return low <= value <= high and isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults for fields of `SamplingParams` that a request does not give.

    Attributes:
        values: default by field; other fields have the default of `SamplingParams`.
        most_tokens: maximum number of output tokens of served requests; None: no limit.
        source: description of their origin.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    most_tokens: int | None = None
    source: str = ""

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a request that gives these fields.

        Raises:
            UsageError: the values contradict each other.
        """
        return SamplingParams(**{**self.values, **given})

    def limited(self, params: SamplingParams) -> SamplingParams:
        """A copy of `params` with at most `most_tokens` output tokens."""
        if self.most_tokens is None:
            return params
        asked = self.most_tokens if params.max_tokens is None else params.max_tokens
        return replace(params, max_tokens=min(asked, self.most_tokens))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values.items())
