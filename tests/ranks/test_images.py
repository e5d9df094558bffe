"""Two ranks give the text of one process behind images, which the first one reads for both."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.checkpoints import write_qwen3
from tests.image_checkpoints import VOCAB_SIZE, images, prompt, with_images, write
from tests.ranks.conftest import Opener

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SIZES = {"max_model_len": 512, "max_num_seqs": 3}


@pytest.mark.parametrize(
    ("family", "drafter", "room"),
    [
        ("Qwen3VL", "draft_model", {"max_num_batched_tokens": 24}),  # chunks cut images
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
    assert texts(llm) == expected  # behind prefixes of the first time
    assert (llm.engine.scheduler.num_preemptions > 0) == ("num_kv_blocks" in room)


def texts(llm: LLM) -> list[list[int]]:
    prompts: list[Any] = [
        with_images(prompt(1), images(1)),
        with_images(prompt(3), images(3)),
        {"prompt_token_ids": [1, 2, 3, 50, 51]},
        with_images(prompt(2, 7), images(2, 1)),
    ]
    return [[*output.outputs[0].token_ids] for output in llm.generate(prompts, GREEDY)]
