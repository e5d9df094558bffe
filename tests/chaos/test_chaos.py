"""A short chaos of the engine, with fixed seeds, and a fault that it finds. `benchmarks/chaos.py`
runs it for long (docs/reliability.md)."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.chaos.case import Case, Operation, Settings, random_case, random_operations
from tests.chaos.faults import FAULTS
from tests.chaos.models import Answers, Models
from tests.chaos.shrink import shrink, write_test
from tests.chaos.world import BrokenError, run
from tests.tiny_models import TinyModels

pytestmark = pytest.mark.breaks_steps


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_models: TinyModels) -> Models:
    return Models(tmp_path_factory.mktemp("chaos"), tiny_models)


@pytest.fixture(scope="module")
def answers(models: Models) -> Answers:
    return Answers(models)


def case_of(seed: int, drafter: str, steps: str) -> Case:
    """Drafters without heads, which take long to write."""
    case = random_case(seed, 120, ["dense"])
    changes = replace(case.settings, drafter=drafter, steps=steps, caching=True)
    return replace(case, settings=changes)


def random_settings_with(seed: int, drafter: str, **changes: Any) -> Case:
    """Settings of a case, so changed, and operations that are made for them."""
    first = case_of(seed, drafter, "exact")
    settings = replace(first.settings, **changes)
    return Case(settings, random_operations(Random(seed), settings, 120))


@pytest.mark.parametrize(
    ("seed", "drafter", "steps"),
    [(2, "self", "packed"), (4, "draft_model", "padded"), (8, "in turn", "exact")],
)
def test_nothing_breaks(
    seed: int, drafter: str, steps: str, models: Models, answers: Answers
) -> None:
    seen = run(case_of(seed, drafter, steps), models, answers)
    assert seen["finished"] > 5
    assert seen["accepted"] > 10
    assert seen["prefix hits"] > 0
    assert seen["preempted"] > 0
    assert seen["error sprung"] + seen["interrupt sprung"] > 0
    assert seen["packed"] > 0 or steps != "packed"


@pytest.mark.parametrize(("seed", "drafter", "slots"), [(12, "self", 1), (15, "draft_model", 2)])
def test_adapters_come_and_go(
    seed: int, drafter: str, slots: int, models: Models, answers: Answers
) -> None:
    """More of them than slots; with the target as its own drafter all that they draft is right."""
    found = random_settings_with(seed, drafter, adapters=3, adapter_slots=slots)
    seen = run(found, models, answers)
    assert seen["adapted"] > 5
    assert seen["load"] + seen["unload"] > 2
    assert seen["finished"] > 5
    assert seen["preempted"] > 0


def test_a_fault_is_found_and_made_short(
    models: Models,
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    case = case_of(8, "in turn", "exact")
    run(case, models, answers)  # so that what plain decoding says is known
    FAULTS["leaked-block"](monkeypatch)

    def fails(candidate: Case) -> bool:
        try:
            run(candidate, models, answers)
        except BrokenError:
            return True
        return False

    short = shrink(case, fails, most_runs=60)
    assert fails(short)
    assert len(short.operations) <= 8
    path = write_test(short, "leaked", "leaked", tmp_path_factory.mktemp("found"))
    compile(path.read_text(), path, "exec")
    assert Case.from_json(short.to_json()) == short


def test_a_step_that_fails_unasked_is_found(
    models: Models, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS["failed-step"](monkeypatch)
    with pytest.raises(BrokenError, match="nobody broke this step off: RuntimeError"):
        run(case_of(8, "in turn", "exact"), models, answers)


def test_cases_are_plain_data() -> None:
    case = random_case(3, 50)
    assert Case.from_json(case.to_json()) == case
    assert random_case(3, 50) == case != random_case(4, 50)
    assert Case(Settings(), (Operation("step"),)).to_json().count("step") == 0
