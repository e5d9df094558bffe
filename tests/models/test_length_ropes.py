"""Rotations that depend on the length of texts equal those of transformers, on both sides of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.errors import UsageError
from slipstream.engine.prompts import Prompt
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.train.target import require_trainable
from tests.models.expert_cases import EXPERTS
from tests.models.parity_cases import LLAMA, MISTRAL, QWEN2, QWEN3, Case
from tests.models.test_parity import (
    MAX_POSITIONS,
    TOLERANCE,
    VOCAB_SIZE,
    assert_spread,
    oracle,
    oracle_logits,
    runner_logits,
    write_checkpoint,
)

ORIGINAL = 48
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0}
CPU = torch.device("cpu")


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 300.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.05 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.5 * pair for pair in range(pairs)],
    }


GLM = next(case for case in EXPERTS if case.architecture == "Glm4Moe")
CASES = [
    (LLAMA[0], DYNAMIC),
    (QWEN3[0], DYNAMIC),
    (GLM, {**DYNAMIC, "partial_rotary_factor": 0.5}),
    (QWEN2[0], longrope(6)),
    (MISTRAL[1], longrope(8)),
]


def write(case: Case, rope: dict[str, Any], folder: Path) -> Path:
    write_checkpoint(replace(case, changes={**case.changes, "rope_parameters": rope}), folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if rope["rope_type"] == "dynamic":
        config["max_position_embeddings"] = ORIGINAL
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("case", "rope"), CASES, ids=str)
def test_logits_below_and_beyond_the_original_length(
    case: Case, rope: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(case, rope, tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(VOCAB_SIZE, (130,), generator=generator).tolist()
    results = {}
    for length, positions in ((40, ORIGINAL), (130, 130)):
        options = LoadOptions(torch.float32, CPU, "auto", positions)
        network = load_decoder(Checkpoint(folder), options)
        expected = oracle_logits(oracle(folder), prompt[:length])
        assert_spread(expected)
        (results[length],) = runner_logits(network, [prompt[:length]], (MAX_POSITIONS,))
        torch.testing.assert_close(results[length], expected, atol=TOLERANCE, rtol=0)
    # The length matters: a longer table has other angles for the same first tokens.
    assert (results[130][:40] - results[40]).abs().max() > 0.1


def test_the_most_tokens_of_a_request_choose_the_angles(tmp_path: Path) -> None:
    folder = write(LLAMA[0], DYNAMIC, tmp_path / "dynamic")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 16}
    usual, longer = LLM(str(folder), **options), LLM(str(folder), max_model_len=144, **options)
    assert usual.engine.resolved.limits.max_model_len == ORIGINAL
    assert longer.engine.resolved.limits.max_model_len == 3 * ORIGINAL
    prompt: Prompt = {"prompt_token_ids": [*range(30)]}
    params = SamplingParams(temperature=0, logprobs=0)
    first, second = (llm.generate([prompt], params)[0].outputs[0] for llm in (usual, longer))
    assert first.cumulative_logprob != second.cumulative_logprob
    with pytest.raises(UsageError, match="more than the 144 positions"):
        LLM(str(folder), max_model_len=145, **options)

    folder = write(QWEN2[0], longrope(6), tmp_path / "longrope")
    assert LLM(str(folder), **options).engine.resolved.limits.max_model_len == ORIGINAL
    long = LLM(str(folder), max_model_len=MAX_POSITIONS, **options)
    assert long.engine.resolved.limits.max_model_len == MAX_POSITIONS


def test_yarn_asked_for_on_the_command_line_lengthens_the_context(tmp_path: Path) -> None:
    folder = write_checkpoint(QWEN3[0], tmp_path)
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 192}
    llm = LLM(
        str(folder),
        rope_scaling=rope,
        max_model_len=384,
        skip_tokenizer_init=True,
        num_kv_blocks=32,
    )
    assert llm.engine.resolved.limits.max_model_len == 384
    ids = [token % VOCAB_SIZE for token in range(300)]
    [output] = llm.generate(
        {"prompt_token_ids": ids},
        SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0),
    )
    theirs = json.loads((folder / "config.json").read_text())
    theirs["rope_parameters"] |= rope
    (folder / "config.json").write_text(json.dumps(theirs))
    logits = oracle_logits(oracle(folder), ids)
    logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    assert output.prompt_logprobs is not None
    own = [next(iter(row.values())).logprob for row in output.prompt_logprobs[1:] if row]
    torch.testing.assert_close(torch.tensor(own), logprobs[:, 0], atol=TOLERANCE, rtol=0)


def test_training_refuses_features_that_depend_on_the_length(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(LLAMA[0], DYNAMIC, tmp_path))
    from slipstream.models.catalogue import read_decoder_config

    with pytest.raises(UsageError, match="rope of the kind dynamic, which depends"):
        require_trainable(checkpoint, read_decoder_config(checkpoint))
