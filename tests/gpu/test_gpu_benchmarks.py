"""The GPU benchmarks run at tiny sizes without a GPU, and call a difference what it is."""

from typing import Any

import pytest

from benchmarks import gpu_lossless, gpu_prefill, gpu_ranks
from benchmarks.gpu_lossless import Difference, Expected, Row, differences
from slipstream import RequestOutput
from slipstream.core.outputs import CompletionOutput, RequestMetrics


def output(*token_ids: int) -> RequestOutput:
    sample = CompletionOutput(0, "", token_ids, None, None, (), "length", None)
    return RequestOutput("0", None, (1,), None, [sample], True, RequestMetrics())


def test_the_first_difference_of_each_output_counts() -> None:
    plain = [
        Expected([5, 6, 7], [{5: -0.1, 9: -2.0}, {6: -0.7, 8: -0.75}, {7: -0.1, 1: -3.0}]),
        Expected([5, 6], [{5: -0.1, 9: -2.0}, {6: -0.1, 8: -2.5}]),
        Expected([5, 6], [{5: -0.1, 9: -2.0}, {6: -0.1, 8: -2.5}]),
        Expected([5], [{5: -0.1, 9: -2.0}]),
    ]
    found = list(differences(plain, [output(5, 8, 3), output(5, 8), output(4, 6), output(5)]))
    assert [(it.request, it.place, it.plain, it.other) for it in found] == [
        (0, 1, 6, 8), (1, 1, 6, 8), (2, 0, 5, 4),
    ]  # fmt: skip
    assert [it.gap for it in found] == [pytest.approx(0.05), pytest.approx(2.4), None]
    assert [it.is_near_tie for it in found] == [True, False, False]


@pytest.mark.parametrize(
    ("gap", "must_be_same", "failed"),
    [(0.1, False, False), (0.1, True, True), (0.3, False, True), (None, False, True)],
)
def test_only_near_ties_may_differ_and_only_where_that_is_allowed(
    gap: float | None, must_be_same: bool, failed: bool
) -> None:
    row = Row(
        pair="twin",
        invariant=False,
        k=3,
        batch=32,
        staggered=False,
        num_requests=32,
        al=2.0,
        must_be_same=must_be_same,
        differences=(Difference(0, 3, 1, 2, gap),),
    )
    assert row.failed is failed


@pytest.mark.parametrize(
    ("pairs", "mode"),
    [
        ("demo", "greedy"),
        pytest.param("demo,twin,moe", "greedy", marks=pytest.mark.full),
        pytest.param("demo,twin,moe", "coupled", marks=pytest.mark.full),
    ],
)
def test_all_pairs_are_compared(pairs: str, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--device cpu --tiny --depths 3 --length 8 --cpu --pairs {pairs} --mode {mode}"
    assert gpu_lossless.main(line.split()) == 0
    out, count = capsys.readouterr().out, len(pairs.split(","))
    assert f"{10 * count} runs, 0 failed; differences: 0 near ties, 0 others" in out
    assert "+0.00% apart" in out
    strict = [row for row in out.splitlines() if row.endswith("ok, same")]
    assert len(strict) == count * (5 + 2)  # with batch_invariant all, else drafts in equal batches


def test_a_prompt_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--device cpu --target tiny --prompt 200 --repeat 2 --dtype float32"
    assert gpu_prefill.main(line.split()) == 0
    assert "tiny, prompt of 200 tokens, float32: first token after" in capsys.readouterr().out
    assert gpu_prefill.main([*line.split(), "--least-share", "1000"]) == 1


def test_the_operations_of_a_prompt_are_counted() -> None:
    """Counted by hand for 36 layers of width 4,096 with 32 query heads of 128."""
    layer = 4096 * (2 * (32 + 8) * 128 + 3 * 12288)
    seen = sum(range(1, 101))
    expected = 36 * (2 * layer * 100 + 4 * 32 * 128 * seen) + 2 * 151936 * 4096
    assert gpu_prefill.prefill_flops("qwen3-8b", 100) == expected


@pytest.mark.full  # three processes
def test_three_starts_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--device cpu --target tiny --draft tiny:1 --startup --dtype float32"
    assert gpu_prefill.main(line.split()) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["cold", "second", "warm"]
    values: list[Any] = [row.split()[1:] for row in rows]
    assert all(float(number) >= 0 for row in values for number in row)


@pytest.mark.full
def test_ranks_exchange_and_step(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_ranks.main("--device cpu --tiny --only exchanges experts steps".split()) == 0
    out = capfd.readouterr().out
    assert "ordered" in out
    assert out.count("of 8 texts part") == 6
    assert out.count("9 sums of at most 8 rows") == 2
