"""A draft model with fewer padding ids than the target reads every id of the target."""

from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slipstream import SamplingParams
from tests.checkpoints import write_qwen3
from tests.lossless.test_greedy import make_llm, make_prompts, plain_tokens, tokens
from tests.padded_steps import use_steps
from tests.pairwise import Case
from tests.tokenizers import write_tokenizer

SMALL = 40  # of the target's 96 ids
AXES: dict[str, list[Any]] = {
    "drafter": ["chain", "parallel"],
    "k": [1, 7, "auto"],
    "batch": [1, 8],
    "rows": [512, 24],
    "blocks": [400],
    "prefix": [False],
    "steps": ["exact", "padded"],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and its first layer without the last rows of the vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_qwen3(folder / "target")
    draft = write_qwen3(folder / "draft", keep_layers=1, vocab_size=SMALL)
    ours, theirs = (load_file(path / "model.safetensors") for path in (target, draft))
    cut = {name: ours[name][: len(own)].contiguous() for name, own in theirs.items()}
    save_file(cut, draft / "model.safetensors")
    for path in (target, draft):
        write_tokenizer(path, [f"t{index}" for index in range(SMALL)])
    return str(target), str(draft)


@pytest.mark.matrix(AXES)
def test_greedy_output_is_the_plain_output(
    case: Case, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    prompts = make_prompts(case["batch"])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = plain_tokens(target, case["batch"], params)
    assert any(token >= SMALL for text in expected for token in text)
    use_steps(case["steps"], monkeypatch)
    parallel = {"parallel_drafting": True, "pard_token": 1}
    config = {
        "model": draft,
        "num_speculative_tokens": case["k"],
        **(parallel if case["drafter"] == "parallel" else {}),
    }
    outputs = make_llm(target, config, case).generate(prompts, params)
    assert tokens(outputs) == expected
