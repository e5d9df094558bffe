"""Mixtures of experts in captured steps, their weights packed: texts are those of eager steps, of
the floats that the weights stand for, of one table for all layers, and of decoding without drafts.

Single ops are compared in tests/kernels, and the families in tests/lossless, on a GPU as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from slipstream import LLM
from slipstream.cache.spec import CacheLayout
from tests.drafters.heads import write_eagle3
from tests.drafters.mtp_heads import write_mtp
from tests.float4_checkpoints import modelopt
from tests.gpu.engines import (
    GREEDY,
    SEEDED,
    SIZES,
    VOCAB_SIZE,
    Engines,
    make_prompts,
    outputs,
    own_seeds,
    tokens,
)
from tests.mixture_checkpoints import with_packed_experts, write_mixture
from tests.models.test_quantized_experts import quantised
from tests.quantized_checkpoints import float8, write_whole

if not torch.cuda.is_available():
    pytest.skip("steps are captured on a GPU only", allow_module_level=True)

K = 3
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "glm4_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
}
FORMATS = {"qwen3_moe": modelopt(), "glm4_moe": float8(block=128)}  # and gpt-oss in MXFP4
INVARIANT: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}


@dataclass(frozen=True)
class Mixture:
    """A target with packed weights and its drafters, and the target with the same numbers."""

    packed: Engines
    whole: str


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mixture]:
    """Checkpoints of mixtures by model_type, each written once."""
    root = tmp_path_factory.mktemp("mixtures")

    @cache
    def made(kind: str) -> Mixture:
        folder, shape = root / kind, SHAPES[kind]
        packed, whole = write_target(folder, kind)
        draft = write_mixture(folder / "draft", kind, keep_layers=2, **shape)
        heads = {"eagle": "", "eagle3": str(write_eagle3(folder / "eagle3", whole, draft_vocab=80))}
        if kind == "glm4_moe":
            heads["mtp"] = str(write_mtp(folder / "mtp", whole, "deepseek"))
        return Mixture(Engines(str(packed), str(draft), heads), str(whole))

    return made


def write_target(folder: Path, kind: str) -> tuple[Path, Path]:
    """(packed, with the same numbers as floats)"""
    if kind == "gpt_oss":
        whole = write_mixture(folder / "whole", kind, **SHAPES[kind])
        return with_packed_experts(folder / "packed", like=whole), whole
    packed = write_mixture(folder / "packed", kind, **SHAPES[kind])
    meant = quantised(packed, FORMATS[kind], lambda name: "proj" in name, {})
    assert any(".experts." in name and "scale" in name for name in stored_names(packed))
    return packed, write_whole(folder / "whole", packed, meant)


def stored_names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("kind", SHAPES)
def test_packed_weights_say_on_a_gpu_what_their_numbers_say_on_a_cpu(
    kind: str, mixtures: Callable[[str], Mixture]
) -> None:
    mixture, prompts = mixtures(kind), make_prompts(6)
    params = replace(GREEDY, logprobs=3)
    reference = LLM(mixture.whole, device="cpu", **SIZES)
    expected = outputs(reference, prompts, params)
    llm = mixture.packed.get("plain")
    assert llm.engine.resolved.captures
    for output, truth in zip(outputs(llm, prompts, params), expected, strict=True):
        ours, theirs = output.outputs[0], truth.outputs[0]
        assert ours.token_ids == theirs.token_ids
        for token, row, expected_row in zip(
            ours.token_ids, ours.logprobs, theirs.logprobs, strict=True
        ):
            assert row[token].logprob == pytest.approx(expected_row[token].logprob, abs=1e-3)


@pytest.mark.parametrize("kind", SHAPES)
def test_packed_weights_say_in_bfloat16_what_their_numbers_say(
    kind: str, mixtures: Callable[[str], Mixture]
) -> None:
    """Prompts are single tokens: in longer ones roundings choose other experts here and there."""
    mixture, prompts = mixtures(kind), [[token] for token in range(1, VOCAB_SIZE, 5)]
    params = replace(GREEDY, logprobs=5, max_tokens=1)
    reference = LLM(mixture.whole, enforce_eager=True, **{**SIZES, "dtype": "bfloat16"})
    expected = outputs(reference, prompts, params)
    said = outputs(mixture.packed.get("plain", **INVARIANT), prompts, params)
    gaps = []
    for output, truth in zip(said, expected, strict=True):
        row, expected_row = output.outputs[0].logprobs[0], truth.outputs[0].logprobs[0]
        (best,) = truth.outputs[0].token_ids
        gaps.append(abs(row[best].logprob - expected_row[best].logprob) if best in row else 9.0)
    assert sorted(gaps)[len(gaps) // 2] < 0.1


@pytest.mark.parametrize(
    ("kind", "drafter"), [("qwen3_moe", "eagle3"), ("gpt_oss", "draft_model"), ("glm4_moe", "mtp")]
)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_replayed_steps_say_what_eager_steps_say(
    params: Any, kind: str, drafter: str, mixtures: Callable[[str], Mixture]
) -> None:
    engines, prompts = mixtures(kind).packed, make_prompts(8)
    own = own_seeds(params, len(prompts))
    eager = engines.get(drafter, K, enforce_eager=True)
    assert not eager.engine.resolved.captures
    expected = tokens(eager, prompts, own)
    replayed = outputs(engines.get(drafter, K), prompts, own)
    assert [list(output.outputs[0].token_ids) for output in replayed] == expected
    assert sum(output.metrics.num_accepted_tokens for output in replayed) > 0
    if params is GREEDY:
        assert tokens(engines.get("plain"), prompts, own) == expected


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        *(("gpt_oss", drafter) for drafter in ("ngram", "draft_model", "eagle3")),
        *(("glm4_moe", drafter) for drafter in ("draft_model", "mtp")),
    ],
)
def test_drafts_change_no_bit_of_bfloat16_where_batches_are_invariant(
    kind: str, drafter: str, mixtures: Callable[[str], Mixture]
) -> None:
    engines, prompts = mixtures(kind).packed, make_prompts(8)
    params = replace(GREEDY, max_tokens=64)
    plain, drafted = engines.get("plain", **INVARIANT), engines.get(drafter, K, **INVARIANT)
    expected = tokens(plain, prompts, params)
    found = outputs(drafted, prompts, params)
    assert [list(output.outputs[0].token_ids) for output in found] == expected
    assert sum(output.metrics.num_accepted_tokens for output in found) > 0
    assert tokens(plain, prompts[:1], params) == expected[:1]


LONG = replace(GREEDY, max_tokens=150, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def long_texts(mixtures: Callable[[str], Mixture]) -> list[list[int]]:
    """The texts of an engine with one block table for all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheLayout, "window", lambda *_: None)
        llm = mixtures("gpt_oss").packed.get("plain", enforce_eager=True)
    assert not llm.engine.resolved.num_window_blocks
    return tokens(llm, make_prompts(8), LONG)


@pytest.mark.parametrize(("drafter", "k"), [("plain", 0), ("draft_model", K), ("eagle3", K)])
def test_long_texts_outlive_the_blocks_behind_windows(
    drafter: str, k: int, long_texts: list[list[int]], mixtures: Callable[[str], Mixture]
) -> None:
    """The prompts are chunked, requests are preempted, and the second run has prefix hits."""
    llm = mixtures("gpt_oss").packed.get(
        drafter, k, max_num_batched_tokens=64, enable_prefix_caching=True, num_kv_blocks=40
    )
    assert llm.engine.resolved.num_window_blocks
    prompts = make_prompts(8)
    said = outputs(llm, prompts, LONG)
    assert [list(output.outputs[0].token_ids) for output in said] == long_texts
    assert sum(output.metrics.num_preemptions for output in said) > 0
    short = replace(LONG, max_tokens=8)
    for _ in range(2):  # the long texts have taken the blocks of the prompts
        said = outputs(llm, prompts, short)
        starts = [text[:8] for text in long_texts]
        assert [list(output.outputs[0].token_ids) for output in said] == starts
    assert sum(output.metrics.num_cached_tokens for output in said) > 0
    llm.engine.scheduler.check_invariants()
