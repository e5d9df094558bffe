"""Advice from a sweep: which drafter and setting to serve."""

import pytest

from slipstream.bench.sweep import AUTO, PLAIN, CellResult, advise, paragraph

DRAFTERS = {"small": {"model": "a b"}, "ngram": {"method": "ngram"}}


def point(drafter: str, k: int | str, speed: float, batch: int = 1) -> CellResult:
    return CellResult(
        drafter,
        k,
        batch,
        acceptance_length=1.0,
        per_position=(),
        without_drafts=None,
        tokens_per_second=speed,
        iteration_ms=1.0,
        median_iteration_ms=1.0,
        tpot_ms=1.0,
        shares={},
    )


def test_the_best_is_told_with_its_command() -> None:
    points = [point(PLAIN, 0, 100), point("small", 4, 180), point("ngram", AUTO, 120)]
    (found,) = advise([*points, point(PLAIN, 0, 104)])
    text = paragraph(found, "my model", DRAFTERS)
    assert "small with K = 4 gives 1.76 times" in text
    assert "auto 1.18 (ngram)" in text
    config = """'{"model": "a b", "num_speculative_tokens": 4}'"""
    assert text.endswith(f"slipstream serve 'my model' --speculative-config {config}")


def test_auto_is_preferred_where_it_is_as_good() -> None:
    points = [point(PLAIN, 0, 100), point("small", 4, 180), point("small", AUTO, 178)]
    (found,) = advise(points)
    text = paragraph(found, "m", DRAFTERS)
    assert "small with K = auto gives 1.78 times" in text
    assert "(small with K = 4, 1.80)" in text
    assert '"num_speculative_tokens": "auto"' in text


@pytest.mark.parametrize("speed", [90, 103, 110])
def test_gains_within_the_drift_are_none(speed: float) -> None:
    points = [point(PLAIN, 0, 95), point("small", 4, speed), point(PLAIN, 0, 105)]
    (found,) = advise(points)
    text = paragraph(found, "m", DRAFTERS)
    assert "No drafter is faster by more than the machine drifts (10%)" in text


def test_auto_is_not_advised_where_it_gains_less_than_the_drift() -> None:
    points = [point(PLAIN, 0, 80), point("small", 4, 160), point("small", AUTO, 118)]
    (found,) = advise([*points, point(PLAIN, 0, 120)])
    assert found.choice.k == 4  # auto is within the drift of 40 percent of the best, and of plain


def test_a_large_drift_has_a_remedy() -> None:
    points = [point(PLAIN, 0, 80), point("small", 4, 100), point(PLAIN, 0, 120)]
    (found,) = advise(points)
    text = paragraph(found, "m", DRAFTERS)
    assert text.endswith("drifts (40%); measure more prompts, or on an idle machine.")


def test_each_batch_size_has_its_own_advice() -> None:
    points = [point(PLAIN, 0, 100), point("small", 4, 180), point("small", 4, 300, batch=8)]
    points += [point(PLAIN, 0, 400, batch=8)]
    first, second = advise(points)
    assert (first.best.drafter, second.best.drafter) == ("small", PLAIN)
