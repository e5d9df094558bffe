"""Two ranks give the text of one process after images, which the first one reads for both."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from slipstream import LLM, SamplingParams
from tests import image_checkpoints
from tests.checkpoints import write_qwen3
from tests.image_checkpoints import VOCAB_SIZE, images, prompt, with_images, write
from tests.ranks.conftest import Opener

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SIZES = {"max_model_len": 512, "max_num_seqs": 3}


@pytest.mark.parametrize(
    ("family", "drafter", "room"),
    [
        pytest.param(
            "Qwen3VL", "draft_model", {"max_num_batched_tokens": 24}, marks=pytest.mark.full
        ),  # chunks cut images
        ("Qwen3VL", "ngram", {"max_num_batched_tokens": 24, "num_kv_blocks": 24}),  # preemption
        ("Gemma4-E", "suffix", {}),
        pytest.param("Qwen3_5", None, {}, marks=pytest.mark.full),
        pytest.param("Gemma3", "ngram", {}, marks=pytest.mark.full),
        pytest.param("Gemma4", "draft_model", {}, marks=pytest.mark.full),
    ],
)
def test_the_text_is_that_of_one_process(
    family: str, drafter: str | None, room: dict[str, Any], tmp_path: Path, ranked: Opener
) -> None:
    model = str(write(tmp_path / "target", family))
    given = None if drafter is None else {"method": drafter, "num_speculative_tokens": 3}
    if given is not None and drafter == "draft_model":
        given["model"] = str(write_qwen3(tmp_path / "draft", vocab_size=VOCAB_SIZE))
    expected = texts(ranked(model, tensor_parallel_size=1, **SIZES))
    llm = ranked(model, given, **SIZES, **room)
    assert texts(llm) == expected
    assert texts(llm) == expected  # after prefixes of the first time
    assert (llm.engine.scheduler.num_preemptions > 0) == ("num_kv_blocks" in room)


@pytest.mark.full
def test_ranks_that_share_experts_alone_see_images(
    tmp_path: Path, ranked: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
    config = image_checkpoints.gemma4()
    text = {**config.text_config.to_dict(), **experts, "moe_intermediate_size": 24}
    config.text_config = transformers.Gemma4TextConfig(**text)
    monkeypatch.setitem(image_checkpoints._CONFIGS, "Gemma4", lambda: config)
    model = str(write(tmp_path / "target", "Gemma4"))
    expected = texts(ranked(model, tensor_parallel_size=1, **SIZES))
    apart = {"tensor_parallel_size": 1, "rank_check_interval": None, "data_parallel_size": 2}
    drafter = {"method": "ngram", "num_speculative_tokens": 3}
    llm = ranked(model, drafter, enable_expert_parallel=True, **SIZES, **apart)
    assert texts(llm) == expected
    assert texts(llm) == expected  # after prefixes of the first time


def texts(llm: LLM) -> list[list[int]]:
    prompts: list[Any] = [
        with_images(prompt(1), images(1)),
        with_images(prompt(3), images(3)),
        {"prompt_token_ids": [1, 2, 3, 50, 51]},
        with_images(prompt(2, 7), images(2, 1)),
    ]
    return [[*output.outputs[0].token_ids] for output in llm.generate(prompts, GREEDY)]
