"""What a GPU must hold, what is left for the KV cache, and what is said when that is too little."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.geometries import GEOMETRIES
from slipstream import LLM, UsageError
from slipstream.cache.recurrent import RecurrentSpec
from slipstream.cache.spec import CacheLayout
from slipstream.core.config import EngineConfig
from slipstream.engine import sizing
from slipstream.engine.sizing import BlockBytes, Reasons, WeightRoom, size_cache
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.precision import weight_bytes
from slipstream.runner.memory import (
    CPU_CACHE_BYTES,
    GRAPH_BYTES,
    LOGITS_COPIES,
    DeviceMemory,
    StepSizes,
    default_cache_bytes,
    require_memory,
    require_weights,
    step_items,
)

GB = 10**9
H200 = DeviceMemory(free=120 * GB, total=150 * GB, is_gpu=True)
SMALL = DeviceMemory(free=6 * GB, total=8 * GB, is_gpu=True)
CPU_MEMORY = DeviceMemory(free=16 * GB, total=16 * GB, is_gpu=False)
CPU = torch.device("cpu")
PER_BLOCK = 16 * 2 * 36 * 8 * 128 * 2
QWEN3_8B = read_decoder_config(GEOMETRIES["qwen3-8b"])
STEP = StepSizes(
    network=QWEN3_8B,
    itemsize=2,
    max_num_batched_tokens=8192,
    max_num_seqs=64,
    max_model_len=4096,
    num_speculative_tokens=4,
    draft_probabilities=True,
    graphs=True,
)


def sizes(step: StepSizes) -> dict[str, int]:
    return {item.name: item.size for item in step_items(step)}


# What a step takes


def test_a_step_takes_what_its_tensors_take() -> None:
    found = sizes(STEP)
    vocabulary = 151936
    assert found["logits"] == LOGITS_COPIES * 64 * 5 * vocabulary * 4
    assert found["draft probabilities"] == 64 * 4 * vocabulary * 4
    # Queries, keys and values, normed and rotated ones, and the mix; gate, up and their product;
    # the residual stream and what is added to it.
    numbers = 2 * 6144 + 4096 + 3 * 12288 + 4 * 4096
    assert found["activations"] == 8192 * numbers * 2
    assert found["request state"] == 64 * (4096 * 4 + vocabulary * 9)
    assert found["graphs"] == GRAPH_BYTES + found["logits"]


def test_outputs_of_all_experts_of_a_row_live_at_once() -> None:
    network = read_decoder_config(GEOMETRIES["qwen3-30b-a3b"])
    # As above; then gate, up and their product of 8 experts, and their outputs in float32.
    numbers = 2 * 5120 + 4096 + 3 * 8 * 768 + 2 * 8 * 2048 + 4 * 2048
    assert sizes(replace(STEP, network=network))["activations"] == 8192 * numbers * 2


def test_states_of_layers_are_kept_for_every_request() -> None:
    with_states = sizes(replace(STEP, layer_state=2 << 20))
    assert with_states["request state"] - sizes(STEP)["request state"] == 64 * (2 << 20)


def test_what_is_not_used_takes_nothing() -> None:
    plain = sizes(replace(STEP, num_speculative_tokens=0, graphs=False))
    assert "draft probabilities" not in plain
    assert "graphs" not in plain
    assert plain["logits"] == sizes(STEP)["logits"] // 5
    assert "draft probabilities" not in sizes(replace(STEP, draft_probabilities=False))


def test_parallel_drafts_may_take_more_rows_than_the_target() -> None:
    """8,192 rows for the target, and 2K rows a request for the drafter (the mistake of one engine:
    K rows a request beyond the budget, and no room for them)."""
    assert sizes(replace(STEP, max_draft_rows=16)) == sizes(STEP)
    many = sizes(replace(STEP, max_num_seqs=1024, max_draft_rows=16))
    assert many["activations"] == 2 * sizes(STEP)["activations"]
    items = step_items(replace(STEP, max_num_seqs=1024, max_draft_rows=16))
    activations = next(item for item in items if item.name == "activations")
    assert activations.why == "of 16384 rows"
    assert activations.remedy == "a smaller max_num_seqs than 1024"


# What is left for the cache


def test_a_gpu_keeps_back_its_share_and_what_steps_need() -> None:
    budget, why = default_cache_bytes(H200, None, reserved=5 * GB)
    assert budget == pytest.approx(120 * GB - 15 * GB - 5 * GB, abs=2)
    assert "90%" in why
    assert default_cache_bytes(H200, 1.0)[0] == 120 * GB
    assert default_cache_bytes(H200, 0.1)[0] == 0


def test_a_cpu_gives_two_gibibytes_or_half_of_what_there_is() -> None:
    large, small = DeviceMemory(64 * GB, 64 * GB, False), DeviceMemory(GB, 64 * GB, False)
    assert default_cache_bytes(large, None)[0] == CPU_CACHE_BYTES
    assert default_cache_bytes(small, 0.5)[0] == GB // 2


def size(memory: DeviceMemory, **options: Any) -> tuple[int, Reasons]:
    (num_blocks, windowed), reasons = size_both(memory, BlockBytes(PER_BLOCK), STEP, **options)
    assert not windowed
    return num_blocks, reasons


def size_both(
    memory: DeviceMemory, block: BlockBytes, step: StepSizes, **options: Any
) -> tuple[tuple[int, int], Reasons]:
    reasons = Reasons()
    counts = size_cache(EngineConfig(**options), memory, step, block, reasons)
    return (counts.num_blocks, counts.num_window_blocks), reasons


def test_the_pool_is_what_is_left_and_every_number_is_told() -> None:
    num_blocks, reasons = size(H200, max_num_seqs=1000)
    reserved = sum(item.size for item in step_items(STEP))
    assert num_blocks == pytest.approx((105 * GB - reserved) / (16 * 147456), rel=1e-3)
    told = {name: value for name, value, _ in reasons.rows}
    assert {"memory for logits", "memory for activations", "memory for graphs"} <= set(told)
    assert told["memory for logits"] == "0.6 GB"
    assert told["memory for the KV cache"] == f"{num_blocks * 16 * 147456 / 1e9:.1f} GB"


def test_the_pool_is_no_larger_than_requests_can_use() -> None:
    assert size(H200)[0] == 64 * 4096 // 16


# Mamba2 of 24 layers: 64 heads of 64 numbers, each with 128 of a state; x, B and C are convolved.
MAMBA2 = RecurrentSpec(
    (64, 64, 128), window=3, channels=64 * 64 + 2 * 8 * 128, gates=64, dtype=torch.bfloat16
)


@pytest.mark.parametrize("memory", [CPU_MEMORY, H200], ids=["cpu", "gpu"])
def test_a_model_of_states_alone_has_blocks_without_bytes(memory: DeviceMemory) -> None:
    """They count tokens, and half of the memory is for checkpoints."""
    layout = CacheLayout((MAMBA2,) * 24)
    block = BlockBytes.of([layout], 16, STEP.max_model_len)
    assert (block.all, block.checkpoint) == (0, layout.bytes_per_request)
    reasons = Reasons()
    config = EngineConfig(kv_cache_memory=16 * GB)
    counts = size_cache(config, memory, STEP, block, reasons)
    assert counts.num_blocks == 64 * 4096 // 16
    assert counts.num_checkpoints == 8 * GB // layout.bytes_per_request
    few = size_cache(EngineConfig(num_kv_blocks=8), memory, STEP, block, reasons)
    assert (few.num_blocks, few.num_checkpoints > 0) == (8, True)
    many = EngineConfig(num_kv_blocks=8, num_state_checkpoints=10**6)
    with pytest.raises(UsageError, match="lower max_num_seqs, or num_state_checkpoints, which"):
        size_cache(many, memory, STEP, block, reasons)


def test_checkpoints_that_nothing_is_resumed_from_are_refused() -> None:
    states = BlockBytes(PER_BLOCK, checkpoint=GB // 100)
    size_both(CPU_MEMORY, BlockBytes(PER_BLOCK), STEP, num_state_checkpoints=0)
    with pytest.raises(UsageError, match="no layer of this one does; leave it out"):
        size_both(CPU_MEMORY, BlockBytes(PER_BLOCK), STEP, num_state_checkpoints=4)
    with pytest.raises(UsageError, match="enable_prefix_caching=False forbids"):
        size_both(CPU_MEMORY, states, STEP, num_state_checkpoints=4, enable_prefix_caching=False)


# gpt-oss-20b: 12 layers with a window of 128, and 12 that keep all tokens.
HALVES = BlockBytes(kept=16 * 12 * 2048, windowed=16 * 12 * 2048, window=128)
LONG = replace(STEP, max_model_len=131072)


def test_layers_with_a_window_share_blocks_of_their_own() -> None:
    """Enough for all windows at once, never more memory than one table would take."""
    (num_blocks, windowed), reasons = size_both(H200, HALVES, LONG, kv_cache_memory=40 * GB)
    one_table = 40 * GB // HALVES.all
    assert windowed == one_table // 4  # more than the windows of 64 requests
    assert windowed > 64 * (9 + 2) + 8192 // 16
    assert num_blocks > 1.7 * one_table
    size = num_blocks * HALVES.kept + windowed * HALVES.windowed
    assert 40 * GB - HALVES.kept < size <= 40 * GB
    told = {name: value for name, value, _ in reasons.rows}
    assert told["num_window_blocks"] == str(windowed)
    assert told["memory for the KV cache"] == "40.0 GB"


def test_windows_never_leave_fewer_blocks_than_one_table_would() -> None:
    for budget in (16 << 20, 64 << 20, 100 << 20, 10**9):
        (num_blocks, windowed), _ = size_both(CPU_MEMORY, HALVES, LONG, kv_cache_memory=budget)
        one_table = budget // HALVES.all
        assert num_blocks >= one_table
        assert 10 <= windowed <= one_table
        assert num_blocks * HALVES.kept + windowed * HALVES.windowed <= budget


def test_a_cache_below_one_window_is_one_table() -> None:
    budget = 9 * HALVES.all
    assert size_both(CPU_MEMORY, HALVES, LONG, kv_cache_memory=budget)[0] == (9, 0)


def test_where_all_layers_have_a_window_any_length_fits() -> None:
    every = BlockBytes(kept=0, windowed=PER_BLOCK, window=512)
    (num_blocks, windowed), _ = size_both(CPU_MEMORY, every, LONG, kv_cache_memory=GB)
    assert num_blocks == 64 * 131072 // 16
    assert windowed == GB // PER_BLOCK


def test_a_number_of_blocks_is_for_layers_without_a_window() -> None:
    sizes_of = {
        blocks: size_both(H200, HALVES, LONG, num_kv_blocks=blocks)[0]
        for blocks in (4, 100, 40_000)
    }
    assert sizes_of == {4: (4, 10), 100: (100, 100), 40_000: (40_000, 10_000)}


def test_no_room_for_a_cache_says_what_took_it_and_what_helps() -> None:
    full = DeviceMemory(free=4 * GB, total=20 * GB, is_gpu=True)
    with pytest.raises(UsageError) as caught:
        size(full)
    message = str(caught.value)
    assert "no room for a KV cache: 4.0 GB of the GPU's memory are free" in message
    assert "gpu_memory_utilization=0.9 leaves 2.0 GB of them" in message
    assert re.search(r"steps need \d\.\d GB \(graphs 1\.4 GB, activations 1\.1 GB", message)
    for way in ("quantization=fp8", "max_num_batched_tokens than 8192", "max_num_seqs than 64"):
        assert way in message
    assert "num_speculative_tokens than 4" in message
    with pytest.raises(UsageError, match=r"gpu_memory_utilization=0\.1 leaves 0\.000 GB of them"):
        size(H200, gpu_memory_utilization=0.1)
    with pytest.raises(UsageError) as caught:
        size(full, quantization="fp8")
    assert "fp8" not in str(caught.value)


def test_a_cache_that_was_asked_for_must_fit_beside_a_step() -> None:
    with pytest.raises(
        UsageError, match=r"the KV cache \(4\.\d GB of it .*\) needs 12\.\d GB, but"
    ):
        size(SMALL, kv_cache_memory=8 * GB, max_num_seqs=1000)
    with pytest.raises(
        UsageError, match=r"at most \d\d\d blocks fit: lower kv_cache_memory or num"
    ):
        size(SMALL, num_kv_blocks=10_000)


def test_memory_that_is_not_there() -> None:
    with pytest.raises(
        UsageError, match=r"^X needs 7\.0 GB, but 6\.0 GB of the GPU's memory are free; Y$"
    ):
        require_memory(SMALL, 7 * GB, "X", "Y")
    require_memory(SMALL, 6 * GB, "X", "Y")


# Weights


def test_weights_of_a_published_model() -> None:
    """8.19 B parameters, of which 0.62 B are the embedding."""
    assert weight_bytes(QWEN3_8B, torch.bfloat16, None) == pytest.approx(16.38 * GB, rel=1e-2)
    rounded = weight_bytes(QWEN3_8B, torch.bfloat16, "fp8")
    assert rounded == pytest.approx((2 * 0.622 + 7.57) * GB, rel=1e-2)


@pytest.mark.parametrize(
    ("needed", "rounded", "pending", "expected"),
    [
        (16, 9, 0, "need 16.0 GB, but 6.0 GB .* would fit: a smaller model, a larger GPU"),
        (10, 5, 0, "fit: quantization=fp8, which takes 5.0 GB, a smaller model"),
        (10, None, 0, "fit: a smaller model"),
        (
            2,
            1,
            5,
            "of M need 2.0 GB and 5.0 GB for the target, .*: quantization=fp8, which takes 1",
        ),
    ],
)
def test_weights_that_do_not_fit(
    needed: int, rounded: int | None, pending: int, expected: str
) -> None:
    size = (rounded or 0) * GB
    taken = None if rounded is None else {"fp8": size, "int8": 0, "int4": size}.__getitem__
    require_weights(H200, "M", needed * GB, taken, pending * GB)
    with pytest.raises(UsageError, match=expected):
        require_weights(SMALL, "M", needed * GB, taken, pending * GB)


def test_a_cpu_is_told_of_integers_when_weights_do_not_fit() -> None:
    memory = DeviceMemory(free=6 * GB, total=8 * GB, is_gpu=False)
    taken = {"fp8": 5 * GB, "int8": 5 * GB, "int4": 3 * GB}.__getitem__
    with pytest.raises(UsageError, match=r"fit: quantization=int8, which takes 5\.0 GB, a small"):
        require_weights(memory, "M", 10 * GB, taken)
    with pytest.raises(UsageError, match=r"fit: quantization=int4, which takes 3\.0 GB, a small"):
        require_weights(memory, "M", 10 * GB, taken, pending=2 * GB)


def test_models_are_weighed_before_anything_is_loaded(
    tiny_target: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed: list[tuple[int, int]] = []

    def refuse(_: DeviceMemory, __: str, size: int, ___: int | None, pending: int) -> None:
        weighed.append((size, pending))
        if not pending:
            raise UsageError("too large")

    monkeypatch.setattr(sizing, "require_weights", refuse)
    with pytest.raises(UsageError, match="too large"):
        LLM(tiny_target, skip_tokenizer_init=True, speculative_config={"model": tiny_draft})
    (draft, pending), (target, nothing) = weighed
    assert pending == target > draft > 0
    assert nothing == 0


def test_a_room_tells_the_sizes(tiny_target: str) -> None:
    reasons = Reasons()
    WeightRoom(CPU, reasons).check("some-model", 10**6, None)
    assert [row[:2] for row in reasons.rows] == [("weights of some-model", "0.001 GB")]
