"""Two ranks that share a model of any architecture give the text of one, in float32."""

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream import SamplingParams
from tests.lossless.test_greedy import make_prompts, tokens
from tests.models.parity_cases import Case
from tests.models.test_parity import CASES, write_checkpoint
from tests.models.test_quantized_experts import GPT_OSS as GROUPED
from tests.models.test_quantized_experts import fused_mxfp4
from tests.ranks.conftest import Opener

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Each adds a kind of sublayer that ranks share in a way of its own; scripts/test --all runs all.
USUAL = {"Qwen3_5Moe", "GptOss", "Olmo2", "DeepseekV3", "Gemma4", "Phi3"}


def splits(case: Case) -> bool:
    """Whether two ranks can share it."""
    heads = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
    return all(case.changes.get(name, 2) % 2 == 0 for name in heads)


FIRST = {case.architecture: case for case in reversed(CASES) if splits(case)}
ONE_EACH = [
    pytest.param(case, id=str(case), marks=() if name in USUAL else pytest.mark.full)
    for name, case in FIRST.items()
]


@pytest.mark.parametrize("case", ONE_EACH)
def test_two_ranks_give_the_text_of_one(case: Case, tmp_path: Path, ranked: Opener) -> None:
    folder = str(write_checkpoint(replace(case, shard_size=None), tmp_path / "model"))
    prompts = make_prompts(3)
    one = ranked(folder, tensor_parallel_size=1)
    expected = tokens(one.generate(prompts, GREEDY))
    assert max(len(set(text)) for text in expected) > 2  # not all stand still
    two = ranked(folder)
    assert tokens(two.generate(prompts, GREEDY)) == expected


@pytest.mark.full
@pytest.mark.parametrize("case", [it for it in CASES if splits(it)], ids=str)
def test_every_case(case: Case, tmp_path: Path, ranked: Opener) -> None:
    test_two_ranks_give_the_text_of_one(case, tmp_path, ranked)


def test_experts_in_groups_that_two_ranks_cannot_halve(tmp_path: Path, ranked: Opener) -> None:
    """gpt-oss as it is stored, with three groups of 32 columns in each expert."""
    folder = write_checkpoint(GROUPED, tmp_path / "model")
    fused_mxfp4(folder)
    prompts = make_prompts(3)
    texts = [
        tokens(ranked(str(folder), tensor_parallel_size=size).generate(prompts, GREEDY))
        for size in (1, 2)
    ]
    assert texts[0] == texts[1]
    assert max(len(set(text)) for text in texts[0]) > 2
