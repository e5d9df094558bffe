"""The chance that a draft token is accepted, learnt from what became of earlier ones.

All chances are conditional: of the token at a place, given that those before it were accepted.
They are moving averages, so that what was long ago is forgotten. A request begins with the averages
of the traffic, of which the conditional ones are right for somebody unknown: whoever had a second
token accepted is likely one of those whose tokens are.

Where drafters tell how confident they are of a token, a table learns what that means: the chance by
confidence, for everybody, and for each request a factor on it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.core.batch import Committed, StepReport
from slipstream.core.request import Request

MEMORY = 0.1  # weight of the latest result in a request's averages: half is forgotten in 7 results
TRAFFIC_MEMORY = 0.02
UNKNOWN = 0.75  # chance before anything is known: optimistic, so that it is tried
PRIOR_TRIALS = 3  # results that what a request begins with counts for
SURPRISED = -1  # results that a request counts for once a probe found it changed
NUM_BINS = 16
_BIN_MEMORY = 0.01
_FACTOR_STEPS = 8
_MOST_FACTOR = 1.5
_MOST_JUDGED = 16  # requests of a step that are looked at; of larger batches they take turns


@dataclass(slots=True, eq=False)
class History:
    """What is known of one request.

    Attributes:
        chances: by place, from the first.
        num_results: steps in which it had a draft.
        probed_at: the number of the step of its last probe.
        factor: on the chances that follow from confidences.
        probed: the place that a probe asks about, until its result is there; 0: none.
    """

    request: Request
    chances: list[float]
    num_results: int = 0
    probed_at: int = -1
    factor: float = 1.0
    probed: int = 0

    @property
    def rounded_factor(self) -> float:
        """One of few values, so that few tables are made."""
        return round(self.factor * _FACTOR_STEPS) / _FACTOR_STEPS


@dataclass(frozen=True)
class Bin:
    """Tokens whose predicted chance lies in one range.

    Attributes:
        predicted: the sum of what was predicted.
        accepted: how many were accepted, of `count`.
    """

    predicted: float = 0.0
    accepted: int = 0
    count: int = 0


@dataclass(eq=False)
class Reliability:
    """How far predictions come true: all tokens that were judged, in bins by predicted chance."""

    _sums: list[list[float]] = field(
        default_factory=lambda: [[0.0, 0.0, 0.0] for _ in range(NUM_BINS)]
    )

    def add(self, predicted: float, accepted: bool) -> None:
        sums = self._sums[min(NUM_BINS - 1, int(predicted * NUM_BINS))]
        sums[0] += predicted
        sums[1] += accepted
        sums[2] += 1

    @property
    def bins(self) -> tuple[Bin, ...]:
        """All bins by predicted chance, from 0 to 1."""
        return tuple(Bin(sums[0], int(sums[1]), int(sums[2])) for sums in self._sums)


class Acceptance:
    """Learns from every step.

    Args:
        places: that a draft token may have.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._histories: dict[str, History] = {}
        self._chances = [UNKNOWN] * places
        self._num_results = [0] * places
        # Before anything is known a confidence is taken at its word.
        self._by_confidence = [(place + 0.5) / NUM_BINS for place in range(NUM_BINS)]
        self._results_by_bin = [0] * NUM_BINS
        self.reliability = Reliability()
        self.num_steps = self.all_until = 0  # up to that step all requests are looked at
        self.has_confidences = False

    def __len__(self) -> int:
        """How many requests something is kept about."""
        return len(self._histories)

    @property
    def chances(self) -> Sequence[float]:
        """What the traffic's are, by place."""
        return self._chances

    def of(self, request: Request) -> History:
        """What is known of a request, now or from now on."""
        found = self._histories.get(request.request_id)
        if found is None or found.request is not request:
            found = History(request, list(self._chances))
            self._histories[request.request_id] = found
        return found

    def keep_only(self, num_live: int) -> None:
        """Drop what ended, once that is most of it; so at most twice the live requests are kept."""
        if len(self._histories) > 2 * num_live + 8:
            self._histories = {
                name: it for name, it in self._histories.items() if not it.request.finished
            }

    def rates(self, factor: float) -> tuple[float, ...]:
        """The chance by confidence, where a request has this factor: place i of n is for
        confidences from i / n on."""
        return tuple(min(1.0, rate * factor) for rate in self._by_confidence)

    def observe(self, report: StepReport) -> list[tuple[int, int]]:
        """Learn what was accepted. Of a large batch some requests are looked at, in turn.

        Returns:
            Of every probe whose result this is, the place and how many tokens were accepted.
        """
        self.num_steps += 1
        pairs = list(zip(report.batch.requests, report.committed, strict=True))
        stride = 1 + (len(pairs) - 1) // _MOST_JUDGED
        if self.num_steps <= self.all_until:
            stride = 1
        examined = self.num_steps % len(pairs)
        probes: list[tuple[int, int]] = []
        for index in range(self.num_steps % stride, len(pairs), stride):
            item, gain = pairs[index]
            if gain.num_draft_tokens and report.live[index]:
                self._learn(item.request, gain, probes, index == examined)
            if item.request.finished:
                self._histories.pop(item.request.request_id, None)
        return probes

    def _learn(
        self, request: Request, gain: Committed, probes: list[tuple[int, int]], examined: bool
    ) -> None:
        history = self._histories.get(request.request_id)
        if history is None or history.request is not request:
            return
        drafted = gain.num_draft_tokens if gain.num_positions is None else gain.num_positions
        accepted, chances = gain.num_accepted, history.chances
        judged = min(accepted + 1, drafted, self._places)
        if history.probed and drafted >= history.probed:
            probes.append((history.probed, accepted))
            if accepted >= history.probed:
                history.num_results = SURPRISED
            history.probed = 0
        if gain.confidences:
            self._learn_confidences(history, gain, judged)
        elif examined:
            for place in range(judged):
                self.reliability.add(chances[place], place < accepted)
        weight = max(MEMORY, 1 / (history.num_results + PRIOR_TRIALS))
        history.num_results += 1
        for place in range(min(accepted, judged)):
            chances[place] += weight * (1 - chances[place])
        if judged > accepted:
            chances[accepted] -= weight * chances[accepted]
        self._learn_traffic(accepted, judged)

    def _learn_traffic(self, accepted: int, judged: int) -> None:
        chances, counts = self._chances, self._num_results
        for place in range(judged):
            counts[place] += 1
            weight = max(TRAFFIC_MEMORY, 1 / (counts[place] + PRIOR_TRIALS))
            chances[place] += weight * ((place < accepted) - chances[place])

    def _learn_confidences(self, history: History, gain: Committed, judged: int) -> None:
        self.has_confidences = True
        table, counts = self._by_confidence, self._results_by_bin
        for place, confidence in enumerate(gain.confidences[:judged]):
            index = min(NUM_BINS - 1, int(confidence * NUM_BINS))
            taken, by_table = place < gain.num_accepted, table[index]
            self.reliability.add(min(1.0, by_table * history.factor), taken)
            counts[index] += 1
            weight = max(_BIN_MEMORY, 1 / (counts[index] + PRIOR_TRIALS))
            table[index] += weight * (taken - by_table)
            # A factor of which the table is right on average: the step is what is left over.
            error = taken - min(1.0, by_table * history.factor)
            history.factor = min(_MOST_FACTOR, max(0.0, history.factor + MEMORY * error))


def survivals(chances: Iterable[float], most: int) -> list[float]:
    """The chance that a token and all before it are accepted, for the first `most` places."""
    left, found = 1.0, []
    for chance, _ in zip(chances, range(most), strict=False):
        left *= chance
        found.append(left)
    return found
