"""What `generate` prints."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams, StructuredOutput
from slipstream.core.sampling_params import SamplingDefaults
from slipstream.models.checkpoint import resolve_checkpoint
from tests.cli.conftest import CommandLine
from tests.cli.fake_llm import FakeLLM
from tests.drafters.heads import as_wrapper, write_eagle3

SAMPLE_KEYS = {"text", "token_ids", "finish_reason", "stop_reason"}
METRIC_KEYS = {
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
    "acceptance_length",
    "num_steps",
    "num_steps_by_draft_tokens",
    "estimated_speedup",
    "refused_drafting_seconds",
    "num_cached_tokens",
    "time_to_first_token_s",
    "latency_s",
    "tokens_per_s",
}
ENGINE_KEYS = {
    "model",
    "method",
    "num_speculative_tokens",
    "max_model_len",
    "device",
    "dtype",
    "kernels",
    "load_time_s",
    "time_shares",
}


def test_a_pipe_gets_the_text_alone(slipstream: CommandLine, fake_llm: type[FakeLLM]) -> None:
    ran = slipstream("generate", "--prompt", "x")
    assert ran.out == FakeLLM.reply + "\n"
    assert ran.err.count("\n") == 1
    for part in ("28 tokens in", "tokens/s", "AL 4.00", "accepted 1.00 1.00 1.00 0.00"):
        assert part in ran.err
    assert "draft 25% target 50% verify 25% rest 0%" in ran.err


@pytest.mark.parametrize(
    ("flags", "wish"),
    [
        (["--json-schema", ' {"type": "object"}'], {"json_schema": {"type": "object"}}),
        (["--json-schema", "schema.json"], {"json_schema": {"type": "array"}}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "[a-z]+"], {"regex": "[a-z]+"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ("yes", "no")}),
        (["--grammar", "yes.lark"], {"grammar": 'start: "yes"\n'}),
    ],
)
def test_flags_say_what_the_text_must_be(
    flags: list[str],
    wish: dict[str, Any],
    slipstream: CommandLine,
    fake_llm: type[FakeLLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"type": "array"}')
    Path("yes.lark").write_text('start: "yes"\n')
    assert slipstream("generate", "--prompt", "x", *flags).code == 0
    params = FakeLLM.made[-1].params
    assert params is not None
    assert params.structured == StructuredOutput(**wish)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--regex", "a", "--json-object"], "--json-object and --regex contradict each other"),
        (["--json-schema", "nowhere.json"], "--json-schema nowhere.json cannot be read"),
        (["--json-schema", "{"], "json_schema is not JSON"),
        (["--regex", ""], "regex must be a text"),
    ],
)
def test_bad_flags_of_structure_are_refused(
    flags: list[str], words: str, slipstream: CommandLine, fake_llm: type[FakeLLM]
) -> None:
    ran = slipstream("generate", "--prompt", "x", *flags)
    assert ran.code == 2
    assert words in ran.err


def test_several_prompts_come_in_order_under_headings(
    slipstream: CommandLine, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "reply", "text")
    assert slipstream("generate", "--prompt", "x", "--prompt", "y").out == (
        "== prompt 1 of 2 ==\ntext\n\n== prompt 2 of 2 ==\ntext\n"
    )
    assert slipstream("generate", "--prompt", "x", "-n", "2", "--temperature", "1").out == (
        "== sample 1 of 2 ==\ntext\n\n== sample 2 of 2 ==\ntext\n"
    )


def test_the_checkpoint_s_defaults_count_where_no_flag_is_given(
    slipstream: CommandLine, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = SamplingDefaults({"temperature": 0.6, "top_k": 20}, source="a file")
    monkeypatch.setattr(fake_llm, "defaults", own)
    ran = slipstream("generate", "--prompt", "x", "--top-k", "0")
    params = fake_llm.made[-1].params
    assert params == SamplingParams(temperature=0.6, top_k=0, max_tokens=128)
    assert "defaults of requests: temperature 0.6, top_k 20 (a file;" in ran.err
    assert "defaults" not in ran.out
    slipstream("chat", "-t", "0", stdin=b"hi\n")
    params = fake_llm.made[-1].params
    assert params == SamplingParams(temperature=0, top_k=20, max_tokens=512)


def test_json(slipstream: CommandLine, fake_llm: type[FakeLLM]) -> None:
    ran = slipstream("generate", "--prompt", "x", "--prompt", "y", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert set(document) == {"outputs", "engine"}
    assert set(document["engine"]) == ENGINE_KEYS
    assert document["engine"]["dtype"] == "bfloat16"
    assert document["engine"]["time_shares"] == {
        "draft": 0.25,
        "target": 0.5,
        "verify": 0.25,
        "rest": 0.0,
    }
    assert [output["prompt"] for output in document["outputs"]] == ["x", "y"]
    for output in document["outputs"]:
        assert set(output) == {"prompt", "metrics"} | SAMPLE_KEYS
        assert output["text"] == FakeLLM.reply
        assert bytes(output["token_ids"]).decode() == FakeLLM.reply
        assert output["finish_reason"] == "length"
        metrics = output["metrics"]
        assert set(metrics) == METRIC_KEYS
        assert metrics["acceptance_length"] == 4.0
        assert metrics["time_to_first_token_s"] == 0.5
        assert metrics["tokens_per_s"] == len(output["token_ids"]) / 2.0


def test_json_with_samples_and_logprobs(slipstream: CommandLine, fake_llm: type[FakeLLM]) -> None:
    ran = slipstream(
        "generate", "--prompt", "x", "--json", "-n", "2", "--logprobs", "1", "--max-tokens", "2"
    )
    output = json.loads(ran.out)["outputs"][0]
    assert len(output["samples"]) == 2
    for sample in output["samples"]:
        assert set(sample) == SAMPLE_KEYS | {"logprobs", "cumulative_logprob"}
    assert output["cumulative_logprob"] == -1.0
    assert output["logprobs"][0] == [{"token_id": 72, "token": "H", "logprob": -0.5, "rank": 1}]
    assert "prompt_logprobs" not in output
    ran = slipstream("generate", "--prompt", "x", "--json", "--prompt-logprobs", "0")
    assert json.loads(ran.out)["outputs"][0]["prompt_logprobs"] == [None]


def test_verbose_shows_numbers_and_reasons(
    slipstream: CommandLine, fake_llm: type[FakeLLM]
) -> None:
    ran = slipstream("generate", "--prompt", "x", "--verbose")
    assert ran.out == FakeLLM.reply + "\n"
    rows = [line.split() for line in ran.err.splitlines()]
    assert ["num_kv_blocks", "8", "because"] in rows
    assert ["async_scheduling", "False", "turns"] in rows
    assert ["max_model_len", "64"] in rows


def test_verbose_tells_each_reason_once(slipstream: CommandLine) -> None:
    ran = slipstream("generate", "--prompt", "x", "--max-tokens", "1", "--verbose")
    assert ran.err.count("num_kv_blocks") == 1


def test_the_demo_speaks_the_same_with_and_without_its_draft(slipstream: CommandLine) -> None:
    line = ["generate", "--prompt", "import os\n", "--max-tokens", "12", "--json"]
    fast, plain = slipstream(*line), slipstream(*line, "--no-speculation")
    fast_document, plain_document = json.loads(fast.out), json.loads(plain.out)
    assert fast_document["outputs"][0]["text"] == plain_document["outputs"][0]["text"]
    assert fast_document["outputs"][0]["metrics"]["num_drafts"] > 0
    assert plain_document["outputs"][0]["metrics"]["num_drafts"] == 0
    assert plain_document["engine"]["method"] is None
    assert fast_document["engine"]["time_shares"]["draft"] > 0
    assert plain_document["engine"]["time_shares"]["draft"] == 0


def test_the_text_is_that_of_the_api(slipstream: CommandLine) -> None:
    llm = LLM("demo")
    params = SamplingParams(temperature=0, max_tokens=12, stop=("(",))
    expected = llm.generate("def f", params)[0].outputs[0].text
    ran = slipstream("generate", "--prompt", "def f", "--max-tokens", "12", "--stop", "(")
    assert ran.out == expected + "\n"


def test_a_drafter_stands_for_its_target_too(slipstream: CommandLine, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", resolve_checkpoint("demo"), fit=False)
    config = json.loads((as_wrapper(folder) / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "demo"
    (folder / "config.json").write_text(json.dumps(config))
    line = ["generate", str(folder), "--prompt", "import os\n", "--max-tokens", "6", "--json"]
    for flags, method, count in (
        ([], "eagle3", 3),
        (["-k", "2"], "eagle3", 2),
        (["--no-speculation"], None, 0),
    ):
        engine = json.loads(slipstream(*line, *flags).out)["engine"]
        assert (engine["method"], engine["num_speculative_tokens"]) == (method, count)
    del config["speculators_config"]["verifier"]
    (folder / "config.json").write_text(json.dumps(config))
    ran = slipstream(*line)
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "names no target" in ran.err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--max-tokens", "900", "--num-kv-blocks", "3"), "before --max-tokens 900: the KV cache"),
        (("--max-tokens", "900", "--max-model-len", "24"), "24 tokens, .* which --max-model-len"),
        (("--max-tokens", "20", "--num-kv-blocks", "3"), ""),
    ],
)
def test_an_output_that_is_cut_by_the_cache_or_the_context_is_told_of(
    flags: Sequence[str], expected: str, slipstream: CommandLine
) -> None:
    line = ("generate", "--ignore-eos", "--prompt", "one", "--prompt", "two")
    ran = slipstream(*line, *flags)
    assert ran.code == 0
    assert ran.err.count("an output ended at") == bool(expected)
    assert re.search(expected, ran.err)


def test_one_token_is_a_token(slipstream: CommandLine) -> None:
    ran = slipstream("generate", "--prompt", "x", "--max-tokens", "1", "--no-speculation")
    assert ran.err.startswith("1 token in ")
