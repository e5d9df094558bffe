"""Keys and values of 8 bits: speculation over them gives what plain decoding over them gives."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.errors import UsageError
from slipstream.kernels.registry import CPU_KERNELS, kernels_for, runs_cpp
from tests.lossless.test_greedy import make_prompts, tokens
from tests.lossless.test_trees import TREES

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def make(target: str, speculative: dict[str, Any] | None, **options: Any) -> LLM:
    # On a GPU such a cache is refused, so the CPU serves these there too.
    options = {"device": "cpu", "num_kv_blocks": 400, "block_size": 8, **options}
    options = {"kv_cache_dtype": "int8", "skip_tokenizer_init": True, **options}
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


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serves the CPU in place of the C++ kernels."""
    with monkeypatch.context() as patch:
        patch.setenv(CPU_KERNELS, "reference")
        runs_cpp.cache_clear()
        kernels_for.cache_clear()
        yield
    runs_cpp.cache_clear()
    kernels_for.cache_clear()


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("tree", [False, True])
def test_e4m3(tree: bool, tiny_target: str, tiny_draft: str, tiny_heads: dict[str, str]) -> None:
    config: dict[str, Any] = {"model": tiny_draft, "num_speculative_tokens": 3}
    if tree:
        config = {"model": tiny_heads["eagle3"], **TREES["static"]}
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "dtype": "float32"}
    prompts = make_prompts(4)
    expected = tokens(make(tiny_target, None, **options).generate(prompts, PARAMS))
    outputs = make(tiny_target, config, **options).generate(prompts, PARAMS)
    assert tokens(outputs) == expected
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0


@pytest.mark.skipif(not runs_cpp(torch.device("cpu")), reason="the C++ kernels are not built")
def test_cpus_have_int8_in_place_of_e4m3(tiny_target: str) -> None:
    with pytest.raises(UsageError, match="kv_cache_dtype=fp8 is for GPUs: take int8"):
        make(tiny_target, None, kv_cache_dtype="fp8")
