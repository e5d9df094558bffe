"""`slipstream bench sweep`: every drafter and K is measured, reported and drawn."""

import json
from pathlib import Path

import pytest

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
        *("--output", str(figures), "--plot", str(picture)),
    )
    assert ran.code == 0, ran.err
    document = json.loads(figures.read_text())
    assert document["title"] == "demo, 3 prompts, 12 tokens each, temperature 0"
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
        assert sum(point["shares"].values()) == pytest.approx(1.0)
        ratio = point["tokens_per_second"] / points[0]["tokens_per_second"]
        assert point["times_plain"] == pytest.approx(ratio)
    drafted = points[2]
    assert drafted["acceptance_length"] > 1.2
    assert f"{drafted['acceptance_length']:.2f}" in ran.out
    assert "5/6 own K=3" in ran.err
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-k", "1,x"), "-k must be a list such as 1,2,4 or 1-8, not '1,x'"),
        (("-k", "0-2"), "-k must be numbers from 1 on"),
        (("--batch-sizes", ""), "--batch-sizes must be a list"),
        (("some/model",), "nothing to sweep; add --drafter"),
        (("some/model", "--drafter", "ngram"), "name a file with --prompts"),
        (("--drafter", 'x={"num_speculative_tokens": 3}'), "-k says it"),
        (("--drafter", "x={"), "--drafter x is not JSON"),
        (("--output", "/nowhere/s.json"), "there is no directory /nowhere; make it first"),
        (("--output", "/"), "--output / is a directory; name a file"),
        (("--plot", "/nowhere/s.png"), "there is no directory /nowhere; make it first"),
        (("--plot", "sweep.jpgx"), "--plot sweep.jpgx must end in one of .png, .svg, .pdf"),
        (("--prompts", "/nowhere/prompts"), "cannot read the prompts in /nowhere/prompts"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    slipstream: CommandLine, arguments: tuple[str, ...], says: str
) -> None:
    ran = slipstream("bench", "sweep", *arguments)
    assert ran.code == 2
    assert says in ran.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompts"),
        ('{"prompt": 3}', 'line 1 has neither "prompt" (a text) nor "messages"'),
        ('{"prompt": "x"}\nnot json', "line 2 is not JSON"),
    ],
)
def test_a_broken_file_of_prompts_is_refused(
    slipstream: CommandLine, tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    ran = slipstream("bench", "sweep", "--prompts", str(file))
    assert ran.code == 2
    assert says in ran.err


def test_prompts_are_spread_over_the_file(tmp_path: Path) -> None:
    from slipstream import SamplingParams
    from slipstream.bench.workload import read_workload

    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": str(index)}) for index in range(9)))
    workload = read_workload(file, 3, SamplingParams())
    assert workload.texts == ("0", "3", "6")
    assert read_workload(file, 20, SamplingParams()).num_prompts == 9


def test_without_matplotlib_plots_are_refused_at_once(
    slipstream: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = slipstream("bench", "sweep", "--plot", "x.png")
    assert ran.code == 2
    assert "pip install 'slipstream[bench]'" in ran.err
