"""The size of the KV cache and of what needs memory beside it, and the log of derived values."""

import logging
from collections.abc import Mapping, Sequence

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.models.loading import MemoryCheck
from slipstream.runner.memory import (
    DeviceMemory,
    Item,
    StepSizes,
    default_cache_bytes,
    device_memory,
    gigabytes,
    no_room_error,
    require_memory,
    require_weights,
    step_items,
)

logger = logging.getLogger("slipstream")

_LEAST_TOKENS = 512  # of a cache that is worth running with


class Reasons:
    """Collects the values that the engine derives and why, for the log and `Resolved.reasons`."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str]] = []

    def add(self, name: str, value: object, why: str) -> None:
        self._rows.append((name, str(value), why))
        logger.info("%s = %s (%s)", name, value, why)

    @property
    def rows(self) -> tuple[tuple[str, str, str], ...]:
        return tuple(self._rows)


class WeightRoom:
    """Checks before a model is loaded whether its weights fit into memory."""

    def __init__(self, device: torch.device, reasons: Reasons) -> None:
        self._device, self._reasons = device, reasons

    def check(self, name: str, size: int, rounded: Mapping[str, int], pending: int = 0) -> None:
        """A `MemoryCheck`, and a note of the size for the user."""
        require_weights(device_memory(self._device), name, size, rounded, pending)
        self._reasons.add(f"weights of {name}", gigabytes(size), "as they are multiplied by")

    def beside(self, pending: int) -> MemoryCheck:
        """The check of a model that another of `pending` bytes is loaded behind."""

        def check(name: str, size: int, rounded: Mapping[str, int]) -> None:
            self.check(name, size, rounded, pending)

        return check


def size_cache(
    config: EngineConfig,
    memory: DeviceMemory,
    step: StepSizes,
    bytes_per_block: int,
    reasons: Reasons,
) -> int:
    """The number of blocks, which fit beside what the largest step needs.

    Raises:
        UsageError: they do not fit, or there is no room for any.
    """
    items = _planned(memory, step, reasons)
    reserved = sum(item.size for item in items)
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        num_blocks = _derived(config, memory, step, bytes_per_block, items, reasons)
    if items:
        reasons.add("memory for the KV cache", gigabytes(num_blocks * bytes_per_block), "blocks")
    beside = f" ({gigabytes(reserved)} of it for the tensors of a step)" if reserved else ""
    most = max(0, memory.free - reserved) // bytes_per_block
    remedy = f"at most {most} blocks fit: lower kv_cache_memory or num_kv_blocks"
    require_memory(memory, num_blocks * bytes_per_block + reserved, f"the KV cache{beside}", remedy)
    return num_blocks


def _planned(memory: DeviceMemory, step: StepSizes, reasons: Reasons) -> Sequence[Item]:
    """The memory that a GPU must keep free for steps; a CPU's is not divided beforehand."""
    if not memory.is_gpu:
        what = "the state of the requests"
        require_memory(memory, step.request_state, what, "lower max_num_seqs")
        return ()
    items = step_items(step)
    for item in items:
        reasons.add(f"memory for {item.name}", gigabytes(item.size), item.why)
    return items


def _derived(
    config: EngineConfig,
    memory: DeviceMemory,
    step: StepSizes,
    bytes_per_block: int,
    items: Sequence[Item],
    reasons: Reasons,
) -> int:
    """From the bytes that the cache may take, and what requests can use of them."""
    wanted = config.max_num_seqs * -(-step.max_model_len // config.block_size)
    reserved = sum(item.size for item in items)
    budget, why = default_cache_bytes(memory, config.gpu_memory_utilization, reserved)
    if config.kv_cache_memory is not None:
        budget, why = config.kv_cache_memory, "kv_cache_memory"
    elif memory.is_gpu:
        blocks = -(-min(_LEAST_TOKENS, step.max_model_len) // config.block_size)
        if budget < blocks * bytes_per_block:
            raise no_room_error(memory, config.gpu_memory_utilization, items, _remedies(config))
    num_blocks = min(wanted, budget // bytes_per_block)
    if num_blocks < 1:
        raise UsageError(
            f"kv_cache_memory of {budget} bytes is less than one block of {bytes_per_block} bytes; "
            "give it more, or a smaller block_size"
        )
    enough = "as many as max_num_seqs requests of max_model_len can use"
    reasons.add("num_kv_blocks", num_blocks, enough if num_blocks == wanted else why)
    return num_blocks


def _remedies(config: EngineConfig) -> list[str]:
    """Remedies that free memory, however large a step is."""
    ways = [] if config.quantization else ["quantization=fp8"]
    return [*ways, "a larger gpu_memory_utilization"]
