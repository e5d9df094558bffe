"""The cost model: recovers what it is shown, ignores outliers, follows drifts."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import pytest
import torch

from slipstream.core.batch import (
    Batch,
    ChainStops,
    Committed,
    ScheduledRequest,
    StepReport,
    StepTimes,
)
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step_form import CapturedForm
from slipstream.engine.drafting.choice import CostTable, choose
from slipstream.engine.drafting.costs import CostModel
from slipstream.engine.drafting.kept_costs import CostFile, KeptCosts
from slipstream.engine.drafting.pace import Pace
from slipstream.engine.drafting.step_costs import CostRow, MeasuredStep, plausible
from slipstream.engine.drafting.step_facts import drafting_counts
from slipstream.engine.metrics import StepEstimate
from slipstream.engine.step_results import Collected, Launched
from slipstream.kernels.devices import Download

PARAMS = SamplingParams(temperature=0)


def report(
    drafts: Sequence[int],
    times: StepTimes,
    length: int = 100,
    rows: int | None = None,
    padded: bool = False,
) -> StepReport:
    """The report of a step in which each request of `length` tokens drafted as in `drafts`."""
    items = []
    for index, count in enumerate(drafts):
        request = Request(str(index), [1] * 2, PARAMS, 0, frozenset(), 9, 9, index)
        items.append(ScheduledRequest(request, length - 1, 1, count, (), False, True))
    committed = [Committed((1,), count, 0, 0) for count in drafts]
    if rows is None:
        rows = len(drafts) + sum(drafts)
    live = [True] * len(drafts)
    return StepReport(Batch(tuple(items)), committed, live, times, padded, rows)


@dataclass
class Machine:
    """A machine whose steps take the times of its attributes, in milliseconds, with noise."""

    target: Callable[[int, int, int], float]  # requests, rows, context
    draft: Callable[[int, int, int], float]  # requests, width, context
    noise: float = 0.08
    slower: float = 1.0
    host: float = 0.1

    def __post_init__(self) -> None:
        self.random = random.Random(7)

    def _noisy(self, milliseconds: float) -> float:
        spread = self.random.gauss(0, self.noise)
        return self.slower * milliseconds * max(0.5, 1 + spread) / 1000

    def seconds(self, requests: int, width: int, rows: int, context: int) -> float:
        drafting = self.draft(requests, width, context) if width else 0.0
        return self.slower * (self.target(requests, rows, context) + self.host + drafting) / 1000

    def step(self, requests: int, width: int, length: int = 100) -> StepReport:
        context, rows = requests * length, requests * (width + 1)
        drafting = self.draft(requests, width, context) if width else 0.0
        times = StepTimes(
            draft=self._noisy(drafting),
            target=self._noisy(0.9 * self.target(requests, rows, context)),
            verify=self._noisy(0.1 * self.target(requests, rows, context)),
            rest=self._noisy(self.host),
        )
        return report([width] * requests, times, length)

    def error(self, model: CostModel, requests: int, width: int, length: int = 100) -> float:
        """The relative error of the model."""
        asked = requests, width, requests * (width + 1), requests * length
        return abs(model.seconds(*asked) / self.seconds(*asked) - 1)


def steep(requests: int, rows: int, context: int) -> float:
    """Blocks of four rows without a matrix unit: five rows cost nearly two passes."""
    return 2.0 * -(-rows // 4) + 0.05 * rows + 0.02 * requests


def mixture(requests: int, rows: int, context: int) -> float:
    """64 experts, 4 for each row; and large tiles that are cheaper from 32 rows on."""
    touched = 64 * (1 - (1 - 4 / 64) ** rows)
    return 1.0 + 0.1 * touched + 0.01 * rows - (0.5 if rows >= 32 else 0.0)


def attentive(requests: int, rows: int, context: int) -> float:
    return 3.0 + 0.02 * rows + context * (2e-4 + 1e-5 * rows / requests)


def chain(requests: int, width: int, context: int) -> float:
    return 0.3 + width * (0.4 + 0.02 * requests)


def parallel(requests: int, width: int, context: int) -> float:
    return 0.8 + 0.01 * requests


def windowless(requests: int, width: int, context: int) -> float:
    return 0.2 + width * (0.3 + 5e-5 * context)


SHAPES = [(count, width) for count in (1, 2, 4, 8, 16) for width in (0, 1, 2, 4, 7)]


@pytest.mark.parametrize(
    ("target", "draft"), [(steep, chain), (mixture, parallel), (steep, parallel), (mixture, chain)]
)
def test_recovers_costs_from_noisy_steps(
    target: Callable[[int, int, int], float], draft: Callable[[int, int, int], float]
) -> None:
    machine, model = Machine(target, draft), CostModel()
    order = SHAPES * 60
    machine.random.shuffle(order)
    for count, width in order:
        model.observe(machine.step(count, width))
    for count, width in SHAPES:
        assert machine.error(model, count, width) < 0.06, (count, width)
    for count, width in [(3, 1), (3, 0), (6, 2), (12, 4), (10, 1), (1, 3), (4, 5), (20, 4)]:
        assert machine.error(model, count, width) < 0.15, (count, width)


def calibrated(machine: Machine) -> CostModel:
    """A model that was shown some points of the machine, disturbed by its noise."""
    shapes = [(count, width, 64) for count in (1, 8, 16) for width in (0, 1, 7)]
    shapes += [(1, width, 4000) for width in (0, 7)]
    model = CostModel()
    model.calibrate([measured(machine, *shape) for shape in shapes])
    return model


def measured(machine: Machine, count: int, width: int, length: int = 64) -> MeasuredStep:
    times = machine.step(count, width, length).times
    rows, context = count * (width + 1), count * length
    return MeasuredStep(
        count, width, rows, context, times.draft, times.target + times.verify, times.rest
    )


def test_begins_with_what_was_measured_and_grows_with_context() -> None:
    machine = Machine(attentive, windowless, noise=0.002)
    model = calibrated(machine)
    for count, width, length in [(1, 0, 64), (1, 7, 64), (16, 7, 64), (1, 0, 4000), (1, 7, 4000)]:
        assert machine.error(model, count, width, length) < 0.05, (count, width, length)
    for count, width, length in [(4, 2, 64), (12, 7, 200), (2, 3, 2000), (8, 4, 4000), (1, 2, 900)]:
        assert machine.error(model, count, width, length) < 0.15, (count, width, length)


def test_recovers_what_context_costs_from_noisy_steps() -> None:
    machine = Machine(attentive, windowless, noise=0.02)
    model, lengths = calibrated(machine), (100, 500, 2000, 8000)
    order = [(count, width, length) for count, width in SHAPES for length in lengths] * 30
    machine.random.shuffle(order)
    for shape in order:
        model.observe(machine.step(*shape))
    for count, width in SHAPES:
        for length in lengths:
            assert machine.error(model, count, width, length) < 0.05, (count, width, length)
    for count, width, length in [(3, 0, 12000), (6, 2, 1000), (12, 7, 4000), (20, 4, 100)]:
        assert machine.error(model, count, width, length) < 0.15, (count, width, length)


@pytest.mark.parametrize("slower", [2.0, 1.3, 0.5])
def test_follows_a_drift_within_thirty_steps(slower: float) -> None:
    machine = Machine(steep, chain, noise=0.03)
    model = calibrated(machine)
    for _ in range(100):
        model.observe(machine.step(4, 4))
    machine.slower = slower
    assert machine.error(model, 4, 4) > 0.2
    for _ in range(30):
        model.observe(machine.step(4, 4))
    assert machine.error(model, 4, 4) < 0.05


@pytest.mark.parametrize("slower", [1.5, 0.65])
def test_what_is_not_run_follows_the_machine(slower: float) -> None:
    """Otherwise the estimate would be outdated, and its width chosen too often or never."""
    machine = Machine(steep, chain, noise=0.03)
    model = calibrated(machine)
    for index in range(200):
        model.observe(machine.step(4, 4 if index % 2 else 2))
    machine.slower = slower
    for index in range(60):
        model.observe(machine.step(4, 4 if index % 2 else 2))
    for shape in ((1, 0), (2, 0), (8, 0), (8, 7)):
        assert machine.error(model, *shape) < 0.15, shape


def test_restored_costs_are_those_of_a_machine_that_is_slower_today() -> None:
    machine, model = Machine(steep, chain, noise=0.0), CostModel()
    model.restore(calibrated(machine).state())
    machine.slower = 1.5
    model.calibrate([measured(machine, 1, 0), measured(machine, 1, 7)])
    for shape in ((1, 0), (8, 0), (8, 7), (16, 1)):
        assert machine.error(model, *shape) < 0.05, shape


def test_first_measurements_that_were_disturbed_do_not_decide_for_restored_costs() -> None:
    machine, model = Machine(steep, chain, noise=0.0), CostModel()
    model.restore(calibrated(machine).state())
    points: list[MeasuredStep] = []
    for index, requests in enumerate((1, 2, 3, 4, 5, 6, 7, 8, 9)):
        machine.slower = 2.0 if index > 1 else 6.0
        points.append(measured(machine, requests, 0))
        model.calibrate(plausible(points))
    machine.slower = 2.0
    for shape in ((16, 0), (16, 1), (8, 7)):
        assert machine.error(model, *shape) < 0.25, shape


def test_a_wrong_estimate_is_found_by_few_steps_behind_others() -> None:
    machine = Machine(steep, chain, noise=0.03)
    model = calibrated(machine)
    machine.target = lambda *step: steep(*step) + 3 * (step[1] == 8)
    for _ in range(200):
        model.observe(machine.step(8, 4))
    assert machine.error(model, 8, 0) > 0.3
    for _ in range(4):
        model.observe(machine.step(8, 0))
    assert machine.error(model, 8, 0) < 0.2
    assert machine.error(model, 8, 4) < 0.05


def test_steps_that_were_disturbed_change_nothing() -> None:
    machine = Machine(steep, chain, noise=0.03)
    model = calibrated(machine)
    for index in range(300):
        machine.slower = 8.0 if index % 7 == 3 else 1.0
        model.observe(machine.step(4, 4 if index % 2 else 0))
        machine.slower = 1.0
        if index > 30:
            assert machine.error(model, 4, 4) < 0.08, index
            assert machine.error(model, 4, 0) < 0.08, index


def test_the_hosts_share_counts_for_plain_steps_though_none_was_run() -> None:
    """Calibration has little work on the host; requests of users have more."""
    machine = Machine(attentive, chain, noise=0.03)
    model = calibrated(machine)
    drafting = model.draft_seconds(1, 4, 100)
    machine.host = 6.0
    for _ in range(40):
        model.observe(machine.step(1, 4))
    assert machine.error(model, 1, 4) < 0.05
    assert machine.error(model, 1, 0) < 0.05
    assert model.draft_seconds(1, 4, 100) == pytest.approx(drafting, rel=0.1)


@pytest.mark.parametrize("drafts", [[4], [4, 4], [3, 1, 0, 0], [0, 0, 0]])
def test_other_load_does_not_change_the_estimated_speed_up(drafts: list[int]) -> None:
    """Costs are usual times; most steps of a machine with other load take longer than those."""
    machine = Machine(attentive, chain, noise=0.0)
    model = calibrated(machine)
    size, passes = len(drafts), [sum(it > place for it in drafts) for place in range(max(drafts))]
    drafting = sum(0.4 + 0.02 * count for count in passes) + 0.3 * bool(passes)
    plain = machine.seconds(size, 0, size, 100 * size)
    for slower in (1.0, 3.0, 20.0):
        target = slower * attentive(size, size + sum(drafts), 100 * size) / 1000
        times = StepTimes(slower * drafting / 1000, target, 0.0, slower * machine.host / 1000)
        step = StepEstimate.of(report(drafts, times), model)
        assert step.seconds == pytest.approx(times.device + times.rest)
        assert step.plain == pytest.approx(slower * plain, rel=0.05)


def test_no_step_is_taken_to_be_shorter_than_a_plain_one() -> None:
    model = CostModel()
    model.observe(report([0], StepTimes(0.0, 4.0, 0.0, 0.0), rows=8))
    model.observe(report([0], StepTimes(0.0, 1.0, 0.0, 0.0), rows=16))
    step = StepEstimate.of(report([40], StepTimes(0.1, 4.0, 0.0, 0.1)), model)
    assert 0 < step.plain <= step.seconds


def test_a_chain_that_ended_before_its_first_token_is_no_plain_step() -> None:
    """A pass of the drafter was run all the same, which is none of the host's share."""
    machine = Machine(attentive, chain, noise=0.01)
    model = calibrated(machine)
    stopped = machine.step(1, 0)
    item = replace(
        stopped.batch.requests[0], num_draft_tokens=4, stops=ChainStops((1.0,), 0.5, 0.5)
    )
    times = replace(stopped.times, draft=2e-3)
    for _ in range(60):
        model.observe(replace(stopped, batch=Batch((item,)), times=times))
        model.observe(machine.step(1, 4))
    assert machine.error(model, 1, 0) < 0.05


def test_what_drafting_adds_to_the_hosts_share_is_told_by_plain_steps() -> None:
    machine = Machine(attentive, chain, noise=0.02)
    model = calibrated(machine)
    for _ in range(80):
        machine.host = 1.0
        model.observe(machine.step(2, 0))
        machine.host = 3.0
        model.observe(machine.step(2, 4))
    assert machine.error(model, 2, 4) < 0.05
    for _ in range(300):  # no plain ones for long: all that changes is the host's
        model.observe(machine.step(2, 4))
    machine.host = 4.0
    for _ in range(40):
        model.observe(machine.step(2, 4))
    assert machine.error(model, 2, 4) < 0.05
    machine.host = 2.0
    assert machine.error(model, 2, 0) < 0.1


def test_a_device_that_waits_for_the_host_drafts_for_nothing() -> None:
    def step(width: int) -> StepReport:
        draft, target = 0.4 * bool(width), 0.5 + 0.05 * width
        device = draft + target + 0.1
        times = StepTimes(draft, target, 0.1, rest=max(0.05, 2.0 - device), host=1.95)
        return report([width], times, rows=width + 1, padded=True)

    model = CostModel(lambda requests: requests)
    for _ in range(30):
        model.observe(step(4))
    assert model.seconds(1, 4, 5, 100) == pytest.approx(1.95, rel=0.03)
    assert model.seconds(1, 0, 1, 100) == pytest.approx(1.95, rel=0.03)
    assert StepEstimate.of(step(4), model).plain == pytest.approx(2.0, rel=0.05)
    table = CostTable(model, CapturedForm(1, (0, 4), packs=False), 1, 100)
    assert choose([[0.1] * 4], (0, 4), table).width == 4


def test_steps_in_which_few_requests_go_on_say_nothing_of_many() -> None:
    machine = Machine(attentive, chain, noise=0.0)
    model = calibrated(machine)
    many = model.draft_seconds(8, 7, 800)
    for index in range(400):  # passes for one request take half or twice as long as usual
        seconds = (0.3 + 0.56 + 6 * 0.42 * (2.0 if index % 50 < 40 else 0.5)) / 1000
        model.observe(report([7, *[1] * 7], StepTimes(seconds, 3e-3, 0.0, 1e-4)))
    assert model.draft_seconds(8, 7, 800) == pytest.approx(many, rel=0.02)


def test_drafting_more_is_never_expected_to_take_less() -> None:
    model = CostModel()
    for width, seconds in [(1, 0.2), (2, 2.0), (4, 0.8)] * 12:
        model.observe(report([width], StepTimes(seconds, 1.0, 0.0, 0.0)))
    drafting = [model.draft_seconds(1, width, 0) for width in (1, 2, 4)]
    assert drafting == pytest.approx([0.2, 0.8, 0.8], rel=0.05)


def test_the_time_between_steps_is_the_hosts_where_requests_go_on() -> None:
    def times(admitted: bool, began: float) -> StepTimes:
        plain = report([0], StepTimes(0.0, 0.0, 0.0, 0.0)).batch
        items = tuple(replace(item, admitted=admitted) for item in plain.requests)
        results = Collected(torch.zeros(1, 1), 1, 1)
        launched = Launched(Batch(items), results, Download(results.numbers), began, False)
        return launched.times([0.1, 0.2, 0.3], 0.25, before=10.0, ended=14.0)

    assert astuple(times(False, 13.0)) == pytest.approx((0.1, 0.2, 0.3, 3.4, 0.0))
    assert astuple(times(True, 13.0)) == pytest.approx((0.1, 0.2, 0.3, 0.4, 0.0))
    assert astuple(times(False, 9.0)) == pytest.approx((0.1, 0.2, 0.3, 3.4, 3.75))


def test_usual_steps_are_learnt_from_now_and_then_and_others_soon() -> None:
    def due(seconds: float, steps: int) -> list[bool]:
        times = StepTimes(0.0, seconds, 0.0, 0.0)
        return [pace.is_due(report([2, 2], times)) for _ in range(steps)]

    pace = Pace()
    due(1.0, 80)
    assert sum(due(1.02, 80)) == 10
    assert not any(due(8.0, 1) + due(1.0, 6)), "a single one is no change"
    due(1.0, 73)
    disturbed, later = due(8.0, 2), due(1.0, 6)
    assert not any(disturbed)
    assert all(later)
    due(1.0, 80)
    assert sum(due(1.3, 40)) > 10


def test_passes_that_draft_all_tokens_at_once_cost_what_was_planned() -> None:
    times = StepTimes(3.0, 5.0, 0.0, 0.0)
    step = report([4, 4], times)
    cut = [replace(gain, num_draft_tokens=1) for gain in step.committed]
    ended = replace(step, committed=cut, num_rows=4)
    assert drafting_counts(ended, None, False) == (2,)
    assert drafting_counts(ended, None, True) == (2, 2, 2, 2)
    model = CostModel(at_once=True)
    for _ in range(30):
        model.observe(ended)
    assert model.draft_seconds(2, 4, 200) == pytest.approx(3.0, rel=0.1)


def test_a_plain_step_right_after_drafts_is_not_learnt_from() -> None:
    times, pace = StepTimes(0.0, 1.0, 0.0, 0.0), Pace()
    for _ in range(4):
        assert pace.is_due(report([2, 2], times))
        assert [pace.is_due(report([0, 0], times)) for _ in range(3)] == [False, True, True]


def test_steps_with_prompts_and_of_another_kind_do_not_count() -> None:
    slow = StepTimes(9.0, 9.0, 9.0, 9.0)
    machine = Machine(steep, chain)
    model = calibrated(machine)
    before = model.state()
    plain = report([0, 0], slow)
    first, second = plain.batch.requests
    prompt = Batch((first, replace(second, num_new_tokens=7)))
    newcomer = Batch((first, replace(second, admitted=True)))
    for other in (
        report([2, 2], slow, padded=True),
        replace(plain, batch=prompt, num_rows=8),
        replace(plain, batch=newcomer),
    ):
        model.observe(other)
        assert model.state() == before
    model.observe(report([2, 2], slow))
    assert model.state() != before


def test_captured_steps_count_as_padded() -> None:
    def padded(requests: int) -> int:
        return -(-requests // 4) * 4

    model = CostModel(padded)
    for count, width, seconds in [(3, 0, 1.0), (6, 0, 1.5), (4, 3, 2.0), (7, 3, 4.0)] * 15:
        rows = padded(count) * (width + 1)
        times = StepTimes(width / 8, seconds, 0.0, 0.0)
        model.observe(report([width] * (count - 1) + [0], times, rows=rows, padded=True))
    assert model.seconds(2, 0, 2, 0) == pytest.approx(1.0, rel=0.02)
    assert model.seconds(7, 0, 7, 0) == pytest.approx(1.5, rel=0.02)
    assert model.seconds(1, 3, 16, 0) == pytest.approx(2.375, rel=0.02)
    assert model.target_seconds(8, 32, 0) == pytest.approx(4.0, rel=0.02)


def test_requests_that_stop_drafting_cost_less() -> None:
    """Drafting is learnt from steps in which chains have different lengths, too."""
    model = CostModel()
    for drafts in ([3, 3], [3, 0], [3, 1], [1, 1], [1, 0], [0, 0]) * 40:
        passes = [sum(count >= place for count in drafts) for place in (1, 2, 3)]
        drafting = sum((0.1 + 0.05 * count) for count in passes if count)
        model.observe(report(drafts, StepTimes(drafting, 1.0, 0.0, 0.0)))
    assert model.draft_seconds(1, 3, 0) == pytest.approx(0.45, rel=0.05)
    assert model.draft_seconds(2, 3, 0) == pytest.approx(0.60, rel=0.05)
    assert model.draft_seconds(2, 1, 0) == pytest.approx(0.20, rel=0.05)


def test_a_number_of_requests_that_is_new_is_known_at_once() -> None:
    machine = Machine(lambda requests, rows, context: 2.0 + 0.05 * rows, chain, noise=0.0)
    model = CostModel(None)
    model.calibrate([measured(machine, count, width) for count in (1, 8) for width in (0, 4)])
    assert model.draft_seconds(2, 4, 0) == pytest.approx(chain(2, 4, 0) / 1000, rel=0.01)
    model.observe(machine.step(4, 4))  # as expected, so predictions are not computed again
    for count in (3, 4, 7, 8):
        assert model.draft_seconds(count, 4, 0) == pytest.approx(
            chain(count, 4, 0) / 1000, rel=0.01
        )


def test_the_state_survives_json() -> None:
    machine = Machine(attentive, windowless)
    model = calibrated(machine)
    for count, width in SHAPES:
        model.observe(machine.step(count, width))
    restored = CostModel()
    restored.restore(json.loads(json.dumps(model.state())))
    model.observe(machine.step(1, 0))  # predictions are computed again
    for count, width in [*SHAPES, (3, 2), (40, 5)]:
        asked = count, width, count * (width + 1), count * 700
        assert restored.seconds(*asked) == pytest.approx(model.seconds(*asked), rel=0.02)
    for broken in ({}, {"rows": 3}, {**model.state(), "slopes": {}}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            CostModel().restore(broken)


def test_knows_from_which_acceptance_on_a_draft_pays() -> None:
    assert CostRow(1, 1, 1.5).least_acceptance(1.0) == pytest.approx(0.5)
    assert CostRow(1, 2, 1.75).least_acceptance(1.0) == pytest.approx(0.5)
    assert CostRow(1, 3, 0.9).least_acceptance(1.0) == pytest.approx(0, abs=1e-6)
    assert CostRow(1, 3, 4.1).least_acceptance(1.0) is None


def test_a_table_tells_the_same_as_predictions() -> None:
    model = calibrated(Machine(steep, chain))
    for row in model.table((1, 5), (0, 3), 100):
        expected = model.seconds(row.requests, row.drafts, row.requests * (row.drafts + 1), 500)
        if row.requests == 5:
            assert row.seconds == expected
        assert row.seconds > 0


class Clock:
    """Says what time it is set to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def kept(file: CostFile, now: Clock | None = None) -> KeptCosts:
    return KeptCosts(None, file, (1, 4), (0, 1, 4), now or Clock())


def points(slower: float = 1.0) -> list[MeasuredStep]:
    shapes = [(1, 0), (1, 4), (4, 0), (4, 4)]
    return [
        MeasuredStep(
            count, width, count * (width + 1), 64 * count, 0.1 * slower, slower * (1 + width)
        )
        for count, width in shapes
    ]


def test_a_point_that_was_disturbed_is_not_believed() -> None:
    sound = [
        MeasuredStep(
            *(count, width, count * (width + 1), 64 * count),
            *(0.1 * (width + 1), 1.0 + 0.1 * count, 0.2),
        )
        for count in (1, 4, 8)
        for width in (0, 1, 4)
    ]
    assert plausible(sound) == sound
    for index, point in enumerate(sound[:-1]):
        disturbed = [*sound]
        disturbed[index] = replace(point, target=9.0, draft=9.0, rest=9.0)
        found = plausible(disturbed)[index]
        assert found.target <= 1.25 * 1.8
        assert found.draft <= 1.25 * 0.5
        assert found.rest <= 1.25 * 0.2
        disturbed[index] = replace(point, rest=9.0, host=9.0)
        assert plausible(disturbed)[index].rest == 9.0, "the device waited for the host"
    assert plausible([*sound, replace(sound[-1], rows=99, target=9.0)])[-1].target == 9.0


def test_costs_are_kept_for_another_start(tmp_path: Path) -> None:
    file = CostFile({"model": "a", "threads": 2}, tmp_path / "not" / "there")
    budgets: list[float] = []
    first = kept(file)

    def measure(seconds: float) -> None:
        budgets.append(seconds)
        first.calibrate(points())

    first.begin(measure)
    again = kept(CostFile({"threads": 2, "model": "a"}, tmp_path / "not" / "there"))
    again.begin(budgets.append)
    assert again.rows == first.rows
    assert budgets[0] == 2.0
    assert budgets[1] < 0.5
    other = kept(CostFile({"model": "b", "threads": 2}, tmp_path / "not" / "there"))
    other.begin(budgets.append)
    assert budgets[2] == 2.0
    assert {it.suffix for it in file.path.parent.iterdir()} == {".json"}


def test_costs_of_contexts_count_as_known_only_if_they_were_measured(tmp_path: Path) -> None:
    def started(measured: Sequence[MeasuredStep]) -> KeptCosts:
        costs = kept(CostFile({"model": "a"}, tmp_path))
        costs.begin(lambda _: costs.calibrate(measured) if measured else None)
        return costs

    short = started(points())
    for length in (64, 100_000):  # steps tell something, but tables take in what it is
        for _ in range(40):
            short.observe(report([0], StepTimes(0.0, 1.0 + length / 1e5, 0.0, 0.1), length))
    assert not short.knows_contexts
    short._keep()
    again = started(())
    assert again.target_seconds(1, 1, 0) == pytest.approx(short.target_seconds(1, 1, 0), rel=0.2)
    assert not again.knows_contexts
    assert started([*points(), replace(points()[0], context=4096, target=3.0)]).knows_contexts
    assert started(()).knows_contexts


def test_what_moved_is_kept_every_few_minutes(tmp_path: Path) -> None:
    file, now = CostFile({}, tmp_path), Clock()
    costs = kept(file, now)
    costs.begin(lambda _: costs.calibrate(points()))
    before = file.path.read_text()

    def steps(seconds: float) -> None:
        for _ in range(2048):
            costs.observe(report([0], StepTimes(0.0, seconds, 0.0, 0.1), 64))

    steps(1.0)
    now.seconds = 1000.0
    steps(1.02)
    assert file.path.read_text() == before, "it has hardly moved"
    steps(2.0)
    assert file.path.read_text() == before, "that was asked just now"
    now.seconds = 2000.0
    steps(2.0)
    assert file.path.read_text() != before
    loaded = CostModel()
    assert file.load(loaded)
    assert loaded.seconds(1, 0, 1, 64) == pytest.approx(2.1, rel=0.02)


def written(rows: str = "[[1, 1.0]]", slope: str = "0.0", slowness: str = "1") -> str:
    names = ("requests", "context", "attention", "draft_context", "draft_prompt")
    slopes = ", ".join(f'"{name}": {slope}' for name in names)
    tables = '"rest": [], "added_rest": [], "host": [], "drafting": []'
    costs = f'{{"rows": {rows}, {tables}, "slopes": {{{slopes}}}, "slowness": {slowness}}}'
    return f'{{"key": {{}}, "costs": {costs}}}'


def test_what_is_written_by_hand_is_read(tmp_path: Path) -> None:
    file = CostFile({}, tmp_path)
    file.path.write_text(written())
    assert file.load(CostModel())


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"key": {}, "costs": {}}', '{"key": {}, "costs": 3}', "\0"),
        *(written(slope="NaN"), written("[[1, Infinity]]"), written("[[1e999, 1.0]]")),
        *(written(slope="-1"), written("[[-1, 1.0]]"), written('[[1, "nan"]]')),
        *(written(slowness=it) for it in ("0", "-1", "1e300", "1e999")),
        "[" * 100_000,
    ],
)
def test_a_broken_file_is_measured_over(content: str, tmp_path: Path) -> None:
    file, budgets = CostFile({}, tmp_path), list[float]()
    file.path.write_text(content)
    kept(file).begin(budgets.append)
    assert budgets == [2.0]
    assert file.load(CostModel())


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "slipstream")
    taken = tmp_path / "taken"
    taken.write_text("not a folder")
    costs = kept(CostFile({}, taken))
    costs.begin(lambda _: costs.calibrate(points()))
    assert costs.seconds(1, 0, 1, 64) == pytest.approx(1.1)
    assert "cannot be written" in caplog.text


def test_the_environment_says_where_costs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert CostFile({}).path.parent == tmp_path / "costs"
    monkeypatch.setenv("SLIPSTREAM_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert CostFile({}).path.parent == tmp_path / "home" / ".cache" / "slipstream" / "costs"
    monkeypatch.setenv("SLIPSTREAM_CACHE", "~/kept")
    assert CostFile({}).path.parent == tmp_path / "home" / "kept" / "costs"


def test_a_user_without_a_home_keeps_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_CACHE", raising=False)
    monkeypatch.delenv("HOME")

    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    costs = kept(CostFile({}))
    costs.begin(lambda _: costs.calibrate(points()))
    assert costs.seconds(1, 0, 1, 64) == pytest.approx(1.1)
    assert not CostFile({}).load(CostModel())
