"""The policy that chooses how much is drafted: against brute force, and over simulated traffic."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, pairwise, product

import numpy as np
import pytest

from slipstream.core.batch import DraftPlan, StepReport
from slipstream.core.request import Request
from slipstream.core.step_form import CapturedForm, ExactForm, StepForm
from slipstream.engine.draft_policy import Candidate, DraftPolicy, FixedPolicy
from slipstream.engine.drafting.acceptance import Acceptance, survivals
from slipstream.engine.drafting.choice import CostTable, Gains, choose
from slipstream.engine.drafting.costs import CostModel
from slipstream.engine.drafting.policy import AdaptivePolicy
from slipstream.engine.drafting.probes import PROBE_SHARE, Probes
from tests import policy_trace
from tests.draft_traffic import Chance, Costs, Server, limits, report, request, seconds_of

K = 7
WIDTHS = (0, 1, 2, 4, 7)
EXACT, PADDED = ExactForm(), CapturedForm(64, WIDTHS, packs=False)
PACKED = CapturedForm(64, WIDTHS, packs=True)
FORMS: dict[str, StepForm] = {"exact": EXACT, "padded": PADDED, "packed": PACKED}
LARGE = Costs(fixed=1.0, row=0.002, draft_pass=0.08, draft_row=0.0005)  # a model on a GPU
MIDDLE = Costs(fixed=1.0, row=0.06, draft_pass=0.06, draft_row=0.01)
STEEP = Costs(fixed=0.2, row=0.3, draft_pass=0.01, draft_row=0.03)
TILED = Costs(fixed=0.5, row=0.05, draft_pass=0.05, draft_row=0.01, tile=5)


class Falling(Costs):
    """Some sizes are cheaper than smaller ones."""

    def target_seconds(self, requests: int, rows: int, context: int) -> float:
        return 1.0 + 0.05 * rows - (0.3 if rows in (5, 9, 10, 13) else 0.0)


class Recorded(Costs):
    """Those that an engine learned on a CPU."""

    model = CostModel()

    def target_seconds(self, requests: int, rows: int, context: int) -> float:
        return self.model.target_seconds(requests, rows, 100 * requests)

    def draft_seconds(self, requests: int, width: int, context: int) -> float:
        return self.model.draft_seconds(requests, width, 0)


TRACE = policy_trace.read()
Recorded.model.restore(TRACE.costs)
SHAPES = {"flat": Costs(), "large": LARGE, "steep": STEEP, "tiled": TILED, "falling": Falling()}
SHAPES["recorded"] = Recorded()


def adaptive(costs: Costs, form: StepForm, most: int = K) -> AdaptivePolicy:
    return AdaptivePolicy(limits(most), [it for it in WIDTHS if it <= most], costs, form)


def serve(
    policy: DraftPolicy, costs: Costs, form: StepForm, chances: Sequence[Chance], steps: int
) -> Server:
    server = Server(policy, costs, form, K)
    for chance in chances:
        server.add(chance)
    server.run(steps)
    return server


def always(chance: float) -> Chance:
    return lambda step: chance


# ---------------------------------------------------------------------- the choice


def smoothed_seconds(counts: Sequence[int], table: CostTable) -> float:
    """Seconds of an exact step by the differences between numbers of requests that draft."""
    if len(counts) == 1:
        return table.alone(counts[0], range(5))[counts[0]]
    seconds = table.targets(sum(counts), max(counts))[sum(counts)]
    for place in range(1, max(counts) + 1):
        drafting = sum(count >= place for count in counts)
        seconds += sum(table.added(place)[: drafting + 1])
    return max(table.least, seconds)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_choice_is_as_good_as_the_best_of_all(shape: str, form: str) -> None:
    """In each step of a run of the demo that was recorded."""
    costs, steps, most = SHAPES[shape], FORMS[form], policy_trace.MOST
    widths = [width for width in WIDTHS if width <= most]
    acceptance = Acceptance(most)
    named = cache(lambda number: request(f"request {number}", most))
    drafted_at_all = 0
    for number, step in enumerate(TRACE.steps):
        requests = [named(it) for it, _, _ in step]
        histories = [acceptance.of(it) for it in requests]
        acceptance.observe(report(requests, [(drafted, hit) for _, drafted, hit in step]))
        if number % 2:
            continue
        running = min(1 + number // 2 % 4, len(step))
        gains = [survivals(it.chances, most) for it in histories[:running]]
        table = CostTable(costs, steps, running, 100 * running)
        choice = choose(gains, range(5) if form == "exact" else widths, table)

        def speed(counts: Sequence[int], gains: Gains = gains, table: CostTable = table) -> float:
            pairs = zip(gains, counts, strict=True)
            tokens = len(counts) + sum(sum(chain[:count]) for chain, count in pairs)
            if shape == "recorded" and form == "exact":  # it smooths costs for few requests
                return tokens / smoothed_seconds(counts, table)
            return tokens / seconds_of(counts, costs, steps, widths)

        best = max(speed(counts) for counts in product(range(most + 1), repeat=running))
        # Only those numbers are compared that the ranking of tokens leads to.
        assert speed(choice.counts) >= (0.96 if shape == "recorded" else 0.99) * best
        assert choice.speed == pytest.approx(speed(choice.counts))
        drafted_at_all += any(choice.counts)
    assert drafted_at_all  # else nothing was compared


class Bumpy(Costs):
    """A model that overestimates passes for four requests, and underestimates those for three."""

    def draft_seconds(self, requests: int, width: int, context: int) -> float:
        off = {3: -0.1, 4: 0.1}.get(requests, 0.0)
        return width * (0.4 + 0.05 * requests + off)


def test_errors_of_single_numbers_of_requests_do_not_decide_who_drafts() -> None:
    table = CostTable(Bumpy(fixed=1.0, row=0.05), EXACT, 4, 400)
    choice = choose([[0.7], [0.69], [0.68], [0.67]], (0, 1), table)
    assert choice.counts == [1, 1, 1, 1]


class Falls(Costs):
    """Fewer requests that draft seem to take longer than all of them."""

    def draft_seconds(self, requests: int, width: int, context: int) -> float:
        return float(requests == width == 1)


@pytest.mark.parametrize(("size", "target"), [(2, 0.5), (9, 1.0)])
def test_no_step_is_taken_to_last_no_time(size: int, target: float) -> None:
    table = CostTable(Falls(fixed=target), EXACT, size, 100 * size)
    choice = choose([[0.9, 0.9]] + [[0.9, 0.0]] * (size - 1), (0, 1, 2), table)
    assert 0 < choice.speed < np.inf


def test_a_longer_chain_never_stands_behind_a_gap() -> None:
    table = CostTable(MIDDLE, EXACT, 3, 300)
    gains = [[0.9, 0.9, 0.9], [0.9, 0.1, 0.0], [0.0, 0.0, 0.0]]
    choice = choose(gains, (0, 1, 2, 3), table)
    assert list(choice.counts) == [3, 1, 0]
    assert choice.least == 0.9


# ---------------------------------------------------------------------- trees


def serve_trees(
    costs: Costs, form: StepForm, chances: Callable[[int], float], steps: int, size: int = 2
) -> list[int]:
    """The size of the trees of each step. Each node is accepted with its probability, but at most
    four of a tree."""
    policy = AdaptivePolicy(limits(16, tree_depth=4), (0, 2, 4, 8, 16), costs, form)
    requests, noise, sizes = [request(f"{it}", 16) for it in range(size)], random.Random(8), []
    for _ in range(steps):
        drafted = [plan.num_tokens for plan in policy.plan(candidates(requests, 16))]
        assert len({*drafted} - {0}) < 2, "trees of one step have one shape"
        sizes.append(max(drafted))
        nodes = []
        for count in drafted:
            hit = [node for node in range(1, count + 1) if noise.random() < chances(node)]
            nodes.append(tuple(hit[:4]))
        results = [(count, len(hit)) for count, hit in zip(drafted, nodes, strict=True)]
        seconds, padded = seconds_of(drafted, costs, form, policy.widths), not form.ends_chains
        policy.observe(report(requests, results, seconds=seconds, padded=padded, nodes=nodes))
    return sizes


@pytest.mark.parametrize("form", ["exact", "trees"])
@pytest.mark.parametrize(
    ("row", "chances", "size"),
    [
        (0.0, lambda node: 0.8 / node, 16),  # rows are free
        (0.08, lambda node: 0.8 if node < 4 else 0.0, 4),  # later nodes are not worth theirs
        (0.5, lambda node: 0.1, 0),
    ],
)
def test_trees_have_the_size_that_their_rows_are_worth(
    form: str, row: float, chances: Callable[[int], float], size: int
) -> None:
    steps = CapturedForm(64, (0, 2, 4, 8, 16), packs=False) if form == "trees" else EXACT
    costs = Costs(fixed=1.0, row=row, draft_pass=0.001)
    sizes = serve_trees(costs, steps, chances, 400)[150:]
    assert sizes.count(size) > 0.85 * len(sizes), sizes


def test_small_trees_try_larger_ones() -> None:
    costs = Costs(fixed=1.0, row=0.2, draft_pass=0.001)
    sizes = serve_trees(costs, EXACT, lambda node: 0.9 if node < 3 else 0.02, 300)
    assert max(sizes[100:]) > 2, "larger trees are tried"
    assert sizes[100:].count(2) > 150


# ---------------------------------------------------------------------- bounds and state


def candidates(requests: Sequence[Request], most: int = K) -> list[Candidate]:
    return [Candidate(it, most) for it in requests]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [3, 30])
def test_bounds_are_honoured(form: str, size: int) -> None:
    policy = adaptive(Costs(), FORMS[form])
    bounds = [index % 4 for index in range(size)]
    requests = [request(f"request {index}", bound) for index, bound in enumerate(bounds)]
    noise = random.Random(1)
    for step in range(60):
        most = [noise.randrange(8) for _ in requests] if step % 2 else [K] * size
        asked = [Candidate(it, room) for it, room in zip(requests, most, strict=True)]
        drafted = [plan.num_tokens for plan in policy.plan(asked)]
        for count, bound, room in zip(drafted, bounds, most, strict=True):
            assert 0 <= count <= min(bound, room)
        policy.observe(report(requests, [(count, 0) for count in drafted]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3, 20])
def test_requests_that_end_soon_do_not_pay_for_the_drafts_prompt(form: str, size: int) -> None:
    costs = Costs(fixed=1.0, row=0.001, draft_pass=0.01, prompt_token=0.1)
    bounds = limits(K)
    policy = AdaptivePolicy(bounds, WIDTHS, costs, FORMS[form], late_tokens=50)  # 5 s of prompts
    requests = [request(f"{it}", K) for it in range(size)]
    for it in requests[::2]:
        it.max_tokens = 5
    for _ in range(60):
        plans = [plan.num_tokens for plan in policy.plan(candidates(requests))]
        policy.observe(report(requests, [(count, count) for count in plans]))
        assert not any(plans[::2])
        assert size == 1 or size > 8 or all(plans[1::2])
    late = request("late", K)
    late.max_tokens = 5
    assert policy.plan(candidates([late]))[0].num_tokens == 0
    if size == 3:  # one that has drafted goes on up to its end
        requests[1].max_tokens = 5
        assert policy.plan(candidates(requests[1:2]))[0].num_tokens > 0


def test_a_request_with_more_drafts_than_all_before_it_is_bounded() -> None:
    policy, requests = adaptive(Costs(), PADDED), [request(f"{it}", 3) for it in range(16)]
    for _ in range(30):
        plans = policy.plan(candidates(requests))
        policy.observe(report(requests, [(it.num_tokens, it.num_tokens) for it in plans]))
    policy.plan(candidates(requests[1:]))
    requests.append(request("later", K))
    assert policy.plan(candidates(requests[1:]))[-1].num_tokens == 4
    asked = candidates(requests[1:])
    asked[-1] = Candidate(requests[-1], 3)  # it comes near its end
    assert policy.plan(asked)[-1].num_tokens == 3


def test_what_is_known_of_requests_goes_with_them() -> None:
    policy = adaptive(MIDDLE, EXACT)
    for turn in range(50):
        requests = [request(f"turn {turn}, request {index}", K) for index in range(6)]
        for _ in range(3):
            drafted = [plan.num_tokens for plan in policy.plan(candidates(requests))]
            policy.observe(report(requests, [(count, 0) for count in drafted]))
        for it in requests:  # they were aborted: no step tells of it
            it.status = it.status.FINISHED
        assert len(policy.acceptance) <= 2 * len(requests) + 8 + len(requests)


def test_a_name_that_comes_again_is_another_request() -> None:
    acceptance = Acceptance(K)
    first, second = request("a", K), request("a", K)
    acceptance.of(first).chances[0] = 0.0
    assert acceptance.of(second).chances[0] > 0.5


def test_requests_that_come_and_go_are_planned_for() -> None:
    policy = adaptive(LARGE, EXACT)
    noise, running, names = random.Random(2), list[Request](), 0
    for _ in range(300):
        while len(running) < 24:
            running.append(request(f"request {names}", K))
            names += 1
            assert policy.plan(candidates(running[-1:]))[0].num_tokens <= K  # its prompt ends
        plans = policy.plan(candidates(running))
        assert len(plans) == len(running)
        policy.observe(report(running, [(it.num_tokens, it.num_tokens) for it in plans]))
        running = [it for it in running if noise.random() > 0.05]
    assert sum(it.num_tokens for it in plans) > 4 * len(plans)


# ---------------------------------------------------------------------- traffic

MIXED = [always(0.9), always(0.0)] * 8


@pytest.mark.parametrize("form", ["exact", "packed"])
def test_mixed_traffic_is_faster_than_with_any_fixed_number(form: str) -> None:
    costs, steps = Costs(fixed=1.0, row=0.05, draft_pass=0.05, draft_row=0.001), FORMS[form]
    chosen = serve(adaptive(costs, steps), costs, steps, MIXED, 400).speed
    for count in (0, 1, 2, 4, 7):
        assert chosen > 1.05 * serve(FixedPolicy(count), costs, steps, MIXED, 200).speed, count


def serve_short(policy: DraftPolicy, costs: Costs, chances: Sequence[float]) -> Server:
    """Serve requests of twelve steps one by one, with a drafter that reports its confidences."""
    server = Server(policy, costs, PACKED, K, tells=True)
    for turn in range(12):
        for place, chance in enumerate(chances):
            if turn % 4 == place % 4 or not turn:  # others stay
                if turn:
                    server.requests.pop(0)
                    server.chances.pop(0)
                server.add(always(chance))
        server.run(3)
    return server


def test_short_requests_are_told_apart_by_what_their_drafter_says() -> None:
    costs = Costs(fixed=1.0, row=0.01, draft_pass=0.03)
    mixed = [0.9, 0.02] * 16
    chosen = serve_short(adaptive(costs, PACKED), costs, mixed).speed
    for count in (0, 1, 2, 4, 7):
        assert chosen > 1.05 * serve_short(FixedPolicy(count), costs, mixed).speed, count


def test_trimmed_plans_draft_all_places_and_verify_what_was_chosen() -> None:
    costs = Costs(fixed=1.0, row=0.01, draft_pass=0.03)
    policy = adaptive(costs, PACKED)
    serve_short(policy, costs, [0.9, 0.02] * 16)
    requests = [request(f"another {index}", K) for index in range(32)]
    plans = policy.plan(candidates(requests))
    trims = [plan.trim for plan in plans]
    assert all(trims)
    width = policy._choice.width
    assert {plan.num_tokens for plan in plans} == {width}
    rows = sum(trim.num_rows for trim in trims if trim)
    assert rows == sum(policy._choice.counts)
    assert 0 < rows < 32 * width


def test_chains_that_are_drafted_at_once_do_not_end_by_confidence() -> None:
    for at_once in (False, True):
        bounds = replace(limits(K), drafts_at_once=at_once)
        policy = AdaptivePolicy(bounds, WIDTHS, MIDDLE, EXACT)
        assert policy.reads_confidences is not at_once
        server = Server(policy, MIDDLE, EXACT, K, tells=not at_once)
        server.add(always(0.6))
        server.run(200)
        (plan,) = policy.plan([Candidate(server.requests[0], K)])
        if at_once:
            assert plan.stops is None
            assert 0 < plan.num_tokens < K
        else:
            assert plan.stops is not None
            assert plan.num_tokens == K


def test_what_a_drafter_says_counts_for_a_request_alone() -> None:
    """A request whose tokens are refused comes after others whose tokens were accepted."""
    costs = Costs(fixed=1.0, row=0.004, draft_pass=0.05)
    server = Server(adaptive(costs, PACKED), costs, PACKED, K, tells=True)
    server.add(always(0.85))
    server.run(100)
    assert server.counts[-1] == [K]
    server.requests, server.chances = [request("new", K)], [always(0.05)]
    server.run(30)
    drafted = [counts[0] for counts in server.counts[104:]]
    assert sum(drafted) <= 1.5 * len(drafted), drafted


@pytest.mark.parametrize("form", ["exact", "padded"])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_steady_traffic_is_hardly_slower_than_with_the_best_number(
    chance: float, form: str
) -> None:
    steps = FORMS[form]
    for costs, size in ((LARGE, 1), (MIDDLE, 4), (STEEP, 8)):
        traffic = [always(chance)] * size
        chosen = serve(adaptive(costs, steps), costs, steps, traffic, 1600 // size).speed
        best = max(
            serve(FixedPolicy(count), costs, steps, traffic, 1600 // size).speed
            for count in (0, 1, 2, 4, 7)
        )
        assert chosen > 0.95 * best


def turning(step: int) -> float:
    """Acceptance that falls at step 200 and comes back at step 400."""
    return 0.1 if 200 <= step < 400 else 0.8


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 8, 32])
def test_a_change_of_acceptance_is_followed_within_30_steps(form: str, size: int) -> None:
    costs = Costs(fixed=1.0, row=0.004, draft_pass=0.15, draft_row=0.001)
    steps = FORMS[form]
    server = serve(adaptive(costs, steps), costs, steps, [turning] * size, 600)

    def spent(first: int, last: int, fixed: int) -> float:
        """Seconds of these steps for each token that is to be expected, by those with K fixed."""
        chance = turning(first)

        def cost(counts: Sequence[int]) -> float:
            tokens = sum((1 - chance ** (count + 1)) / (1 - chance) for count in counts)
            return seconds_of(counts, costs, steps, WIDTHS) / tokens

        taken = [cost(counts) for counts in server.counts[first:last]]
        return sum(taken) / len(taken) / cost([fixed] * size)

    assert spent(230, 400, fixed=0) < 1.04
    assert spent(430, 600, fixed=4) < 1.05
    assert spent(430, 440, fixed=4) < 1.15


def test_results_that_were_not_expected_are_learned_from_request_by_request() -> None:
    """In a large batch; otherwise its requests take turns, which saves time."""
    size, policy = 32, adaptive(LARGE, PADDED)
    server = serve(policy, LARGE, PADDED, [lambda step: 0.95 if step < 100 else 0.0] * size, 100)

    def numbers() -> list[int]:
        return [policy.acceptance.of(it).num_results for it in server.requests]

    usual, before = sum(numbers()) / 100, numbers()
    assert usual < size / 2
    server.run(5)
    assert min(now - then for now, then in zip(numbers(), before, strict=True)) >= 2


@pytest.mark.parametrize("form", ["exact", "padded"])
@pytest.mark.parametrize("size", [1, 8])
def test_probes_cost_little_and_go_on(form: str, size: int) -> None:
    steps = FORMS[form]
    server = serve(adaptive(MIDDLE, steps), MIDDLE, steps, [always(0.0)] * size, 1500)
    plain = seconds_of([0] * size, MIDDLE, steps, WIDTHS)
    counts = server.counts[100:]
    taken = sum(seconds_of(it, MIDDLE, steps, WIDTHS) - plain for it in counts)
    assert taken < 1.5 * PROBE_SHARE * plain * len(counts)
    for first in range(0, len(counts) - 400, 200):
        assert any(any(it) for it in counts[first : first + 400])


def test_probes_are_rarer_if_they_take_longer_than_estimated() -> None:
    def plans_until_due(taken: float) -> int:
        acceptance, table = Acceptance(K), CostTable(MIDDLE, EXACT, 2, 200)
        probes = Probes(acceptance, K, WIDTHS, True)
        choice = choose([[0.0]] * 2, (0, 1), table)
        probes.follow(choice, [DraftPlan(0)] * 2, [K] * 2, table)
        while not probes.is_due():
            probes.take_in([], choice.seconds)
        probes.take_in([0], taken * choice.seconds)
        return next(number for number in range(1000) if probes.is_due() or probes.take_in([], 1.0))

    usual, longer = plans_until_due(1.1), plans_until_due(1.5)
    assert longer > usual + 20


@pytest.mark.parametrize("chance", [0.6, 1.0])
def test_plain_steps_are_timed_at_little_cost(chance: float) -> None:
    server = serve(adaptive(MIDDLE, EXACT), MIDDLE, EXACT, [always(chance)] * 2, 1000)
    plain = [not any(counts) for counts in server.counts[100:]]
    runs = [len(list(run)) for is_plain, run in groupby(plain) if is_plain]
    assert len(runs) > 1
    assert runs[1:] == [3] * len(runs[1:]), "the first may have begun before"
    lost = seconds_of([0, 0], MIDDLE, EXACT, WIDTHS) - 2 * server.seconds / server.tokens
    assert sum(runs) * lost < 0.005 * server.seconds


def test_plain_steps_come_early_while_drafting_hardly_pays() -> None:
    """Their time was measured with artificial requests, and may be shorter than it seems."""

    def begun(draft_pass: float, chance: float) -> list[int]:
        costs = Costs(fixed=1.0, row=0.01, draft_pass=draft_pass, draft_row=0.0)
        server = serve(adaptive(costs, EXACT), costs, EXACT, [always(chance)] * 4, 300)
        pairs = pairwise(not any(counts) for counts in server.counts)
        return [at for at, (before, now) in enumerate(pairs) if now and not before]

    first, second, third = begun(0.2, 0.5)[:3]
    assert first < 40
    assert third - second > 1.7 * (second - first)
    assert not [at for at in begun(0.01, 0.9) if 40 < at < 250]


class Recovering(Costs):
    """The host's work seems to take very long until some steps have been learnt from."""

    num_steps = 0

    def host_seconds(self, requests: int) -> float:
        return 50.0 if self.num_steps < 12 else 0.1

    def observe(self, report: StepReport) -> None:
        object.__setattr__(self, "num_steps", self.num_steps + 1)


def test_a_cost_that_was_wrong_is_soon_forgotten() -> None:
    costs = Recovering(fixed=1.0, row=0.06, draft_pass=0.06, draft_row=0.01)
    server = serve(adaptive(costs, PADDED), costs, PADDED, [always(0.1)] * 32, 200)
    assert any(any(counts) for counts in server.counts[10:40]), "drafts seem to be free"
    assert sum(any(counts) for counts in server.counts[120:]) < 8


class Growing(Costs):
    """Target passes take five times as long once contexts are long."""

    contexts_are_long = False

    def target_seconds(self, requests: int, rows: int, context: int) -> float:
        seconds = super().target_seconds(requests, rows, context)
        return seconds + 4 * self.fixed if self.contexts_are_long else seconds


@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_costs_that_change_are_soon_chosen_by(form: str, size: int) -> None:
    costs = Growing(fixed=1.0, row=0.01, draft_pass=0.8, draft_row=0.0)
    policy = adaptive(costs, FORMS[form])
    server = serve(policy, costs, FORMS[form], [always(0.45)] * size, 100)
    assert sum(map(any, server.counts[60:])) < 20
    object.__setattr__(costs, "contexts_are_long", True)
    server.run(40)
    assert sum(map(any, server.counts[108:])) > 26


# Tables of costs are made again every 48 plans anyway; changes come at several points between.
BEGINNINGS = range(97, 145, 8)


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_costs_that_fall_are_soon_chosen_by(beginning: int) -> None:
    """No step takes longer than expected, but plain steps would be faster."""
    costs = Growing(fixed=1.0, row=0.01, draft_pass=0.8, draft_row=0.0)
    object.__setattr__(costs, "contexts_are_long", True)
    server = serve(adaptive(costs, PADDED), costs, PADDED, [always(0.45)] * 8, beginning)
    assert sum(map(any, server.counts[60:])) > 30
    object.__setattr__(costs, "contexts_are_long", False)
    server.run(60)
    assert sum(map(any, server.counts[beginning + 20 :])) < 6


class WideIsSlow(Costs):
    """Passes over more than two rows a request begin to take ten times as long."""

    has_begun = False

    def target_seconds(self, requests: int, rows: int, context: int) -> float:
        seconds = super().target_seconds(requests, rows, context)
        return 10 * seconds if self.has_begun and rows > 2 * requests else seconds


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_steps_that_take_longer_than_known_are_soon_given_up(beginning: int) -> None:
    """Though the costs of few rows stay as they were."""
    costs = WideIsSlow(fixed=1.0, row=0.001, draft_pass=0.05, draft_row=0.0)
    server = serve(adaptive(costs, PADDED), costs, PADDED, [always(0.9)] * 8, beginning)
    assert all(max(counts) > 1 for counts in server.counts[60:] if any(counts))
    object.__setattr__(costs, "has_begun", True)
    server.run(40)
    assert sum(max(counts) > 1 for counts in server.counts[beginning + 12 :]) < 6
