"""The report of an example, a profile's arithmetic, and what pages show."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.bench.datasets import BenchPrompt
from slipstream.bench.offline import joined
from slipstream.bench.pictures import sweep_figure
from slipstream.bench.profile import GROUPS, group_of, read_trace
from slipstream.bench.report import PageChart, write_page
from slipstream.bench.sweep import PLAIN, CellResult, best
from slipstream.bench.tables import ReportTable, by_position, drafting_tables, sweep_table
from slipstream.bench.workload import Workload, output_lengths, run_offline
from slipstream.core.errors import GenerationError
from slipstream.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.metrics import EngineMetrics

ROOT = Path(__file__).parents[2]


def event(name: str, begin: float, length: float, kind: str = "cpu_op", **more: Any) -> Any:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length, "tid": 1, **more}


def test_an_output_that_ended_with_an_error_ends_the_run() -> None:
    def stream(*_: Any) -> Iterator[RequestOutput]:
        sample = CompletionOutput(0, "", [], None, None, [], "error", "not finite")
        yield RequestOutput("0", "x", [1], None, [sample], True, RequestMetrics())

    engine = SimpleNamespace(resolved=SimpleNamespace(adaptive=False))
    llm: Any = SimpleNamespace(metrics=EngineMetrics(), stream=stream, engine=engine)
    with pytest.raises(GenerationError, match="not finite"):
        run_offline(llm, Workload([BenchPrompt(id="a", text="x")], SamplingParams()))


@pytest.mark.parametrize(("adaptive", "length"), [(False, 3), (True, 3), (True, 2)])
def test_a_run_knows_whether_drafts_were_chosen_step_by_step(adaptive: bool, length: int) -> None:
    """Neither of two tokens can be drafted: that `auto` drafted nothing tells nothing."""

    def stream(*_: Any) -> Iterator[RequestOutput]:
        sample = CompletionOutput(0, "x", [5] * length, None, None, [], "length", None)
        yield RequestOutput("0", "x", [1], None, [sample], True, RequestMetrics())

    engine = SimpleNamespace(resolved=SimpleNamespace(adaptive=adaptive))
    llm: Any = SimpleNamespace(metrics=EngineMetrics(), stream=stream, engine=engine)
    run = run_offline(llm, Workload([BenchPrompt(id="a", text="x")], SamplingParams()))
    told = joined([run, run]).speculation.note is not None
    assert told == (adaptive and length == 3)


def test_ops_count_their_own_time_in_the_range_that_they_lie_in() -> None:
    events = [
        event("slipstream: draft", 0, 1000, "user_annotation"),
        event("aten::linear", 100, 500),
        event("aten::mm", 200, 300),
        event("slipstream: target", 1000, 2000, "user_annotation"),
        event("aten::scaled_dot_product_attention", 1000, 900),
        event("slipstream: verify", 2000, 900, "user_annotation"),
        event("aten::argmax", 2000, 100),
        event("aten::copy_", 3000, 50),
        event("aten::mm", 500, 100, tid=2),  # of another thread
        {"ph": "M", "name": "process_name"},
    ]
    on_device, times = read_trace(events)
    assert not on_device
    assert times["draft"]["matmul"] == pytest.approx(0.5)
    assert times["target"]["attention"] == pytest.approx(0.9)
    assert times["verify"]["sampling, verification"] == pytest.approx(0.1)
    assert times["rest"]["copies, indexing"] == pytest.approx(0.05)
    assert times["rest"]["matmul"] == pytest.approx(0.1)
    whole = sum(value for part in times.values() for value in part.values())
    assert whole == pytest.approx(1.65)


def test_kernels_belong_to_the_part_whose_stamps_they_lie_between() -> None:
    kernels = []
    for step in range(2):
        at = step * 1000.0
        kernels += [
            event("_timestamp_kernel", at, 1, "kernel"),
            event("matmul_kernel", at + 1, 100, "kernel"),
            event("_timestamp_kernel", at + 200, 1, "kernel"),
            event("short_kernel", at + 201, 30, "kernel"),
            event("Memcpy DtoD", at + 300, 5, "gpu_memcpy"),
            event("_timestamp_kernel", at + 310, 1, "kernel"),
            event("argmax_kernel", at + 320, 7, "kernel"),
            event("_timestamp_kernel", at + 400, 1, "kernel"),
            event("Memcpy DtoH", at + 401, 2, "gpu_memcpy"),
        ]
    on_device, times = read_trace([*reversed(kernels), event("aten::mm", 0, 9)])
    assert on_device
    assert times["draft"]["matmul"] == pytest.approx(0.2)
    assert times["target"]["attention"] == pytest.approx(0.06)
    assert times["target"]["copies, indexing"] == pytest.approx(0.01)
    assert times["verify"]["sampling, verification"] == pytest.approx(0.014)
    assert times["rest"]["copies, indexing"] == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::addmm", "matmul"),
        ("nvjet_tst_64x8", "matmul"),
        ("stream_kernel", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("chunk_kernel", "attention"),
        ("_norm_kernel", "norm, rotation, activation"),
        ("_rotate_and_store_kernel", "norm, rotation, activation"),
        ("aten::silu", "norm, rotation, activation"),
        ("draft_race_kernel", "sampling, verification"),
        ("accept_kernel", "sampling, verification"),
        ("thresholds_kernel", "sampling, verification"),
        ("_advance_kernel", "preparation"),
        ("aten::index_select", "copies, indexing"),
        ("Memcpy DtoD (Device -> Device)", "copies, indexing"),
        ("aten::add", "other"),
    ],
)
def test_ops_and_kernels_are_grouped(name: str, group: str) -> None:
    assert group_of(name) == group
    assert group in GROUPS


def point(drafter: str, k: int, batch: int, rate: float) -> CellResult:
    return CellResult(
        drafter,
        k,
        batch,
        acceptance_length=2.0,
        per_position=(1.0,),
        without_drafts=0.1,
        tokens_per_second=rate,
        iteration_ms=2.0,
        median_iteration_ms=1.5,
        tpot_ms=None,
        shares={"draft": 0.25, "target": 0.25, "verify": 0.25, "rest": 0.25},
    )


def test_the_best_of_each_batch_size_stands_out() -> None:
    points = [point(PLAIN, 0, 1, 10), point("a", 1, 1, 30), point("a", 2, 1, 20)]
    points += [point(PLAIN, 0, 8, 90), point("a", 1, 8, 50), point(PLAIN, 0, 8, 88)]
    assert best(points) == {1, 3}
    assert best([points[0], replace(points[1], partial=True)]) == {0}
    table = sweep_table(points)
    assert table.best == {1, 3}
    assert [row[6] for row in table.rows] == ["10.0 ", "30.0*", "20.0 ", "90.0*", "50.0 ", "88.0 "]
    assert table.rows[1][:6] == ["a", "1", "1", "2.00", "1.50", "-"]


def test_a_sweep_tells_how_much_was_drafted() -> None:
    drafted = replace(
        point("a", 2, 1, 30),
        steps_by_draft_tokens=(1, 0, 3),
        estimated_speedup=1.5,
        refused_drafting_seconds=0.25,
    )
    assert drafting_tables([point(PLAIN, 0, 1, 10)]) == []
    (table,) = drafting_tables([point(PLAIN, 0, 1, 10), drafted])
    assert table.rows == [("a", "2", "1", "1.50", "0.25", "mean 1.5 (0: 25%, 2: 75%)")]


def test_plain_decoding_is_drawn_once() -> None:
    pytest.importorskip("matplotlib")
    points = [replace(point(PLAIN, 0, 1, 10), median_iteration_ms=2.0), point("a", 1, 1, 30)]
    points.append(replace(points[0], median_iteration_ms=3.0))
    panels = sweep_figure(points, None).axes
    plain = [[line for line in it.get_lines() if line.get_label() == PLAIN] for it in panels]
    assert [len(lines) for lines in plain] == [1, 0, 1, 1]  # no TPOT was measured
    assert list(plain[3][0].get_ydata()) == [2.0, 2.0]
    assert all(len(it.get_lines()) <= 2 for it in panels)


def test_of_long_drafts_the_end_that_was_never_accepted_is_left_out() -> None:
    assert by_position([0.5, 0.25, 0.0]) == "0.50 0.25 0.00"
    assert by_position([0.5, 0.0, 0.25, *[0.0] * 30]).count(" ") == 15


def test_a_page_shows_texts_as_texts(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    table = ReportTable("<b>", ("a & b",), [("<script>",)], frozenset({0}), note="1 < 2")
    chart = PageChart("chart", "<svg></svg>", 'what "it" shows')
    write_page(file, "a<b", {"load": "x>y"}, [table, chart])
    text = file.read_text()
    assert "<script>" not in text
    for shown in (
        "a&lt;b",
        "load: x&gt;y",
        "&lt;script&gt;",
        "a &amp; b",
        "1 &lt; 2",
        "<svg></svg>",
    ):
        assert shown in text
    assert 'aria-label="what &#34;it&#34; shows"' in text
    assert "color-scheme: light dark" in text


def test_the_report_of_the_example() -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [
            *(sys.executable, str(ROOT / "examples" / "acceptance_report.py")),
            *("--drafter", "ngram", "-k", "3", "--num-prompts", "2", "--max-tokens", "32"),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    told = dict(line.split(": ") for line in ran.stdout.splitlines() if ": " in line)
    drafts, accepted = int(told["num_drafts"]), int(told["num_accepted_tokens"])
    assert drafts > 0
    assert float(told["mean acceptance length"]) == pytest.approx(1 + accepted / drafts, abs=0.01)
    shares = [float(told[f"acceptance at token {position}"]) for position in range(3)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(accepted / drafts, abs=0.02)


@pytest.mark.parametrize(
    ("own", "exact", "said"),
    [
        ((None, None), False, "up to 32 tokens each"),
        ((None, None), True, "32 tokens each"),
        ((8, 8), True, "8 tokens each"),
        ((1, None), False, "limits of 1 to 32 tokens"),
        ((40, 5), True, "5 to 40 tokens each"),
    ],
)
def test_output_lengths_are_told_in_words(
    own: tuple[int | None, ...], exact: bool, said: str
) -> None:
    prompts = [BenchPrompt(id=str(at), text="x", max_tokens=most) for at, most in enumerate(own)]
    assert output_lengths(prompts, 32, exact) == said
