"""The sizes of the KV cache and of other memory, and the log of derived values."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.cache.spec import CacheLayout
from slipstream.cache.window_blocks import most_blocks_held
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.models.loading import MemoryCheck, RoundedBytes
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

_LEAST_TOKENS = 512  # minimum capacity of a cache


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

    def check(self, name: str, size: int, rounded: RoundedBytes | None, pending: int = 0) -> None:
        """A `MemoryCheck`, which also notes the size in `Reasons`."""
        require_weights(device_memory(self._device), name, size, rounded, pending)
        self._reasons.add(f"weights of {name}", gigabytes(size), "as they are multiplied by")

    def with_pending(self, pending: int) -> MemoryCheck:
        """The check for a model after which another of `pending` bytes will be loaded."""

        def check(name: str, size: int, rounded: RoundedBytes | None) -> None:
            self.check(name, size, rounded, pending)

        return check


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block: `kept` in layers that keep all tokens, `windowed` in those with a window.

    Attributes:
        window: tokens of the window; 0: no layer has one.
        checkpoint: bytes of a checkpoint of recurrent states; 0: no layer has any.
        interval: blocks of the target that take about as much memory as a checkpoint.
    """

    kept: int
    windowed: int = 0
    window: int = 0
    checkpoint: int = 0
    interval: int = 1

    @classmethod
    def of(cls, layouts: Sequence[CacheLayout], block_size: int, longest: int) -> "BlockBytes":
        """The sizes for the layouts of the target and of a drafter, which keeps all tokens.

        Args:
            longest: tokens of the longest request.
        """
        total = block_size * sum(layout.bytes_per_token for layout in layouts)
        window, checkpoint = layouts[0].window(longest), layouts[0].bytes_per_request
        own = block_size * layouts[0].bytes_per_token
        interval = max(1, -(-checkpoint // own)) if own else 1
        if window is None:
            return cls(total, checkpoint=checkpoint, interval=interval)
        windowed = block_size * layouts[0].windowed_bytes_per_token
        return cls(total - windowed, windowed, window, checkpoint, interval)

    @property
    def all(self) -> int:
        return self.kept + self.windowed


@dataclass(frozen=True)
class CacheCounts:
    """Numbers of cache blocks, of separate blocks for layers with a window, and of checkpoints."""

    num_blocks: int
    num_window_blocks: int = 0
    num_checkpoints: int = 0


def size_cache(
    config: EngineConfig, memory: DeviceMemory, step: StepSizes, block: BlockBytes, reasons: Reasons
) -> CacheCounts:
    """Size the cache to the memory that the largest step leaves free.

    Raises:
        UsageError: the requested cache does not fit, or there is no room for one.
    """
    _require_states(config, block)
    items = _planned(memory, step, reasons)
    reserved = sum(item.size for item in items)
    if config.num_kv_blocks is None:
        counts = _derived(config, memory, step, block, items, reasons)
    else:
        num_blocks = config.num_kv_blocks
        windowed = _window_blocks(config, step, block, num_blocks)
        budget = 2 * num_blocks * block.all
        if not block.all:
            budget, _ = default_cache_bytes(memory, config.gpu_memory_utilization, reserved)
        kept = _checkpoints(config, block, num_blocks, budget)
        counts = CacheCounts(num_blocks, windowed, kept)
    num_blocks, windowed = counts.num_blocks, counts.num_window_blocks
    size = num_blocks * block.all
    if windowed:
        size = num_blocks * block.kept + windowed * block.windowed
        why = f"for layers with a window of {block.window} tokens, whose blocks are given back"
        reasons.add("num_window_blocks", windowed, why)
    states = counts.num_checkpoints * block.checkpoint
    if block.checkpoint:
        why = f"{gigabytes(states)}, as prefixes are resumed from the states of layers"
        reasons.add("num_state_checkpoints", counts.num_checkpoints, why)
    if items:
        reasons.add("memory for the KV cache", gigabytes(size + states), "blocks and checkpoints")
    note = f" ({gigabytes(reserved)} of it for the tensors of a step)" if reserved else ""
    remedy = "lower max_num_seqs"
    if block.all:
        most = max(0, memory.free - reserved - states) // block.all
        remedy = f"at most {most} blocks fit: lower kv_cache_memory or num_kv_blocks"
    if states:
        remedy += f", or num_state_checkpoints, which take {gigabytes(states)}"
    require_memory(memory, size + states + reserved, f"the KV cache{note}", remedy)
    return counts


def _require_states(config: EngineConfig, block: BlockBytes) -> None:
    """Raise UsageError for state checkpoints that would never be used."""
    if not config.num_state_checkpoints:
        return
    if not block.checkpoint:
        raise UsageError(
            f"num_state_checkpoints={config.num_state_checkpoints} is for models that keep a "
            "recurrent state of each request, and no layer of this one does; leave it out"
        )
    if not config.enable_prefix_caching:
        raise UsageError(
            f"num_state_checkpoints={config.num_state_checkpoints} has prefixes resumed, which "
            "enable_prefix_caching=False forbids; leave out one of them"
        )


def _checkpoints(config: EngineConfig, block: BlockBytes, num_blocks: int, budget: int) -> int:
    """Number of state checkpoints: two per running request, as one is written while the previous
    one is kept, and one per `interval` blocks; they take at most half of the budget."""
    if not (block.checkpoint and config.enable_prefix_caching):
        return 0
    if config.num_state_checkpoints is not None:
        return config.num_state_checkpoints
    wanted = 2 * config.max_num_seqs + num_blocks // block.interval
    return min(wanted, budget // 2 // block.checkpoint)


def _window_blocks(
    config: EngineConfig, step: StepSizes, block: BlockBytes, num_blocks: int
) -> int:
    """Number of blocks for layers with a window: enough for the windows of all running requests and
    the rows of a step. At least a quarter of `num_blocks`, so that unused prefixes are kept about
    as long as in other layers; at most `num_blocks`."""
    if not block.window:
        return 0
    size = config.block_size
    in_flight = 2 * (step.num_speculative_tokens + 1)
    running = config.max_num_seqs * most_blocks_held(block.window + in_flight, size)
    running += -(-step.max_num_batched_tokens // size)
    enough = min(num_blocks, max(running, num_blocks // 4))
    return max(enough, most_blocks_held(block.window, size))


def _planned(memory: DeviceMemory, step: StepSizes, reasons: Reasons) -> Sequence[Item]:
    """The memory that a GPU must keep free for steps; on a CPU it is not reserved beforehand."""
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
    block: BlockBytes,
    items: Sequence[Item],
    reasons: Reasons,
) -> CacheCounts:
    """`size_cache` without num_kv_blocks: by the available memory and what requests can use."""
    wanted = config.max_num_seqs * -(-step.max_model_len // config.block_size)
    reserved = sum(item.size for item in items)
    budget, why = default_cache_bytes(memory, config.gpu_memory_utilization, reserved)
    if config.kv_cache_memory is not None:
        budget, why = config.kv_cache_memory, "kv_cache_memory"
    elif memory.is_gpu:
        blocks = -(-min(_LEAST_TOKENS, step.max_model_len) // config.block_size)
        if budget < blocks * block.all:
            remedies = [] if config.quantization else ["quantization=fp8"]
            remedies.append("a larger gpu_memory_utilization")
            raise no_room_error(memory, config.gpu_memory_utilization, items, remedies)
    checkpoints = _checkpoints(config, block, wanted, budget)
    if checkpoints * block.checkpoint + block.all > budget and config.num_state_checkpoints:
        raise UsageError(
            f"num_state_checkpoints ({checkpoints}) take {checkpoints * block.checkpoint} bytes, "
            f"but the cache has {budget} for them and its blocks; lower it, or give the cache more"
        )
    budget -= checkpoints * block.checkpoint
    # As if all layers kept all tokens. If none does, blocks take no memory.
    num_blocks = min(wanted, budget // block.all) if block.all else wanted
    if num_blocks < 1:
        raise UsageError(
            f"kv_cache_memory of {budget} bytes is less than one block of {block.all} bytes; "
            "give it more, or a smaller block_size"
        )
    windowed = _window_blocks(config, step, block, num_blocks)
    if windowed > num_blocks:  # not even one window fits: all layers share the same blocks
        windowed = 0
    if windowed:
        left = budget - windowed * block.windowed
        num_blocks = min(wanted, left // block.kept) if block.kept else wanted
    enough = "as many as max_num_seqs requests of max_model_len can use"
    reasons.add("num_kv_blocks", num_blocks, enough if num_blocks == wanted else why)
    return CacheCounts(num_blocks, windowed, checkpoints)
