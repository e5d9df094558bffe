"""`slipstream bench` offline: everything is measured, reported and drawn, or refused first."""

import gzip
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import bench_sweep
from slipstream.cli.bench_sweep import duration
from slipstream.cli.open_llm import open_llm
from tests.cli.conftest import CommandLine

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two texts and a chat."""
    file = tmp_path / "prompts.jsonl"
    entries = [
        {"prompt": "def area(width, height):\n"},
        {"id": "a", "prompt": "import os\n"},
        {"messages": [{"role": "user", "content": "Write a loop."}]},
    ]
    file.write_text("\n".join(map(json.dumps, entries)) + "\n")
    return file


def test_all_drafters_are_measured_at_every_k(
    slipstream: CommandLine, prompts: Path, tmp_path: Path
) -> None:
    figures, picture = tmp_path / "sweep.json", tmp_path / "sweep.png"
    own = '{"method": "ngram", "prompt_lookup_min": 2}'
    ran = slipstream(
        *("bench", "sweep", "--prompts", str(prompts), "--max-tokens", "12", "-k", "1,3"),
        *("--drafter", "demo/draft", "--drafter", f"own={own}", "--batch-sizes", "2"),
        *("--output", str(figures), "--plot", str(picture.with_suffix(""))),
    )
    assert ran.code == 0, ran.err
    document = json.loads(figures.read_text())
    assert document["title"] == "demo, 3 prompts, up to 12 tokens each, temperature 0"
    points = document["points"]
    assert [(point["drafter"], point["k"]) for point in points] == [
        *(("plain", 0), ("demo/draft", 1), ("demo/draft", 3), ("own", 1), ("own", 3)),
        ("plain", 0),
    ]
    for point in points:
        assert point["batch"] == 2
        assert len(point["per_position"]) <= point["k"]
        assert 1 <= point["acceptance_length"] <= 1 + point["k"]
        assert point["acceptance_length"] == pytest.approx(1 + sum(point["per_position"]))
        assert point["tokens_per_second"] > 0
        assert point["iteration_ms"] > 0
        assert point["median_iteration_ms"] > 0
        assert point["tpot_ms"] > 0
        assert 0 < point["without_drafts"] <= 1
        assert not point["partial"]
        assert sum(point["shares"].values()) == pytest.approx(1.0)
        ratio = point["tokens_per_second"] / points[0]["tokens_per_second"]
        assert point["times_plain"] == pytest.approx(ratio)
    drafted = points[2]
    assert drafted["acceptance_length"] > 1.2
    assert f"{drafted['acceptance_length']:.2f}" in ran.out
    assert "5/6 own K=3" in ran.err
    assert picture.read_bytes().startswith(PNG)
    page = picture.with_suffix(".html").read_text()
    assert f"<td>{drafted['acceptance_length']:.2f}</td>" in page
    assert '<tr class="best">' in page
    assert "<svg" in page
    assert document["failures"] == []
    (fastest,) = [line for line in ran.out.splitlines() if "*" in line.split("draft", 1)[-1][:80]][
        -1:
    ]
    best = max(points, key=lambda point: point["tokens_per_second"])
    assert f"{best['tokens_per_second']:.1f}*" in fastest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-k", "1,x"), "-k must be a list such as 1,2,4 or 1-8, not '1,x'"),
        (("-k", "4,3-1"), "-k must be a list such as 1,2,4 or 1-8, not '4,3-1'"),
        (("-k", "0-2"), "-k must be numbers from 1 to"),
        (("-k", f"1-1{'0' * 5000}"), "-k must be numbers from 1 to"),
        (("-k", "4,100000"), "-k must be numbers from 1 to"),
        (("-k", "4,2000"), "-k must be numbers from 1 to 1024, not '4,2000'"),
        (("--batch-sizes", ""), "--batch-sizes must be a list"),
        (("some/model",), "no drafter is given; add --drafter"),
        (("--dataset", "no/such.jsonl"), "random, or a file that exists, not no/such.jsonl"),
        (("--dataset", "mt-bench"), "name its file with --dataset-path"),
        (("--random-input-len", "9"), "add --dataset-name random"),
        (("--dataset", "random", "--category", "x"), "--category is for data sets with categories"),
        (
            ("--dataset", "random", "--random-range-ratio", "2"),
            "must be a number from 0 to 1, not 2",
        ),
        (("--max-num-seqs", "4"), "--batch-sizes says how many requests run at once"),
        (("--max-tokens", "1"), "--max-tokens must be at least 2"),
        (("--temperature", "-1"), "temperature must be 0 (greedy) or more"),
        (("--profile", "/dev/null"), "--profile /dev/null cannot be made a folder"),
        (("--drafter", 'x={"num_speculative_tokens": 3}'), "give -k instead"),
        (("--drafter", "x={"), "--drafter x is not JSON"),
        (("--drafter", 'plain={"method": "ngram"}'), "'plain' cannot name this drafter"),
        (("--drafter", '={"method": "ngram"}'), "'' cannot name this drafter"),
        (
            ("--drafter", 'x={"method": "ngram"}', "--drafter", 'x={"method": "suffix"}'),
            "'x' cannot name this drafter in the tables",
        ),
        (("--output", "/nowhere/s.json"), "there is no directory /nowhere; make it first"),
        (("--output", "/"), "--output / is a directory; name a file"),
        (("--plot", "/nowhere/s.png"), "there is no directory /nowhere; make it first"),
        (("--plot", "sweep.jpgx"), "--plot sweep.jpgx must end in one of .png, .svg, .pdf, .html"),
        (("--prompts", "/nowhere/prompts"), "cannot read the prompts in /nowhere/prompts"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    slipstream: CommandLine, arguments: tuple[str, ...], says: str
) -> None:
    ran = slipstream("bench", "sweep", *arguments)
    assert ran.code == 2
    assert says in ran.err


@pytest.mark.parametrize("flag", ["--prompts", "--dataset"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompts"),
        ('{"prompt": 3}', 'line 1 has neither "prompt" (a text) nor "messages"'),
        ('{"prompt": "x"}\nnot json', "line 2 is not JSON"),
    ],
)
def test_a_broken_file_of_prompts_is_refused(
    slipstream: CommandLine, tmp_path: Path, text: str, says: str, flag: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    ran = slipstream("bench", "sweep", flag, str(file))
    assert ran.code == 2
    assert says in ran.err


def test_a_prompt_that_cannot_be_run_ends_the_sweep_at_once(
    slipstream: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt": ""}\n')
    ran = slipstream("bench", "sweep", "--prompts", str(file), "--drafter", "ngram", "-k", "1-2")
    assert ran.code == 2
    assert "prompt 2 of 2: the prompt is empty" in ran.err
    assert "not measured" not in ran.err


def test_figures_that_cannot_be_written_are_shown_all_the_same(
    slipstream: CommandLine, prompts: Path
) -> None:
    ran = slipstream(
        *("bench", "advise", "--prompts", str(prompts), "--max-tokens", "4", "-k", "1"),
        *("--drafter", "ngram", "--batch-sizes", "1", "--output", "/dev/full"),
    )
    assert ran.code == 1
    assert "the figures could not be written to a file, and are below only" in ran.err
    assert "Drafters against K" in ran.out
    assert "1 at once: plain decoding gives" in ran.out


def test_all_drafters_are_tried_before_anything_is_measured(
    slipstream: CommandLine, prompts: Path, tmp_path: Path
) -> None:
    drafters = ("--drafter", "ngram", "--drafter", 'own={"method": "ngram", "nonsense": 1}')
    ran = slipstream("bench", "sweep", "--prompts", str(prompts), *drafters)
    assert ran.code == 2
    assert "own at K=8: " in ran.err
    assert "nonsense" in ran.err
    assert "tokens/s" not in ran.err


def test_a_k_above_what_a_drafter_supports_is_left_out_of_the_sweep(
    slipstream: CommandLine, prompts: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "sweep.json"
    ran = slipstream(
        *("bench", "sweep", "--prompts", str(prompts), "--max-tokens", "4", "-k", "6-7"),
        *("--drafter", "demo/p-eagle", "--drafter", "ngram", "--output", str(figures)),
    )
    assert ran.code == 0, ran.err
    assert "demo/p-eagle drafts at most 6 tokens per step; larger K are left out" in ran.err
    points = json.loads(figures.read_text())["points"]
    measured = [(point["drafter"], point["k"]) for point in points]
    assert measured[1:3] == [("demo/p-eagle", 6), ("ngram", 6)]
    assert measured[3:] == [("ngram", 7), ("plain", 0)]
    assert "5/5 plain" in ran.err


def test_a_drafter_that_supports_no_k_is_refused(slipstream: CommandLine, prompts: Path) -> None:
    ran = slipstream(
        *("bench", "sweep", "--prompts", str(prompts), "-k", "7,8", "--drafter", "demo/p-eagle"),
    )
    assert ran.code == 2
    assert "demo/p-eagle drafts at most 6 tokens per step; give smaller numbers to -k" in ran.err


class Interrupter:
    """Stands for a user who presses Ctrl-C once so many engines were opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines: int) -> None:
        self._left, self._open = engines, open_llm
        monkeypatch.setattr(bench_sweep, "open_llm", self._opened)

    def _opened(self, config: Any, verbose: bool) -> Any:
        self._left -= 1
        llm = self._open(config, verbose)
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)
        return llm


@pytest.mark.parametrize("engines", [3, 4])
def test_an_interrupted_sweep_reports_what_it_has(
    slipstream: CommandLine,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engines: int,
) -> None:
    figures = tmp_path / "sweep.json"
    Interrupter(monkeypatch, engines)
    ran = slipstream(
        *("bench", "sweep", "--prompts", str(prompts), "--max-tokens", "8", "-k", "1-3"),
        *("--drafter", "ngram", "--output", str(figures)),
    )
    assert ran.code == 130
    document = json.loads(figures.read_text())
    assert document["interrupted"]
    assert len(document["points"]) == engines - 1
    assert document["points"][-1]["partial"]
    assert "(part)" in ran.out
    assert f"interrupted after {engines - 1} of 5 cells" in ran.err


def test_a_cell_that_fails_is_told_and_the_others_are_measured(
    slipstream: CommandLine, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    opened = open_llm

    def open_or_fail(config: Any, verbose: bool) -> Any:
        drafter = config.speculative_config or {}
        if drafter.get("num_speculative_tokens") == 1:
            raise RuntimeError("out of\nmemory")
        return opened(config, verbose)

    monkeypatch.setattr(bench_sweep, "open_llm", open_or_fail)
    ran = slipstream(
        *("bench", "sweep", "--prompts", str(prompts), "--max-tokens", "4", "-k", "1,2"),
        *("--drafter", "ngram", "--output", str(figures), "--plot", str(page)),
    )
    assert ran.code == 1
    document = json.loads(figures.read_text())
    assert [(point["drafter"], point["k"]) for point in document["points"]] == [
        ("plain", 0), ("ngram", 2), ("plain", 0),
    ]  # fmt: skip
    assert document["failures"] == [
        {"drafter": "ngram", "k": 1, "batch": 1, "reason": "RuntimeError: out of memory"}
    ]
    assert "ngram K=1 batch 1" in ran.out
    assert "1 of 4 cells could not be measured" in ran.err
    assert "RuntimeError: out of memory" in page.read_text()


def test_throughput_tells_tokens_drafts_and_where_the_time_went(
    slipstream: CommandLine, prompts: Path, tmp_path: Path
) -> None:
    figures, texts, traces = tmp_path / "t.json", tmp_path / "texts.json", tmp_path / "traces"
    ran = slipstream(
        *("bench", "throughput", "--prompts", str(prompts), "--max-tokens", "12"),
        *("--num-prompts", "4", "-k", "2", "--output", str(figures), "--save-texts", str(texts)),
        *("--profile", str(traces), "--profile-steps", "4"),
    )
    assert ran.code == 0, ran.err
    told = json.loads(figures.read_text())
    assert told["num_requests"] == 4
    assert told["not_finished"] == 0
    assert told["total_num_tokens"] > told["total_output_tokens"] > 4
    rate = told["total_output_tokens"] / told["elapsed_time"]
    assert told["output_tokens_per_second"] == pytest.approx(rate)
    assert 1 <= told["spec_decode_acceptance_length"] <= 3
    assert len(told["spec_decode_per_position_acceptance_rates"]) == 2
    assert len(told["spec_decode_steps_by_draft_tokens"]) == 3
    assert told["spec_decode_refused_drafting_seconds"] > 0
    assert told["spec_decode_estimated_speedup"] > 0
    assert "draft tokens per step" in ran.out
    assert told["mean_tpot_ms"] > 0
    answers = json.loads(texts.read_text())
    assert [answer["id"] for answer in answers] == ["0", "a", "2", "0#2"]
    assert answers[0]["text"] == answers[3]["text"] != ""
    assert answers[0]["prompt"] == "def area(width, height):\n"
    trace = json.loads(gzip.decompress((traces / "throughput.json.gz").read_bytes()))
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"slipstream: draft", "slipstream: target", "slipstream: verify"} <= names
    rows = {line[:26].strip(): line[26:].split() for line in ran.out.splitlines()}
    draft, target, verify, rest, whole, share = rows["matmul"]
    assert float(draft) > 0
    assert float(target) > 0
    parts = sum(map(float, (draft, target, verify, rest)))
    assert float(whole) == pytest.approx(parts, abs=0.01)
    assert share.endswith("%")
    assert float(rows["the engine's clock"][4]) > 0


def test_latency_is_of_whole_batches(
    slipstream: CommandLine, prompts: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "l.json"
    line = (
        *("bench", "latency", "--prompts", str(prompts), "--max-tokens", "6", "--batch-size", "2"),
        *("--num-iters", "3", "--num-iters-warmup", "1", "--output", str(figures)),
    )
    ran = slipstream(*line, "--drafter", "ngram", "-k", "2")
    assert ran.code == 0, ran.err
    told = json.loads(figures.read_text())
    assert len(told["latencies"]) == 3
    assert told["avg_latency"] == pytest.approx(sum(told["latencies"]) / 3)
    assert told["percentiles"]["50"] == pytest.approx(sorted(told["latencies"])[1])
    assert "Latency of a batch, s (3 batches)" in ran.out
    for wrong, says in (
        (("--num-prompts", "3"), "leave out --num-prompts"),
        (("--max-num-seqs", "3"), "leave out --max-num-seqs"),
    ):
        ran = slipstream(*line, *wrong)
        assert (ran.code, says in ran.err) == (2, True)


def test_interrupted_runs_report_what_was_done(
    slipstream: CommandLine, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.bench import workload

    figures, steps = tmp_path / "t.json", iter(range(100))

    real = workload._Clock.steps

    def interrupting(clock: Any) -> list[float]:
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(clock)

    monkeypatch.setattr(workload._Clock, "steps", interrupting)
    ran = slipstream(
        *("bench", "throughput", "--prompts", str(prompts), "--max-tokens", "64"),
        *("--no-speculation", "--output", str(figures), "--max-num-seqs", "1"),
    )
    assert ran.code == 130
    told = json.loads(figures.read_text())
    assert told["interrupted"]
    assert told["not_finished"] == 3
    assert told["total_output_tokens"] == 4
    assert "not finished" in ran.out


def test_without_matplotlib_plots_are_refused_at_once(
    slipstream: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = slipstream("bench", "sweep", "--plot", "x.png")
    assert ran.code == 2
    assert "pip install 'slipstream[bench]'" in ran.err


def test_advice_ends_with_what_to_serve(slipstream: CommandLine, prompts: Path) -> None:
    ran = slipstream(
        *("bench", "advise", "--prompts", str(prompts), "--max-tokens", "6", "-k", "2,auto"),
        *("--drafter", "ngram", "--batch-sizes", "1"),
    )
    assert ran.code == 0, ran.err
    assert "ngram K=auto" in ran.err
    assert "4 cells to measure (plain, ngram); the first tells how long" in ran.err
    assert len(re.findall(r"tokens/s; about \d+ s left\n", ran.err)) == 3  # not after the last
    *_, conclusion = ran.out.split("\n\n")
    assert conclusion.startswith("1 at once: plain decoding gives ")
    assert "slipstream serve demo" in conclusion or "No drafter is faster" in conclusion


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (89, "89 s"), (91, "2 min"), (3599, "1 h 0 min"), (4700, "1 h 19 min")],
)
def test_durations_are_told_in_few_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_auto_is_no_number_of_a_range(slipstream: CommandLine, prompts: Path) -> None:
    ran = slipstream("bench", "sweep", "--prompts", str(prompts), "-k", "1-auto")
    assert ran.code == 2
    assert "-k must be a list such as 1,2,4 or 1-8" in ran.err
