"""Derived numbers, each with its reason; what cannot be is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, UsageError
from slipstream.kernels.registry import threads_in_use, use_threads
from slipstream.runner.capability import resolve_cache_dtype
from slipstream.runner.threads import set_threads, usable_cores
from tests.checkpoints import write_qwen3

CPU = torch.device("cpu")


def make(target: str, **options: Any) -> LLM:
    return LLM(target, skip_tokenizer_init=True, **options)


def reason(llm: LLM, name: str) -> tuple[str, str]:
    return next((value, why) for key, value, why in llm.engine.resolved.reasons if key == name)


def test_the_cache_is_no_larger_than_the_requests_can_use(tiny_target: str) -> None:
    llm = make(tiny_target, max_num_seqs=4)
    assert llm.engine.resolved.num_blocks == 4 * 256 // 16
    assert "can use" in reason(llm, "num_kv_blocks")[1]


def test_the_cache_keeps_to_its_memory(tiny_target: str, tiny_draft: str) -> None:
    per_token = 4 * 2 * 2 * 16  # float32, keys and values, 2 heads of 16
    config = {"model": tiny_draft}
    llm = make(tiny_target, speculative_config=config, kv_cache_memory=16 * per_token * 3 * 10)
    assert llm.engine.resolved.bytes_per_block == 16 * per_token * 3  # 2 + 1 layers
    assert llm.engine.resolved.num_blocks == 10


def test_int8_keys_and_values_take_a_byte_a_number_and_a_scale(
    tiny_target: str, tiny_draft: str
) -> None:
    llm = make(tiny_target, kv_cache_dtype="int8", num_kv_blocks=8)
    assert llm.engine.resolved.cache_dtype == torch.int8
    assert llm.engine.resolved.bytes_per_block == 16 * 2 * 2 * 2 * (16 + 4)  # 2 layers
    assert llm.engine.resolved.dtype == torch.float32
    config = {"model": tiny_draft}  # whose own cache stays in its dtype
    llm = make(tiny_target, kv_cache_dtype="int8", num_kv_blocks=8, speculative_config=config)
    assert llm.engine.resolved.bytes_per_block == 16 * 2 * 2 * (2 * (16 + 4) + 4 * 16)


def test_a_cache_in_the_models_own_dtype_may_be_named(tiny_target: str) -> None:
    llm = make(tiny_target, kv_cache_dtype="float32", num_kv_blocks=8)
    assert llm.engine.resolved.cache_dtype == torch.float32
    with pytest.raises(UsageError, match="for CPUs so far: take fp8 on a GPU"):
        resolve_cache_dtype("int8", torch.float32, torch.device("cuda"), "kv_cache_dtype")


def test_a_derived_max_model_len_shrinks_to_the_cache(tiny_target: str) -> None:
    assert make(tiny_target, num_kv_blocks=5).engine.resolved.limits.max_model_len == 80
    llm = make(tiny_target, num_kv_blocks=5, max_model_len=200)
    assert llm.engine.resolved.limits.max_model_len == 200
    with pytest.raises(UsageError, match=r"needs 7 blocks .* has 5 blocks for 80 tokens"):
        llm.generate({"prompt_token_ids": [1] * 90})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_model_len": 257}, "more than the 256 positions"),
    ({"max_model_len": 1}, "max_model_len must be an integer of at least 2"),
    ({"max_num_seqs": 0}, "max_num_seqs must be"),
    ({"block_size": 2.5}, "block_size must be"),
    ({"threads": 0}, "threads must be"),
    ({"kv_cache_memory": 1}, "less than one block"),
    ({"kv_cache_memory": 1 << 20, "num_kv_blocks": 4}, "not both"),
    ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "must be at least max_num_seqs"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size must be"),
    ({"dtype": "int8"}, "dtype must be one of"),
    ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of auto, int8"),
    ({"kv_cache_dtype": "bfloat16"}, "not the model's dtype float32: .* dtype=bfloat16 for both"),
    ({"device": "tpu"}, "device must be one of"),
    ({"load_format": "gguf"}, "load_format must be one of"),
    (
        {"quantization": "int3"},
        "must be fp8, int8, .* mxfp4 or nvfp4, or be left out .* not 'int3'",
    ),
    ({"batch_invariant": "yes"}, "batch_invariant must be true or false"),
    ({"gpu_memory_utilization": 1.5}, "above 0 and at most 1"),
    ({"max_tokens": 5}, "unknown option max_tokens; LLM takes"),
    ({"num_gpu_blocks_override": 9}, "LLM calls num_gpu_blocks_override num_kv_blocks"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], message: str, tiny_target: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make(tiny_target, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tiny_target: str) -> None:
    with pytest.raises(UsageError, match=r"no GPU.*; use device=cpu"):
        make(tiny_target, device="cuda")


def test_flags_of_other_engines_are_told_their_effect(tiny_target: str) -> None:
    llm = make(
        tiny_target,
        enforce_eager=True,
        async_scheduling=True,
        trust_remote_code=True,
        gpu_memory_utilization=0.8,
        device="cpu",
        num_kv_blocks=8,
    )
    told = {name for name, _, _ in llm.engine.resolved.reasons}
    assert {
        "enforce_eager",
        "async_scheduling",
        "trust_remote_code",
        "gpu_memory_utilization",
    } <= told


def test_what_precision_means_here_is_told(tiny_target: str, tiny_draft: str) -> None:
    llm = make(
        tiny_target,
        device="cpu",
        num_kv_blocks=8,
        quantization="fp8",
        speculative_config={"model": tiny_draft, "quantization": "fp8"},
    )
    for name in ("quantization", "drafter quantization"):
        assert reason(llm, name)[0] == "fp8"
        assert "slow on a CPU" in reason(llm, name)[1]
    llm = make(tiny_target, device="cpu", num_kv_blocks=8, batch_invariant=True)
    assert "not promised" in reason(llm, "batch_invariant")[1]


def test_sums_of_e4m3_are_not_said_to_be_invariant(tiny_target: str) -> None:
    with pytest.raises(UsageError, match="leave out batch_invariant or quantization"):
        make(tiny_target, num_kv_blocks=8, quantization="fp8", batch_invariant=True)


def test_the_rows_of_a_step_follow_the_device_and_the_requests(tiny_target: str) -> None:
    llm = make(tiny_target, device="cpu", num_kv_blocks=8)
    assert llm.engine.resolved.limits.max_num_batched_tokens == 2048
    assert "CPU" in reason(llm, "max_num_batched_tokens")[1]
    llm = make(tiny_target, device="cpu", num_kv_blocks=8, max_num_seqs=3000)
    assert llm.engine.resolved.limits.max_num_batched_tokens == 3000
    llm = make(tiny_target, device="cpu", num_kv_blocks=8, max_num_batched_tokens=100)
    assert llm.engine.resolved.limits.max_num_batched_tokens == 100


def test_float16_becomes_bfloat16_on_a_cpu_unless_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = str(write_qwen3(tmp_path / "target", dtype="float16"))
    llm = make(target, device="cpu", num_kv_blocks=8)
    assert llm.engine.resolved.dtype == torch.bfloat16
    value, why = reason(llm, "dtype")
    assert value == "bfloat16"
    assert "float16 is slow on a CPU" in why
    assert "--dtype float32 keeps every bit" in why
    assert not caplog.records
    llm = make(target, device="cpu", num_kv_blocks=8, dtype="half")
    assert llm.engine.resolved.dtype == torch.float16
    (warning,) = caplog.records
    assert warning.getMessage().startswith("dtype half is slow on a CPU")


def test_threads_follow_the_model_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        half = torch.float16  # which plain torch serves
        assert set_threads(CPU, half, None, 1 << 20)[0] == 1
        cores, _ = set_threads(CPU, half, None, 1 << 30)
        assert cores >= 1
        assert set_threads(CPU, half, None, 1 << 30, 2)[0] == max(1, cores // 2)
        assert set_threads(CPU, half, None, 1 << 30, 999)[0] == 1
        assert set_threads(CPU, half, 2, 1 << 20)[0] == torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
        assert set_threads(CPU, half, None, 1 << 20) == (2, "OMP_NUM_THREADS")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_threads_are_counted_whoever_has_them(dtype: torch.dtype) -> None:
    """Torch and the C++ kernels, which leave torch only one."""
    before = threads_in_use()
    try:
        use_threads(CPU, dtype, 2)
        assert threads_in_use() == 2
        use_threads(CPU, dtype, 1)
        assert threads_in_use() == 1
    finally:
        use_threads(CPU, torch.float32, before)


def test_threads_without_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    with pytest.raises(UsageError, match="threads asks for 99999999999 threads; the most is 1024"):
        set_threads(CPU, torch.float16, 99999999999, 1 << 20)
    monkeypatch.setenv("OMP_NUM_THREADS", "1025")
    with pytest.raises(UsageError, match="OMP_NUM_THREADS asks for 1025 threads"):
        set_threads(CPU, torch.float16, None, 1 << 20)
    assert torch.get_num_threads() == before


def test_more_threads_than_processors_get_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    try:
        set_threads(CPU, torch.float16, 1, 1 << 20)
        assert not caplog.records
        set_threads(CPU, torch.float16, 2, 1 << 20)
    finally:
        torch.set_num_threads(before)
    assert "asks for 2 threads, and this machine has 1 processor:" in caplog.text


def test_dummy_weights_need_a_config_alone(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    llm = make(str(folder), load_format="dummy", num_kv_blocks=8)
    assert len(llm.generate({"prompt_token_ids": [1, 2]})[0].outputs[0].token_ids) > 0


def test_kernels_of_our_own_have_the_threads_and_torch_one(tiny_target: str) -> None:
    cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")
    before, ours = torch.get_num_threads(), cpp.num_threads()
    try:
        assert set_threads(CPU, torch.bfloat16, 3, 1 << 20) == (3, "threads")
        assert (cpp.num_threads(), torch.get_num_threads()) == (3, 1)
    finally:
        torch.set_num_threads(before)
        cpp.set_num_threads(ours)


def test_a_core_counts_once_and_a_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 9}, raising=False)
    for processor in range(4):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0,2\n" if processor % 2 == 0 else "1,3\n")
    unified, legacy = tmp_path / "cpu.max", tmp_path / "cpu"
    assert usable_cores(tmp_path, (unified, legacy))[0] == 3  # 0 and 2, 1 and 3, 9
    legacy.mkdir()
    (legacy / "cpu.cfs_quota_us").write_text("-1\n")
    (legacy / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path, (unified, legacy))[0] == 3
    (legacy / "cpu.cfs_quota_us").write_text("250000\n")
    assert usable_cores(tmp_path, (unified, legacy)) == (
        2,
        "the processor time of this container",
    )
    unified.write_text("50000 100000\n")
    assert usable_cores(tmp_path, (unified, legacy))[0] == 1
    unified.write_text("max 100000\n")
    assert usable_cores(tmp_path, (unified, legacy))[0] == 3


@pytest.mark.parametrize("option", ["max_loras", "max_lora_rank"])
def test_slots_for_adapters_without_adapters_are_refused(tiny_target: str, option: str) -> None:
    with pytest.raises(UsageError, match=rf"{option}.* enable_lora"):
        make(tiny_target, **{option: 2})
