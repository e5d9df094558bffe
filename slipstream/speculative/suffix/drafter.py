"""`suffix`: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). What followed these tokens, here
and in earlier outputs, and how often?

Needs no second model. The longer the match and the surer what followed it, the longer the guess.
Sampled requests with a seed that are not coupled are guessed from their own text alone, so that the
seed gives the same text whatever ran before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.batch import Batch
from slipstream.core.errors import UsageError
from slipstream.core.request import Request
from slipstream.core.spans import end_of_spans, texts_between
from slipstream.core.verification import Verification
from slipstream.runner.device_batch import Guesses
from slipstream.runner.device_state import DeviceState
from slipstream.speculative.drafter import HostDrafter, LoadedDrafter, load_host_drafter
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.suffix.automaton import GuessLimits, SuffixAutomaton

DEFAULT_DEPTH, DEFAULT_REQUESTS, DEFAULT_TOKENS = 24, 10_000, 1 << 18
DEFAULT_FACTOR, DEFAULT_MIN_PROB = 1.0, 0.1
MAX_DEPTH = 1024  # a token of a repeating text costs as many steps


@dataclass(frozen=True)
class SuffixConfig:
    """How far guesses go, and how much is kept of earlier outputs (0: nothing)."""

    limits: GuessLimits
    max_cached_requests: int
    max_cached_tokens: int


def read_options(options: Options) -> SuffixConfig:
    """The keys and defaults of other engines, and `suffix_decoding_max_cached_tokens`: outputs may
    have any length, so that their number alone bounds no memory. `suffix_decoding_min_match`: a
    match of fewer tokens is none."""
    options.take_only("model", "suffix", "leave it out: suffix drafting has no model")
    depth = _integer(options, "max_tree_depth", DEFAULT_DEPTH, 1, MAX_DEPTH)
    limits = GuessLimits(
        depth=depth,
        spec_factor=_number(options, "max_spec_factor", DEFAULT_FACTOR, MAX_DEPTH),
        min_prob=_number(options, "min_token_prob", DEFAULT_MIN_PROB, 1),
        min_match=_integer(options, "min_match", 1, 1, depth),
    )
    return SuffixConfig(
        limits,
        max_cached_requests=_integer(options, "max_cached_requests", DEFAULT_REQUESTS, 0),
        max_cached_tokens=_integer(options, "max_cached_tokens", DEFAULT_TOKENS, 0),
    )


def load(config: SuffixConfig, target: TargetModel) -> LoadedDrafter:
    del target
    return load_host_drafter(lambda state: SuffixDrafter(config, state))


class SuffixDrafter(HostDrafter):
    """An automaton for each request that drafts, about half a KiB of host memory per token, and
    those of earlier outputs, those of seeded requests among them."""

    def __init__(self, config: SuffixConfig, state: DeviceState) -> None:
        super().__init__(state)
        self._limits = config.limits
        self._own: dict[str, SuffixAutomaton] = {}
        self._past = PastOutputs(config)

    def prepare(self, batch: Batch) -> Guesses:
        return [self._guess(item.request, item.num_draft_tokens) for item in batch.requests]

    def forget(self, requests: Sequence[Request]) -> None:
        """Preempted requests will continue, so what is known of them stays."""
        for request in requests:
            if request.finished:
                self._own.pop(request.request_id, None)
                self._past.add(request.output_token_ids)

    def _guess(self, request: Request, most: int) -> list[int]:
        if not most:
            return []
        own = self._own.setdefault(request.request_id, SuffixAutomaton(self._limits))
        tokens, spans = request.token_ids, request.spans
        if own.num_tokens:
            own.extend(tokens[own.num_tokens + sum(span.length for span in spans) :])
        else:  # images are no text: what stands before one is not followed by what is behind it
            for text in texts_between(spans, tokens):
                own.add(text)
        context = tokens[max(end_of_spans(spans), len(tokens) - self._limits.depth) :]
        guess = own.guess(context, most)
        if _depends_on_guesses(request):
            return guess.token_ids
        return self._past.automaton.guess(context, most, better_than=guess).token_ids


def _depends_on_guesses(request: Request) -> bool:
    """Whether a seed would give another text with other guesses: which tokens are drafted decides
    which noise samples the text, unless that is greedy or coupled."""
    params, coupled = request.params, request.verification is Verification.COUPLED
    return params.seed is not None and not params.greedy and not coupled


class PastOutputs:
    """The newest outputs, within both bounds.

    Nothing can be taken out of an automaton. So a second one is filled with all that comes once the
    first is half full, and takes its place when that is full: the oldest half is forgotten at once,
    no output is read more than twice, and nothing is ever rebuilt at once.
    """

    def __init__(self, config: SuffixConfig) -> None:
        self._limits = config.limits
        self._max_outputs, self._max_tokens = config.max_cached_requests, config.max_cached_tokens
        self.automaton, self._num_outputs = SuffixAutomaton(config.limits), 0
        self._successor, self._num_in_successor = SuffixAutomaton(config.limits), 0

    def add(self, output: Sequence[int]) -> None:
        """An output that is complete; one that would fill more than half is cut at its front."""
        if not self._max_outputs:
            return
        half = self._max_tokens // 2
        output = output[max(0, len(output) - half) :]
        while (
            self._num_outputs == self._max_outputs
            or self.automaton.num_tokens + len(output) > self._max_tokens
        ):
            self.automaton, self._num_outputs = self._successor, self._num_in_successor
            self._successor, self._num_in_successor = SuffixAutomaton(self._limits), 0
        if 2 * self._num_outputs >= self._max_outputs or self.automaton.num_tokens >= half:
            self._successor.add(output)
            self._num_in_successor += 1
        self.automaton.add(output)
        self._num_outputs += 1


def _integer(options: Options, name: str, default: int, least: int, most: int | None = None) -> int:
    value = options.take_int(f"suffix_decoding_{name}", default)
    assert value is not None
    if value < least or (most is not None and value > most):
        bound = f"{least} or more" if most is None else f"between {least} and {most}"
        raise UsageError(f"speculative_config: suffix_decoding_{name} must be {bound}, not {value}")
    return value


def _number(options: Options, name: str, default: float, most: int) -> float:
    value = options.take(f"suffix_decoding_{name}", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise UsageError(
            f"speculative_config: suffix_decoding_{name} must be a number between 0 and {most}, "
            f"not {value!r}"
        )
    return float(value)
