"""The decode benchmark runs, at tiny sizes and without a GPU; its arithmetic is right."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.decode_timing import (
    Method,
    Setup,
    limit_ms,
    make_engine,
    prompt_maker,
    state_bytes,
)
from benchmarks.expert_spread import distinct_experts
from benchmarks.gpu_decode import bars, expert_bars, float4_bars, main, state_bars
from benchmarks.verification_cost import main as verification_cost
from slipstream.engine.draft_policy import FixedPolicy
from slipstream.runner import prefix_groups

TINY = "--target tiny --draft tiny:1 -k 3 --device cpu --dtype float32 --prompt 12 --short 4"
SMALL = f"{TINY} --long 24 --repeat 1 --batch-sizes 1,2"


def test_a_twin_is_measured_beside_plain_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), "--load-format", "twin", "--with-plain", "--json"]) == 0
    out = capsys.readouterr().out
    assert "tiny plain, prompt 12, twin" in out
    assert "tiny + tiny:1 K=3" in out
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [(row["k"], row["batch"]) for row in rows] == [(0, 1), (0, 2), (3, 1), (3, 2)]
    assert [row["al"] for row in rows[:2]] == [1.0, 1.0]
    for row in rows[2:]:
        assert 1.3 < row["al"] < 4
        assert row["plain_ratio"] is not None
        assert len(row["split"]) in (0, 4)
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["al"] / row["step"] * 1e3)


def test_acceptance_is_forced_with_dummy_weights(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --acceptance-length 2.0 --draft-vocab-size 64 --quantization fp8 --json"
    assert main([*line.split(), "--drafter-quantization", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "tiny in fp8 + tiny:1 in fp8 over 64 tokens K=3" in out
    assert [row["al"] for row in json.loads(out.splitlines()[-1])["rows"]] == [2.0, 2.0]


@pytest.mark.parametrize("how", ["", "--reads-apart"])
def test_prompts_share_their_first_tokens(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 100)
    line = f"{SMALL} --acceptance-length 2.0 --shared-prefix 32 {how}"
    assert main(line.split()) == 0
    assert (prefix_groups.LEAST_SAVED > 100) == bool(how)
    prompts = [it["prompt_token_ids"] for it in prompt_maker(99, 40, 32)(3)]
    assert len({tuple(it[:32]) for it in prompts}) == 1
    assert len({tuple(it[32:]) for it in prompts}) == 3


def test_a_failure_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), "--acceptance-length", "9"]) == 1
    assert "between 1 and 4" in capsys.readouterr().err


def test_the_suite_takes_no_options_of_one_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--suite", "bars", "--draft-vocab-size", "9"])
    assert "--suite has its own draft-vocab-size" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--suite", "bars", "--only", "no such thing"])
    assert "'no such thing' is in no title of the suite: qwen3-8b plain" in capsys.readouterr().err


def test_limits_are_those_of_the_bars() -> None:
    """The memory limits at batch 1 that the bars are stated with, in ms."""
    limits = [limit_ms(bar.setup) for bar in bars()]
    assert limits == pytest.approx([3.48, 4.58, 4.35, 14.7, 17.1], abs=0.06)
    rounded = replace(bars()[1].setup, quantization="fp8", drafter_quantization="fp8")
    assert limit_ms(rounded) == pytest.approx(4.58 / 2, abs=0.01)
    assert limit_ms(Setup(target="llama-3.1-8b", options={})) == pytest.approx(3.45, abs=0.01)


def test_limits_of_mixtures_count_the_experts_that_independent_rows_touch() -> None:
    limits = [[limit_ms(bar.setup, batch) for batch in bar.steps] for bar in expert_bars()[:3]]
    expected = [[0.85, 2.1, 2.86, 2.89], [1.15, 3.85, 9.65, 14.5], [1.4, 5.95, 12.2]]
    for ours, known in zip(limits, expected, strict=True):
        assert ours == pytest.approx(known, abs=0.06)
    assert limit_ms(float4_bars()[0].setup) == pytest.approx(9.33, abs=0.05)
    all_of_them = limit_ms(expert_bars()[0].setup, 1, experts=32.0)
    assert all_of_them == pytest.approx(limits[0][-1], abs=0.01)


def test_limits_count_states_and_the_cache_beside_them() -> None:
    plain, drafted = (bar.setup for bar in state_bars()[:2])
    assert limit_ms(plain) == pytest.approx(3.67, abs=0.01)
    assert state_bytes(plain, 8) == 8 * 2 * 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert state_bytes(drafted, 8) < 1.05 * state_bytes(plain, 8)
    tokens = 1000 * 8 * 2 * 4 * 256 * 2  # of 8 layers: keys and values
    assert limit_ms(plain, 1, context=1000) - limit_ms(plain) == pytest.approx(tokens / 4.35e9)
    assert limit_ms(bars()[0].setup, 1, context=1000) == limit_ms(bars()[0].setup)
    # Three passes of the module: a layer of attention, two widths to one, and the head.
    layer = (2 * 4096 + 2 * 1024 + 4096 + 3 * 12288) * 4096
    module = 2 * (layer + 2 * 4096**2 + 248320 * 4096)
    more = 3 * module + state_bytes(drafted, 1) - state_bytes(plain, 1)
    assert limit_ms(drafted) - limit_ms(plain) == pytest.approx(more / 4.35e9)


def test_experts_that_texts_touch_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.kernels.reference import REFERENCE
    from slipstream.models import loading

    # Its layers run op by op, as on GPUs.
    monkeypatch.setattr(loading, "kernels_for", lambda *_: SimpleNamespace(network=REFERENCE))
    setup = Setup(target="tiny-moe", load_format="twin", dtype="float32", options={})
    llm = make_engine(setup, Method((2,), 60, 2, 4, 1), tmp_path)
    texts = [[(7 * i + j) % 512 for i in range(40)] for j in (1, 300)]
    one, several = (distinct_experts(llm, texts[:1], rows) for rows in (1, 4))
    assert one == 4.0
    assert several is not None
    assert 7.0 < several < 11.5  # of 16, independently 10.9
    together = distinct_experts(llm, texts, 4)
    assert together is not None
    assert several < together < 15.0


def test_every_number_of_drafts_has_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Put back afterwards.
    monkeypatch.setattr("slipstream.engine.assembly.FixedPolicy", FixedPolicy)
    line = "--target tiny --draft tiny:1 --device cpu --most 2 --prompt 12 --short 4 --long 16"
    assert verification_cost([*line.split(), "--batch-sizes", "2"]) == 0
    rows = [row.split()[:2] for row in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["2", "0"], ["2", "1"], ["2", "2"]]
