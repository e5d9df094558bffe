"""The benchmarks of draft policies run at tiny sizes, and judge what they measured."""

import json
from pathlib import Path

import pytest

from benchmarks import changing_traffic, long_contexts, never_slower, policy_overhead
from benchmarks.changing_traffic import judged, right_choices
from benchmarks.decode_windows import Asked, Window, num_gained, run_window, running
from benchmarks.never_slower import Cell
from benchmarks.policy_engines import CHANCES, PAIRS, TRAFFIC, Requests, seed_for
from slipstream import LLM
from slipstream.engine.draft_policy import FixedPolicy
from tests.draft_traffic import learn_costs_while_running


@pytest.fixture(autouse=True)
def _fast_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    learn_costs_while_running(monkeypatch)


@pytest.fixture(scope="module")
def llm() -> LLM:
    drafter = {"model": "demo/draft", "num_speculative_tokens": 4}
    return LLM("demo", speculative_config=drafter, device="cpu", dtype="float32", max_num_seqs=4)


def requests(number: int) -> list[Asked]:
    return Requests(PAIRS["cpu"]["demo/draft"], 12, 4).take("text", 0, number, False)


def test_a_window_holds_steps_of_all_its_requests_under_the_given_policy(llm: LLM) -> None:
    before = llm.engine.scheduler.policy
    plain = run_window(llm, FixedPolicy(0), requests(3), 6, 60)
    assert (plain.tokens, plain.choices) == (18, [0.0] * 6)
    drafted = run_window(llm, FixedPolicy(2), requests(3), 6, 60)
    assert drafted.tokens >= 18
    assert len(drafted.choices) < 6
    assert set(drafted.choices) == {2.0}
    assert llm.engine.scheduler.policy is before
    assert not llm.engine.has_unfinished


def test_tokens_are_those_to_be_expected_where_verdicts_are_drawn(llm: LLM) -> None:
    asked = [Asked(prompt=[5, 6, 7], rates=[0.5] * 4), Asked(prompt=[8, 9], rates=[0.0] * 4)]
    window = run_window(llm, FixedPolicy(2), asked, 4, 60)
    assert window.tokens == pytest.approx(len(window.choices) * (1 + 0.5 + 0.25 + 1))


def test_running_requests_have_their_first_token_and_end_with_the_block(llm: LLM) -> None:
    with running(llm, requests(2), 30) as live:
        assert all(num_gained(it) > 0 for it in live)
    assert all(it.finished for it in live)


def test_requests_alternate_between_the_chances_of_their_traffic() -> None:
    pair = PAIRS["cpu"]["demo/draft, drawn"]
    taken = Requests(pair, 12, 4).take("mixed", 1, 3, False)
    first, second = TRAFFIC["mixed"]
    assert [asked.rates and asked.rates[0] for asked in taken] == [second, first, second]
    assert [asked.seed and CHANCES[asked.seed % len(CHANCES)] for asked in taken] == [0.0, 0.9, 0.0]
    assert len({seed_for(0.9, number) for number in range(8)}) == 8
    warm = Requests(pair, 12, 4).take("mixed", 1, 3, True)
    assert not any(ours.prompt == theirs.prompt for ours in taken for theirs in warm)


def cell(**speeds: list[float]) -> Cell:
    windows = {
        name.strip("k"): [Window(speed, 1.0, [1.0]) for speed in own]
        for name, own in speeds.items()
    }
    return Cell("x", "mixed", 8, windows)


def test_auto_is_compared_with_the_best_of_the_same_rounds() -> None:
    found = cell(k0=[90, 80, 100], k2=[100, 70, 110], k4=[50, 50, 50], auto=[99, 90, 110])
    assert found.ratio(0) == found.ratio(1) == pytest.approx(1.0)
    assert found.ratio(0, 0) == pytest.approx(1.1)
    assert found.misses("cuda") == ["of fixed 1.000 < 1.05"]
    slow = cell(k0=[100, 100, 100], auto=[96, 96, 96])
    assert slow.misses("cuda") == ["of best 0.960 < 0.97"]
    assert slow.misses("cpu") == []
    assert cell(k0=[1], k1=[1]).misses("cuda") == []


def test_drafters_are_measured_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--settings 0,2,auto --concurrency 1,2 --repeat 2 --prompt 12 --output 4 --warm-up 2"
    files = tmp_path / "x.json", tmp_path / "x.svg"
    command = [*options.split(), "--least", "0", "--dtype", "float32", "--only", "demo/ngram"]
    never_slower.main([*command, "--json", str(files[0]), "--plot", str(files[1])])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| text")]
    assert [row.split(" | ")[1] for row in rows] == ["1", "2"]
    document = json.loads(files[0].read_text())
    assert [it["concurrency"] for it in document["cells"]] == [1, 2]
    for measured in document["cells"]:
        assert {name: len(own) for name, own in measured["rounds"].items()} == {
            "0": 2,
            "2": 2,
            "auto": 2,
        }
        assert measured["mean_choice"]["0"] == 0
    assert "demo/ngram, text" in files[1].read_text()


def test_a_change_is_followed_when_choices_are_right_and_stay_so() -> None:
    low, high = right_choices([9.0] * 30 + [2.0, 3.0] * 15)
    assert (low, high) == (1.5, 3.5)
    settled = [2.0, 3.0] * 30
    change = judged(0.1, [7.0] * 5 + [2.0] + [7.0] * 20 + [4.0] * 3 + settled, low, high)
    assert change.steps == 29
    assert change.met
    late = judged(0.1, [7.0] * 40 + settled, low, high)
    assert (late.steps, late.met) == (40, False)
    probing = judged(0.1, [7.0] + [0.0, 0.0, 0.0, 1.0, 0.0] * 12, *right_choices([0.0] * 20))
    assert probing.steps == 1
    assert judged(0.8, [0.0] * 60, low, high).steps is None


def test_choices_are_told_for_requests_whose_acceptance_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "x.json", tmp_path / "x.svg"
    line = "--concurrency 2 --steps 6 --dtype float32"
    changing_traffic.main([*line.split(), "--json", str(files[0]), "--plot", str(files[1])])
    assert capsys.readouterr().out.count("   2 ") == 4
    document = json.loads(files[0].read_text())
    for way in ("new", "same"):
        low, high = document[f"{way} requests, 2"]
        assert (low["chance"], high["chance"]) == (0.1, 0.8)
        assert len(low["choices"]) == len(high["choices"]) == 6
    assert "new requests, 2: to 0.8" in files[1].read_text()


@pytest.mark.parametrize("captured", [False, True])
def test_a_recorded_policy_decides_the_same_again(captured: bool) -> None:
    recording = policy_overhead.Recording(3, captured, 40)
    times = policy_overhead.microseconds(recording, policy_overhead.new_policy(3, captured))
    assert len(times) == 40
    assert sum(ended is not None for _, ended, _ in recording.steps) == 2
    other = policy_overhead.new_policy(3, not captured)
    with pytest.raises(AssertionError, match="decides something else"):
        policy_overhead.microseconds(recording, other)


def test_speculation_behind_long_contexts_is_compared_with_plain_decoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--device cpu --target tiny --draft tiny:1 --dtype float32 --draft-windows 32,0 "
    line += "--contexts 2x48,1x128 --whole 2x40 --whole-output 12 --output 6 --warm-up 4 --repeat 1"
    file = tmp_path / "x.json"
    long_contexts.main([*line.split(), "--json", str(file)])
    rows = json.loads(file.read_text())
    assert [row["draft_window"] for row in rows] == [32] * 8 + [0] * 8
    settings = ["0", "4", "auto"]
    assert [row["setting"] for row in rows[:8]] == [*settings, *settings, "0", "auto"]
    assert [(row["context"], row["batch"]) for row in rows[:8:3]] == [(128, 1), (48, 2), (40, 2)]
    by_setting = {row["setting"]: row["al"] for row in rows[:3]}
    assert by_setting["0"] == 1
    assert 1 < by_setting["4"] < 1e-6 + sum(0.7**place for place in range(5))
    bars = [line.split(maxsplit=4)[4] for line in capsys.readouterr().out.splitlines()[-3:]]
    assert bars == ["1 x 128, over plain", "2 x 48, over plain", "whole, 2 x 40, over plain"]
