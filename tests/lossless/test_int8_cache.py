"""Keys and values of 8 bits: speculation over them gives what plain decoding over them gives."""

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.lossless.test_greedy import make_prompts, tokens
from tests.lossless.test_trees import TREES

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def make(target: str, speculative: dict[str, Any] | None, **options: Any) -> LLM:
    # On a GPU such a cache is refused, so the CPU serves these there too.
    options = {"device": "cpu", "num_kv_blocks": 400, "block_size": 8, **options}
    options |= {"kv_cache_dtype": "int8", "skip_tokenizer_init": True}
    return LLM(target, speculative_config=speculative, **options)


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("draft_model", {"max_num_batched_tokens": 24, "max_num_seqs": 8}),
        ("eagle3", {"num_kv_blocks": 16}),  # requests are preempted
        ("tree", {}),  # what was accepted is moved within the pages
        ("ngram", {"max_num_seqs": 1}),
    ],
)
def test_greedy_output_is_the_plain_output(
    drafter: str,
    options: dict[str, Any],
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
) -> None:
    configs: dict[str, dict[str, Any]] = {
        "draft_model": {"model": tiny_draft, "num_speculative_tokens": 7},
        "eagle3": {"model": tiny_heads["eagle3"], "num_speculative_tokens": 3},
        "tree": {"model": tiny_heads["eagle3"], **TREES["static"]},
        "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    }
    prompts = make_prompts(6)
    expected = tokens(make(tiny_target, None).generate(prompts, PARAMS))
    llm = make(tiny_target, configs[drafter], **options)
    assert tokens(llm.generate(prompts, PARAMS)) == expected
    again = llm.generate(prompts, PARAMS)  # from cached blocks, where some were kept
    assert tokens(again) == expected
    assert sum(output.metrics.num_accepted_tokens for output in again) > 0
