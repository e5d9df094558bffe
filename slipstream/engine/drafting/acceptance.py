"""Estimates of the probability that draft tokens are accepted, from earlier results.

A *chance* is the probability that the draft token at a position is accepted, given that all before
it were. Chances are moving averages, so old results are forgotten. A new request begins with the
averages of the traffic with its adapter (traffic.py). Conditional averages are the right ones for a
request that nothing is known about: if its second token is accepted, it is probably one of those
with high acceptance.

Trees come in a few sizes, and the first nodes of a larger tree are about those of a smaller one. So
their results tell for each size how many tokens its nodes beyond the size before add. The *chance*
of a size is this number, relative to the depth of the trees.

If drafters give confidences, a table of this traffic maps confidence to chance, and each request
has a factor on it.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice, pairwise
from operator import attrgetter, mul

from slipstream.core.batch import FACTOR_PARTS, NUM_BINS, Committed, ScheduledRequest, StepReport
from slipstream.core.request import Request
from slipstream.engine.drafting import native
from slipstream.engine.drafting.reliability import Reliability
from slipstream.engine.drafting.traffic import (
    KNOWN_TRIALS,
    MANY,
    PRIOR_TRIALS,
    UNKNOWN,
    Traffic,
    Traffics,
)

MEMORY = 0.1  # weight of the latest result in a request's averages: half is forgotten in 7 results
TRAFFIC_MEMORY = 0.02
_NOISE = MEMORY / (2 - MEMORY)  # variance of such an average over that of a result
_BIN_MEMORY, _MANY_IN_BIN = 0.01, 100  # with as many results or more, that is the weight of one
_LUCK = 0.25  # about two standard deviations of the factor of an average request
_LATEST = 0.3
_FEWEST_DRAWN, _DRAWN_PLACES = 4, 3
_MOST_FACTOR = 1.5
_ACCEPTED = attrgetter("num_accepted")
_STOPPED = 0.5  # weight, as a rejection, of a token that a chain lacks because it had ended
_EXAMINED = 8  # every so many steps the prediction for one request is checked
_RECENT = 128  # number of chains whose confidences are kept
# About as many requests of a step are evaluated, in turn. All are, for some steps, where there are
# probes, and where results are not as expected.
_MOST_JUDGED = 8


@dataclass(slots=True, eq=False)
class History:
    """The estimates for one request.

    Attributes:
        chances: by position, from the first.
        traffic: the averages of its kind, from which it started.
        num_results: number of steps in which it had a draft.
        probed_at: the number of the step of its last probe.
        factor: multiplies the chances that follow from confidences.
        probed: the position that a probe tries, of trees the number of their size, until its result
            arrives; 0: none.
        has_drafted: it has had a draft, so that the drafter has computed its prompt.
        ends_soon: see `Lateness`; it is not to draft.
    """

    chances: list[float]
    traffic: Traffic
    num_results: int = 0
    probed_at: int = -1
    factor: float = 1.0
    probed: int = 0
    has_drafted: bool = False
    ends_soon: bool = False

    @property
    def rounded_factor(self) -> float:
        """Rounded, so that there are few different tables; 1 if it may differ from 1 by chance."""
        if abs(self.factor - 1) < _LUCK:
            return 1.0
        return round(self.factor * FACTOR_PARTS) / FACTOR_PARTS


class Acceptance:
    """Estimates chances from the results of all steps.

    Args:
        places: number of positions that a draft token may have; of trees their depth.
        sizes: the sizes of trees, rising; empty for chains.
    """

    def __init__(self, places: int, sizes: Sequence[int] = ()) -> None:
        self._histories: dict[Request, History] = {}
        self._sizes, self._depth = tuple(sizes), places
        unknown = [UNKNOWN] * places
        if sizes:  # each is taken to add half of what the one before it does
            places, parts = len(sizes), 2 - 2.0 ** (1 - len(sizes))
            whole = sum(survivals(unknown, self._depth)) / self._depth / parts
            unknown = [whole / 2**place for place in range(places)]
        self._places = places
        self._traffics = Traffics(unknown)
        self._shared, self._levels = self._traffics.plain, dict[Traffic, float]()
        # For each of the latest chains: the confidences, the factor of its request, its traffic.
        self._recent: deque[tuple[Sequence[float], float, Traffic]] = deque(maxlen=_RECENT)
        self.reliability = Reliability()
        self.num_steps = self._all_until = 0  # up to that step all requests are evaluated
        self._learn_native = None if sizes else native.learn_drafts
        self.latest = 0.0  # accepted tokens of an evaluated request in a step

    def __len__(self) -> int:
        """Number of requests with a history."""
        return len(self._histories)

    @property
    def has_confidences(self) -> bool:
        """Whether a draft has had confidences."""
        return bool(self._recent)

    def of(self, request: Request) -> History:
        """The history of a request; a new one if there is none."""
        found = self._histories.get(request)
        if found is None:
            traffic = self._traffics.of(request)
            found = self._histories[request] = History(list(traffic.chances), traffic)
        return found

    def of_all(self, requests: Sequence[Request]) -> list[History]:
        """The histories of several requests."""
        found = list(map(self._histories.get, requests))
        return [history or self.of(it) for history, it in zip(found, requests, strict=True)]

    def drop_finished(self, num_live: int) -> None:
        """Drop histories of finished requests once they are more than half of all."""
        if len(self._histories) > 2 * num_live + 8:
            self._histories = {
                request: it for request, it in self._histories.items() if not request.finished
            }

    def chances_of(self, histories: Sequence[History]) -> list[Sequence[float]]:
        """The chances of several requests by position, shrunk towards their mean (James and Stein
        1961), since the best of many noisy averages are not as good as they look. If they differ no
        more than noise does, they are taken to be equal."""
        if len(histories) < _FEWEST_DRAWN:
            return [_shrunk_to_traffic(it) for it in histories]
        columns: list[Sequence[float]] = [*zip(*[it.chances for it in histories], strict=True)]
        for place, column in enumerate(columns[:_DRAWN_PLACES]):
            mean = sum(column) / len(column)
            spread = sum([(it - mean) * (it - mean) for it in column]) / len(column)
            noise = mean * (1 - mean) * _NOISE
            share = noise / spread if spread > noise else 1.0
            columns[place] = [it + share * (mean - it) for it in column]
        return [*zip(*columns, strict=True)]

    def gains_of(
        self,
        histories: Sequence[History],
        bounds: Sequence[int],
        chances: Sequence[Sequence[float]] | None,
    ) -> list[list[float]]:
        """See `chain_gains`; `chances` count in place of those of the requests, unless None."""
        if chances is not None or len(histories) < _FEWEST_DRAWN or native.draft_gains is None:
            return chain_gains(chances or self.chances_of(histories), bounds)
        own = [it.chances for it in histories]
        return native.draft_gains(own, bounds, _DRAWN_PLACES, _NOISE)

    def recent_chances(self, number: int) -> list[Sequence[float]]:
        """The chances by position of the latest `number` chains, from their confidences, and after
        their ends from the traffic. They show how chances are spread over the requests and
        positions of a step, not which request has which."""
        rates, last = cache(Traffic.scaled), NUM_BINS - 1
        chains: list[Sequence[float]] = []
        for confidences, factor, traffic in list(self._recent)[-number:]:
            row = rates(traffic, factor)
            chain = [row[min(last, int(it * NUM_BINS))] for it in confidences]
            chains.append((*chain, *traffic.chances[len(chain) :]))
        return (chains * (1 + number // len(chains)))[:number]

    def share_rates(self, histories: Sequence[History]) -> tuple[float, ...]:
        """One table of rates by confidence for all of these requests. `factor_of` refers to it."""
        shared = histories[0].traffic
        if self._traffics.have_adapters:
            shared = self._traffics.most_accepted([it.traffic for it in histories])
        self._shared, self._levels = shared, {shared: 1.0}
        return shared.scaled(1.0)

    def factor_of(self, history: History) -> float:
        """The factor of a request on the shared rates."""
        level = self._levels.get(history.traffic)
        if level is None:  # it has another adapter
            level = min(1.0, history.traffic.level(self._shared))
            self._levels[history.traffic] = level
        return history.rounded_factor * level

    def tree_gain(self, chances: Sequence[float], size: int) -> float:
        """Expected accepted tokens of a tree of one of the sizes."""
        return self._depth * sum(chances[: self._sizes.index(size) + 1])

    def expect_changes(self, steps: int) -> None:
        """Evaluate all requests of the next steps."""
        self._all_until = max(self._all_until, self.num_steps + steps)

    def observe(self, report: StepReport) -> list[int]:
        """Learn from the results of a step; of a large batch, from some requests in turn.

        Returns:
            For each probe in this step, the number of accepted tokens at the position that it tried
            and after it.
        """
        self.num_steps += 1
        items, gains, live = report.batch.requests, report.committed, report.live
        # Odd, so that a batch in which two kinds of requests alternate is sampled evenly.
        stride = 1 + 2 * -(-(len(items) - _MOST_JUDGED) // (2 * _MOST_JUDGED))
        if self.num_steps <= self._all_until:
            stride = 1
        turn, rest = divmod(self.num_steps, _EXAMINED)
        examined = -1 if rest else turn % len(items)
        probes: list[int] = []
        index = self.num_steps % stride
        while index < len(items):
            if self._learn_native is not None:
                # Up to the next request that has ended, or whose predictions are examined.
                index = self._learn_native(
                    self._histories, items, gains, live, index, stride, examined, self._places,
                    self._recent, probes,
                )  # fmt: skip
                if index >= len(items):
                    break
            item, gain = items[index], gains[index]
            if not live[index]:
                self._histories.pop(item.request, None)
            elif gain.num_draft_tokens or item.stops or item.trim:
                self._learn(item, gain, probes, index == examined)
            index += stride
        looked_at = gains[self.num_steps % stride :: stride]
        accepted: int = sum(map(_ACCEPTED, looked_at))
        self.latest += _LATEST * (accepted / len(looked_at) - self.latest)
        return probes

    def _learn(
        self, item: ScheduledRequest, gain: Committed, probes: list[int], examined: bool
    ) -> None:
        history = self._histories.get(item.request)
        if history is None:
            return
        drafted, accepted, found = gain.num_draft_tokens, gain.num_accepted, [1.0] * 0
        if self._sizes:
            found = _added_by_sizes(gain, self._sizes)
            drafted, verdicts = len(found), [it / self._depth for it in found]
        else:
            verdicts = [1.0] * min(accepted + 1, drafted, self._places)
            if accepted < len(verdicts):
                verdicts[accepted] = 0.0
        judged = len(verdicts)
        known = history.traffic.num_results[0]
        prior = PRIOR_TRIALS if known < MANY else KNOWN_TRIALS
        if history.probed and drafted >= history.probed:
            place = history.probed - 1
            probes.append(int(sum(found[place:])) if found else max(0, accepted - place))
            if probes[-1]:
                history.num_results = PRIOR_TRIALS - prior  # the request has changed: learn faster
            history.probed = 0
        trials = history.num_results + prior
        weight = 1 / trials if trials * MEMORY < 1 else MEMORY
        if gain.confidences:
            self._learn_confidences(history, gain.confidences, verdicts, examined)
            weight /= 2  # confidences tell as much
        elif examined:
            for chance, verdict in zip(history.chances, verdicts, strict=False):
                self.reliability.add(chance, verdict)
        if item.stops and judged == accepted and _was_stopped(item, gain):
            # The next token was not drafted.
            history.chances[accepted] -= _STOPPED * weight * history.chances[accepted]
        history.num_results += 1
        history.has_drafted = True
        _learn_verdicts(history.chances, history.traffic, weight, verdicts)

    def _learn_confidences(
        self,
        history: History,
        confidences: Sequence[float],
        verdicts: Sequence[float],
        examined: bool,
    ) -> None:
        traffic, chances = history.traffic, history.chances
        table, counts = traffic.rates, traffic.results_by_bin
        rounded, factor = history.rounded_factor, history.factor
        self._recent.append((confidences, rounded, traffic))
        # The average for a confidence is less noisy than the result of one token, and is known for
        # tokens after a rejected one, too.
        trials = max(0, history.num_results) + PRIOR_TRIALS
        own_weight = 1 / trials if trials * MEMORY < 1 else MEMORY
        judged, last = len(verdicts), NUM_BINS - 1
        for place, confidence in enumerate(confidences[: self._places]):
            index = int(confidence * NUM_BINS) if confidence < 1.0 else last
            by_table = table[index]
            chance = by_table * rounded
            chances[place] += own_weight * ((chance if chance < 1.0 else 1.0) - chances[place])
            if place >= judged:
                continue
            verdict, predicted = verdicts[place], by_table * factor
            if predicted > 1.0:
                predicted = 1.0
            if examined:
                self.reliability.add(predicted, verdict)
            weight = _BIN_MEMORY
            if counts[index] < _MANY_IN_BIN:
                counts[index] += 1
                weight = max(weight, 1 / (counts[index] + PRIOR_TRIALS))
            table[index] = by_table + weight * (verdict - by_table)
            # Move the factor so that the table is right for this request on average.
            factor += MEMORY * (verdict - predicted)
            if not 0.0 <= factor <= _MOST_FACTOR:
                factor = 0.0 if factor < 0.0 else _MOST_FACTOR
        history.factor = factor


def _learn_verdicts(
    own: list[float], traffic: Traffic, own_weight: float, verdicts: Sequence[float]
) -> None:
    """Learn whether tokens were accepted (1 or 0), for the request and for the traffic."""
    chances, counts = traffic.chances, traffic.num_results
    for place, verdict in enumerate(verdicts):
        own[place] += own_weight * (verdict - own[place])
        weight = TRAFFIC_MEMORY
        if counts[place] < MANY:  # beyond that their number does not matter
            counts[place] += 1
            weight = max(weight, 1 / (counts[place] + PRIOR_TRIALS))
        chances[place] += weight * (verdict - chances[place])


def _shrunk_to_traffic(history: History) -> Sequence[float]:
    """The chances of one request, shrunk towards those of its traffic; equal to them if they differ
    no more than noise does."""
    drawn: list[float] = []
    for own, usual in zip(history.chances, history.traffic.chances, strict=True):
        off, noise = own - usual, usual * (1 - usual) * _NOISE
        drawn.append(usual + off * (1 - noise / (off * off)) if off * off > noise else usual)
    return drawn


def _added_by_sizes(gain: Committed, sizes: Sequence[int]) -> list[float]:
    """For each size of trees up to that of the draft, the accepted nodes beyond the size before."""
    drafted = [size for size in sizes if size <= gain.num_draft_tokens]
    counts = [bisect_right(gain.nodes, size) for size in drafted]
    return [float(count - before) for before, count in pairwise((0, *counts))]


def _was_stopped(item: ScheduledRequest, gain: Committed) -> bool:
    """Whether a chain that was accepted as a whole had ended early because of its stops."""
    if item.stops is None or gain.num_accepted < gain.num_draft_tokens:
        return False
    has_ended = gain.num_draft_tokens < item.num_draft_tokens
    return has_ended and (bool(gain.confidences) or not gain.num_draft_tokens)


def chain_gains(chances: Sequence[Sequence[float]], bounds: Sequence[int]) -> list[list[float]]:
    """[requests, positions] the survival of each draft token; 0 beyond a request's bound."""
    gains = [[*accumulate(row, mul)] for row in chances]
    for row, bound in zip(gains, bounds, strict=True):
        if bound < len(row):
            row[bound:] = [0.0] * (len(row) - bound)
    return gains


def survivals(chances: Iterable[float], most: int) -> list[float]:
    """The probability that a token and all before it are accepted, for `most` positions."""
    return list(accumulate(islice(chances, max(0, most)), mul))
