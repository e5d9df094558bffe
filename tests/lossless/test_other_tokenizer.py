"""Drafts of a model with another tokenizer change nothing in what comes out."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from tests.checkpoints import write_qwen3
from tests.lossless.counted_pair import SHAPE, VOCAB
from tests.lossless.test_greedy import make_llm, make_prompts, plain_tokens, tokens
from tests.lossless.test_sampled import (
    LENGTH,
    drawn_from,
    exact_distribution,
    p_value,
)
from tests.padded_steps import use_steps
from tests.pairwise import Case
from tests.tokenizers import write_tokenizer

AXES: dict[str, list[Any]] = {
    "drafter": ["chain", "parallel", "subset"],
    "k": [1, 3, 7, 15],
    "batch": [1, 8],
    "rows": [512, 24],
    "blocks": [400, 16],
    "prefix": [False, True],
    "steps": ["exact", "padded"],
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "chain": {},
    "parallel": {"parallel_drafting": True, "pard_token": 1},
    "subset": {"draft_vocab_size": 40},
}


def write_pair(folder: Path, shared: list[int], **changes: Any) -> tuple[str, str]:
    """A target, and its first layer over `shared` tokens of the target in another order.

    The draft model has tokens of its own at 0 (the unknown one) and 1.
    """
    target = write_qwen3(folder / "target", **changes)
    size = len(shared) + 2
    shape = {**changes, "vocab_size": size}
    draft = write_qwen3(folder / "draft", keep_layers=1, **shape)
    ours, theirs = (load_file(path / "model.safetensors") for path in (target, draft))
    for name in theirs:
        if theirs[name].shape == ours[name].shape:
            theirs[name] = ours[name]
        else:
            theirs[name][2:] = ours[name][shared]
    save_file(theirs, draft / "model.safetensors")
    names = [f"t{index}" for index in range(changes.get("vocab_size", 96))]
    write_tokenizer(target, names)
    write_tokenizer(draft, ["<unk>", "own", *(names[index] for index in shared)])
    return str(target), str(draft)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(tmp_path_factory.mktemp("pair"), [*range(95, 20, -1)])


@pytest.mark.matrix(AXES)
def test_greedy_output_is_the_plain_output(
    case: Case, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    prompts = make_prompts(case["batch"])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = plain_tokens(target, case["batch"], params)
    use_steps(case["steps"], monkeypatch)
    config = {
        "model": draft,
        "num_speculative_tokens": case["k"],
        "use_heterogeneous_vocab": True,
        **DRAFTERS[case["drafter"]],
    }
    llm = make_llm(target, config, case)
    if case["prefix"]:
        llm.generate(prompts, params)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == expected
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0


@pytest.mark.parametrize("drafter", ["chain", "parallel"])
def test_sampled_output_has_the_targets_distribution(drafter: str, tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path, [5, 1, 3, 2], seed=3, logit_scale=0.8, **SHAPE)
    params = {"temperature": 1.0}
    exact = exact_distribution(target, params)
    config = {
        "model": draft,
        "num_speculative_tokens": 2,
        "use_heterogeneous_vocab": True,
        **DRAFTERS[drafter],
    }
    llm = LLM(target, speculative_config=config, skip_tokenizer_init=True, num_kv_blocks=300)
    sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params)
    drawn = drawn_from(llm, sampling, is_drafted=True)
    assert {token for text in drawn for token in text} == set(range(VOCAB))
    for places in ((0, 1), (1, 2), (2, 3)):
        assert p_value(drawn, exact, places) > 0.001, places
