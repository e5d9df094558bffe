"""`suffix`: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), which needs no second model.

It drafts what most often followed the last tokens, in the request's own text and in earlier
outputs. Longer matches and more frequent continuations give longer drafts. Sampled requests with a
seed that are not coupled use their own text alone, so that a seed gives the same text whatever ran
before.

A suffix automaton (Blumer et al. 1985) is built token by token, and has one state for all strings
that end at the same places of its texts. Here every state also counts these places. So it tells how
often each token followed the last m tokens, for every m at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.batch import Batch
from slipstream.core.errors import UsageError
from slipstream.core.request import Request
from slipstream.core.sampling_params import Verification
from slipstream.core.spans import end_of_spans, texts_between
from slipstream.runner.device_batch import Guesses
from slipstream.runner.device_state import DeviceState
from slipstream.speculative.drafter import HostDrafter, LoadedDrafter, load_host_drafter
from slipstream.speculative.options import Options, TargetModel


@dataclass(frozen=True)
class GuessLimits:
    """Limits of the length of a guess (the parameters of SuffixDecoding, Oliaro et al. 2024).

    Attributes:
        depth: maximum length of a match and its guess together, in tokens.
        spec_factor: maximum of guessed tokens per matched token.
        min_prob: a guess ends where its probability would fall below this.
        min_match: shorter matches give no guess.
    """

    depth: int
    spec_factor: float
    min_prob: float
    min_match: int = 1

    def most_tokens(self) -> list[int]:
        """The maximum of draft tokens for each length of a match, from 0 to `depth`."""
        return [
            min(int(self.spec_factor * matched + 1e-6), self.depth - matched)
            if matched >= self.min_match
            else 0
            for matched in range(self.depth + 1)
        ]


@dataclass(frozen=True)
class Guess:
    """Draft tokens with a score: the expected number of right ones, which is the sum of the
    probabilities of the first token, of the first two, and so on, by their frequencies."""

    token_ids: list[int]
    score: float


NOTHING = Guess([], 0.0)


class SuffixAutomaton:
    """A suffix automaton with exact counts of all strings of at most `limits.depth` tokens.

    A token costs amortised O(depth) dictionary steps, and at most two states. State 0 is the empty
    string. The strings of state s have length[link[s]] + 1 to length[s] tokens; link[s] is the
    state of their longest suffix that ends at more places.
    """

    def __init__(self, limits: GuessLimits) -> None:
        self._depth, self._min_prob = limits.depth, limits.min_prob
        self._most = limits.most_tokens()
        self._forget()

    def _forget(self) -> None:
        """Reset to the automaton of no text."""
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length = [-1], [0]
        self._count = [0]  # of the places where a state's strings end
        self._followed = [0]  # how many of these have a token after them
        self._likely = [-1]  # the commonest of these tokens; of equally common ones the last
        self._whole = 0  # the state of the growing text
        self._recent = 0  # the state of its last `depth` tokens
        self.num_tokens = 0  # of all texts

    def add(self, text: Sequence[int]) -> None:
        self._whole = self._recent = 0
        self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the growing text. If that is interrupted, all texts are forgotten, since a
        state that is half updated cannot be repaired."""
        try:
            for token in tokens:
                self._extend(token)
            self.num_tokens += len(tokens)
        except BaseException:
            self._forget()
            raise

    def _extend(self, token: int) -> None:
        links, lengths = self._link, self._length
        self._whole = self._append(self._whole, token)
        before, state = self._recent, self._next[self._recent][token]
        while lengths[links[state]] >= self._depth:
            state = links[state]
        self._recent = state
        self._count_suffixes(state, before, token)

    def guess(self, context: Sequence[int], most: int, better_than: Guess = NOTHING) -> Guess:
        """Guess at most `most` tokens after `context`: the guess with the best score over all
        suffixes that occur in the texts; of equal scores, the longest suffix wins."""
        best = better_than
        state, matched = self._match(context)
        while state > 0:
            parent = self._link[state]
            # All suffixes of one state have the same continuations.
            longest = min(most, max(self._most[self._length[parent] + 1 : matched + 1]))
            if longest > best.score:
                guess = self._follow(state, longest)
                best = guess if guess.score > best.score else best
            state, matched = parent, self._length[parent]
        return best

    def _match(self, context: Sequence[int]) -> tuple[int, int]:
        """The longest suffix of at most `depth` tokens that occurs: its state and its length."""
        state, matched = 0, 0
        for token in context[-self._depth :]:
            while state and token not in self._next[state]:
                state = self._link[state]
                matched = self._length[state]
            if token in self._next[state]:
                state, matched = self._next[state][token], matched + 1
        return state, matched

    def _follow(self, state: int, most: int) -> Guess:
        """The continuation that takes the most frequent token each time."""
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < most and self._followed[state]:
            token, followed = self._likely[state], self._followed[state]
            state = self._next[state][token]
            probability *= self._count[state] / followed
            if probability < self._min_prob:
                break
            tokens.append(token)
            score += probability
        return Guess(tokens, score)

    def _count_suffixes(self, state: int, before: int, token: int) -> None:
        """Count the strings of at most `depth` tokens that end with this token, and update the
        most frequent next token of the strings that end before it."""
        links, following, counts, likely = self._link, self._next, self._count, self._likely
        while state > 0:
            counts[state] += 1
            state = links[state]
        while before > 0:
            self._followed[before] += 1
            if likely[before] != token:
                after, rival = following[before], likely[before]
                if rival < 0 or counts[after[token]] >= counts[after[rival]]:
                    likely[before] = token
            before = links[before]

    def _append(self, whole: int, token: int) -> int:
        """Append a token to the growing text; returns its new state."""
        if token in self._next[whole]:  # an earlier text began alike
            return self._exactly(whole, token)
        new = self._new_state(self._length[whole] + 1)
        state = whole
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._exactly(state, token)
        return new

    def _exactly(self, state: int, token: int) -> int:
        """The state whose longest string is the longest of `state`, followed by `token`. If that
        string belongs to a state with longer ones, it is split off."""
        found, length = self._next[state][token], self._length[state] + 1
        if self._length[found] == length:
            return found
        split = self._new_state(length)
        self._next[split] = dict(self._next[found])
        for known in (self._link, self._count, self._followed, self._likely):
            known[split] = known[found]
        self._link[found] = split
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _new_state(self, length: int) -> int:
        """A new state with a count of 0, whose link is the empty string."""
        self._next.append({})
        self._length.append(length)
        self._link.append(0)
        self._count.append(0)
        self._followed.append(0)
        self._likely.append(-1)
        return len(self._next) - 1


DEFAULT_DEPTH, DEFAULT_REQUESTS, DEFAULT_TOKENS = 24, 10_000, 1 << 18
DEFAULT_FACTOR, DEFAULT_MIN_PROB = 1.0, 0.1
MAX_DEPTH = 1024  # a token of a repeating text costs as many steps


@dataclass(frozen=True)
class SuffixConfig:
    """The limits of guesses, and how much is kept of earlier outputs (0: nothing)."""

    limits: GuessLimits
    max_cached_requests: int
    max_cached_tokens: int


def read_options(options: Options) -> SuffixConfig:
    """Keys and defaults are those of other engines. There are two more:
    `suffix_decoding_max_cached_tokens`, since a number of outputs does not bound memory, and
    `suffix_decoding_min_match`, the length of the shortest match that counts."""
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
    return load_host_drafter(lambda state: SuffixDrafter(config, state))


class SuffixDrafter(HostDrafter):
    """Keeps an automaton for each request that drafts, which takes about half a KiB of host memory
    per token, and one for earlier outputs, those of seeded requests included."""

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
        else:  # the texts before and after an image are separate strings
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
    """An automaton of the newest outputs, within limits of their number and their tokens.

    Nothing can be removed from an automaton. So once it is half full, new outputs go into a second
    one as well, which replaces it when it is full. The older half is forgotten at once, no output
    is added more than twice, and nothing is ever rebuilt in one go.
    """

    def __init__(self, config: SuffixConfig) -> None:
        self._limits = config.limits
        self._max_outputs, self._max_tokens = config.max_cached_requests, config.max_cached_tokens
        self.automaton, self._num_outputs = SuffixAutomaton(config.limits), 0
        self._successor, self._num_in_successor = SuffixAutomaton(config.limits), 0

    def add(self, output: Sequence[int]) -> None:
        """Add a complete output; one that would fill more than half is cut at its front."""
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
