"""Engines whose kernels are interpreted say what those say that do without: no number is read that
is not there, whatever views of tensors the engine hands over."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (it is there for Linux only)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("a GPU runs whole engines in tests/gpu", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.kernels import registry
from slipstream.kernels.registry import kernels_for
from slipstream.kernels.triton import attention
from slipstream.kernels.triton.attention_shared_kernel import shared_kernel
from slipstream.runner import graphs, prefix_groups
from slipstream.runner.graphs import GraphRunner
from tests.adapters import write_adapter
from tests.drafters.assistants import write_sliding_target
from tests.kernels.test_triton_attention import Noted
from tests.padded_steps import packed_rows, use_packed_steps, use_padded_steps, use_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]

PROMPT = [5, 17, 40, 5, 17]
SAMPLED = SamplingParams(temperature=1, max_tokens=3, ignore_eos=True, seed=100)


@contextmanager
def triton_serves_the_cpu() -> Iterator[None]:
    """Engines that are built and run in here use the kernels, few programs of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MULTIPROCESSORS", 1)
        patch.setattr(registry, "runs_triton", lambda device: True)
        patch.setattr(registry, "runs_cpp", lambda device: False)
        kernels_for.cache_clear()
        yield
    kernels_for.cache_clear()


def generate(target: str, drafter: str, k: int) -> list[int]:
    """The output of one request that runs alone."""
    llm = LLM(
        target,
        speculative_config={"model": drafter, "num_speculative_tokens": k},
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_model_len=64,
        num_kv_blocks=16,
        dtype="float32",
    )
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], SAMPLED)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("method", "k"),
    [
        ("p-eagle", 8),
        ("eagle3", 3),
        pytest.param("dflash", 7, marks=pytest.mark.full),
        pytest.param("eagle", 3, marks=pytest.mark.full),
    ],
)
def test_one_sampled_request(
    method: str, k: int, tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    expected = generate(tiny_target, tiny_heads[method], k)
    with triton_serves_the_cpu():
        assert kernels_for(torch.device("cpu")).network.backend == "triton"
        assert generate(tiny_target, tiny_heads[method], k) == expected
    assert kernels_for(torch.device("cpu")).network.backend != "triton"
    assert len(expected) == SAMPLED.max_tokens


def test_a_drafter_with_a_window(
    tiny_target: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter sees the first 4 of 25 tokens and the last 8 or more, in steps as if captured."""
    use_padded_steps(monkeypatch)
    monkeypatch.setattr(GraphRunner, "capture_all", lambda *_: None)

    def run() -> tuple[list[int], int]:
        llm = LLM(
            tiny_target,
            speculative_config={
                "model": tiny_draft,
                "num_speculative_tokens": 2,
                "draft_window": 8,
            },
            skip_tokenizer_init=True,
            max_num_seqs=1,
            max_model_len=64,
            num_kv_blocks=16,
            block_size=4,
            dtype="float32",
        )
        (output,) = llm.generate([{"prompt_token_ids": PROMPT * 5}], SAMPLED)
        return list(output.outputs[0].token_ids), output.metrics.num_accepted_tokens

    expected = run()
    with triton_serves_the_cpu():
        assert run() == expected


def test_packed_steps(tiny_target: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that draft different numbers of tokens, in steps as where they are captured."""
    use_packed_steps(monkeypatch)
    monkeypatch.setattr(GraphRunner, "capture_all", lambda *_: None)  # most are never run
    prompts: list[Any] = [{"prompt_token_ids": PROMPT[index:]} for index in range(2)]
    params = [
        replace(
            SAMPLED,
            seed=index,
            temperature=min(index, 1),
            num_speculative_tokens=count,
        )
        for index, count in enumerate((2, 0))
    ]

    def run() -> list[Sequence[int]]:
        llm = LLM(
            tiny_target,
            speculative_config={"model": tiny_draft, "num_speculative_tokens": 2},
            skip_tokenizer_init=True,
            max_num_seqs=2,
            max_model_len=64,
            num_kv_blocks=16,
            dtype="float32",
        )
        outputs = llm.generate(prompts, params)
        assert packed_rows(llm)
        return [output.outputs[0].token_ids for output in outputs]

    expected = run()
    with triton_serves_the_cpu():
        assert run() == expected


def test_one_request_with_an_adapter(
    tiny_target: str, tiny_draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a single request share one number that names its adapter."""
    use_padded_steps(monkeypatch)
    monkeypatch.setattr(GraphRunner, "capture_all", lambda *_: None)
    adapter = LoRARequest("style", 1, write_adapter(tmp_path / "adapter", tiny_target))

    def run() -> list[int]:
        llm = LLM(
            tiny_target,
            speculative_config={"model": tiny_draft, "num_speculative_tokens": 2},
            skip_tokenizer_init=True,
            enable_lora=True,
            max_loras=1,
            max_lora_rank=8,
            max_num_seqs=1,
            max_model_len=64,
            num_kv_blocks=16,
        )
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], SAMPLED, adapter)
        return list(output.outputs[0].token_ids)

    expected = run()
    with triton_serves_the_cpu():
        assert run() == expected


def test_blocks_behind_windows_are_given_back(tmp_path: Path) -> None:
    """Blocks in front of a window of 9 tokens are replaced by the block of zeros."""
    target = write_sliding_target(tmp_path / "target")

    def run() -> list[int]:
        llm = LLM(
            target,
            speculative_config={"method": "ngram", "num_speculative_tokens": 2},
            skip_tokenizer_init=True,
            max_num_seqs=1,
            max_model_len=64,
            num_kv_blocks=16,
            block_size=4,
        )
        assert llm.engine.resolved.num_window_blocks
        (output,) = llm.generate([{"prompt_token_ids": PROMPT * 5}], SAMPLED)
        return list(output.outputs[0].token_ids)

    expected = run()
    with triton_serves_the_cpu():
        assert run() == expected


@pytest.mark.parametrize("steps", [pytest.param("exact", marks=pytest.mark.full), "padded"])
def test_blocks_that_requests_share(
    steps: str, tiny_target: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four requests begin with the same 135 tokens; target and draft read them once."""
    use_steps(steps, monkeypatch)
    monkeypatch.setattr(GraphRunner, "capture_all", lambda *_: None)
    monkeypatch.setattr(graphs, "WANTED_BEFORE_CAPTURE", 2)
    monkeypatch.setattr(prefix_groups, "PIECE", 64)
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 256)
    monkeypatch.setattr(prefix_groups, "LEAST_MEMBERS", 3)
    monkeypatch.setattr(attention, "SHARED_COST", 0)
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(attention, "shared_kernel", Noted(shared_kernel, launched))
    common = PROMPT * 27
    prompts: list[Any] = [
        {"prompt_token_ids": ids} for ids in ([*common, 7], PROMPT, [*common, 9, 8], [*common, 3])
    ]

    def run() -> list[Sequence[int]]:
        llm = LLM(
            tiny_target,
            speculative_config={"model": tiny_draft, "num_speculative_tokens": 2},
            skip_tokenizer_init=True,
            max_num_seqs=4,
            max_model_len=160,
            num_kv_blocks=96,
            block_size=4,
            dtype="float32",
        )
        llm.generate(prompts[:1], replace(SAMPLED, max_tokens=1))
        params = [replace(SAMPLED, seed=it, temperature=it % 2, max_tokens=8) for it in range(4)]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    expected = run()
    with triton_serves_the_cpu():
        assert run() == expected
        assert launched
