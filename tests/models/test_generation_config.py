"""Defaults of requests: from the checkpoint, from elsewhere, or none."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.errors import CheckpointError, SlipstreamError, UsageError
from slipstream.core.sampling_params import SamplingDefaults
from slipstream.models.checkpoint import Checkpoint, Replaced
from slipstream.models.generation_config import generation_folder, read_sampling_defaults
from slipstream.serve.protocol.completions import CompletionRequest
from slipstream.serve.sampling import sampling_params
from tests.checkpoints import write_qwen3

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [7, 9]}
SAMPLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def write(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def defaults(
    folder: Path, given: str = "auto", overrides: dict[str, Any] | None = None
) -> SamplingDefaults:
    replaced = Replaced(generation_folder=generation_folder(given))
    return read_sampling_defaults(Checkpoint(folder, replaced), given, overrides)


def test_the_checkpoint_s_are_taken_unless_told_otherwise(tmp_path: Path) -> None:
    model = write(tmp_path / "model", QWEN)
    other = write(tmp_path / "other", {"max_new_tokens": 40, "eos_token_id": 3})
    assert defaults(model).values == SAMPLED
    assert str(model) in defaults(model).source
    assert defaults(model, "vllm") == SamplingDefaults()
    elsewhere = defaults(model, str(other))
    assert (elsewhere.values, elsewhere.most_tokens) == ({"max_tokens": 40}, 40)
    replaced = Replaced(generation_folder=other)
    assert Checkpoint(model, replaced).eos_token_ids == (3,)
    assert Checkpoint(model).eos_token_ids == (7, 9)


def test_overrides_count_before_the_file(tmp_path: Path) -> None:
    model = write(tmp_path / "model", {**QWEN, "max_new_tokens": 50})
    assert defaults(model).most_tokens is None  # a default, not a limit
    own = defaults(model, overrides={"top_k": 5, "max_new_tokens": 8})
    assert own.values == {**SAMPLED, "top_k": 5, "max_tokens": 8}
    assert own.most_tokens == 8
    assert defaults(model, "vllm", {"min_p": 0.1}).values == {"min_p": 0.1}


@pytest.mark.parametrize(
    ("content", "given", "overrides", "error", "words"),
    [
        ({"top_p": 1.5}, "auto", None, CheckpointError, r"generation_config.json: top_p must be"),
        (
            {"do_sample": "yes"},
            "auto",
            None,
            CheckpointError,
            r"config.json: do_sample must be true",
        ),
        ({"top_k": "20"}, "auto", None, CheckpointError, r"config.json: top_k must be an integer"),
        ({}, "auto", {"skip_special_tokens": 0}, UsageError, "config: skip_special_tokens must be"),
        ({}, "auto", {"top_p": 7}, UsageError, "override_generation_config: top_p must be"),
        ({}, "auto", {"beams": 7}, UsageError, "beams cannot be set; it takes temperature"),
        ({}, "missing", None, UsageError, "missing has no generation_config.json"),
    ],
)
def test_what_no_request_could_have_is_refused(
    tmp_path: Path,
    content: dict[str, Any],
    given: str,
    overrides: dict[str, Any] | None,
    error: type[SlipstreamError],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        defaults(write(tmp_path / "model", content), given, overrides)


def test_a_request_keeps_what_it_says(tmp_path: Path) -> None:
    body = CompletionRequest(prompt="x", temperature=0.2, top_k=-1)
    found = SamplingDefaults({**SAMPLED, "max_tokens": 30})
    params = sampling_params(body, found, 16, None)
    assert (params.temperature, params.top_k, params.top_p) == (0.2, -1, 0.95)
    assert params.max_tokens == 16
    assert sampling_params(body, found, None, None).max_tokens == 30
    assert sampling_params(body, SamplingDefaults(), None, None).max_tokens is None
    limit = SamplingDefaults({"max_tokens": 8}, most_tokens=8)
    assert sampling_params(body, limit, 16, None).max_tokens == 8
    assert sampling_params(body, limit, 3, None).max_tokens == 3


def test_an_llm_has_them_where_no_parameters_are_given(tiny_target: str) -> None:
    llm = LLM(
        tiny_target,
        skip_tokenizer_init=True,
        num_kv_blocks=8,
        override_generation_config={"temperature": 0, "max_new_tokens": 3},
    )
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
    [output] = llm.generate({"prompt_token_ids": [5, 9, 14]})
    assert len(output.outputs[0].token_ids) == 3


def test_the_demo_has_none() -> None:
    from slipstream.models.checkpoint import resolve_checkpoint

    for name in ("demo", "demo/draft"):
        assert defaults(resolve_checkpoint(name)) == SamplingDefaults()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_outside_the_vocabulary_is_refused(name: str, tmp_path: Path) -> None:
    write_qwen3(tmp_path, eos_token_id=3)
    content = json.loads((tmp_path / "config.json").read_text())
    file = tmp_path / name
    file.write_text(json.dumps({**content, "eos_token_id": [95, 96]}))
    with pytest.raises(CheckpointError, match=f"{file}: eos_token_id 96 .* from 0 to 95"):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_kv_blocks=8)
