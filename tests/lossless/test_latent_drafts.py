"""EAGLE-3 chains and trees for targets with latent attention: the text is plain decoding's.

Trees are verified with a mask among their rows, and the accepted path's latent rows are moved.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams
from tests.drafters.heads import write_eagle3
from tests.lossless.test_greedy import MAX_TOKENS, make_llm, make_prompts, tokens
from tests.mixture_checkpoints import write_mixture
from tests.padded_steps import use_padded_steps

PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]
GROWN = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "num_speculative_tokens": 8}
ROOMY: dict[str, Any] = {"rows": 512, "blocks": 400}
NARROW: dict[str, Any] = {"rows": 24, "blocks": 20}  # chunks, and requests that are preempted
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latent")


@pytest.fixture(scope="module")
def target(folder: Path) -> str:
    return str(write_mixture(folder / "target", "glm4_moe_lite"))


@pytest.fixture(scope="module")
def eagle3(folder: Path, target: str) -> str:
    return str(write_eagle3(folder / "eagle3", target, draft_vocab=80))


@cache
def plain(target: str, sampling: str) -> list[list[int]]:
    outputs = make_llm(target, None, ROOMY).generate(make_prompts(4), SAMPLINGS[sampling])
    return tokens(outputs)


@pytest.mark.parametrize(
    ("shape", "sampling", "case", "padded"),
    [
        ({"num_speculative_tokens": 4}, "greedy", NARROW, False),
        ({"num_speculative_tokens": 4}, "seeded", ROOMY, True),
        ({"speculative_token_tree": PATHS}, "greedy", ROOMY, True),
        ({"speculative_token_tree": PATHS}, "seeded", NARROW, False),
        (GROWN, "greedy", NARROW, True),
    ],
    ids=["chain", "chain-padded", "tree-padded", "tree", "grown-padded"],
)
def test_eagle3_leaves_the_output_as_it_is(
    shape: dict[str, Any],
    sampling: str,
    case: dict[str, Any],
    padded: bool,
    target: str,
    eagle3: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = plain(target, sampling)
    if padded:
        use_padded_steps(monkeypatch)
    llm = make_llm(target, {"model": eagle3, **shape}, case)
    outputs = llm.generate(make_prompts(4), SAMPLINGS[sampling])
    assert tokens(outputs) == expected
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
