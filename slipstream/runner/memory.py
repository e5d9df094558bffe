"""How much memory there is, what a step takes of it, and what is left for the KV cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.core.errors import UsageError
from slipstream.models.decoder_config import DecoderConfig

CPU_CACHE_BYTES = 2 << 30
GPU_MEMORY_UTILIZATION = 0.9

# float32 copies of the target's logits: as computed, processed, and one while it is sampled from.
LOGITS_COPIES = 3
# Captured graphs of the default buckets, which share one pool, beside logits of their own.
GRAPH_BYTES = 768 << 20
# Splits of long contexts and matmuls, libraries' workspaces, and what the allocator cannot join:
# with GRAPH_BYTES, what an H200 took beyond the other items at 64 requests of Qwen3-8B's geometry.
WORKSPACE_BYTES = 1 << 30
_FLOAT32, _TOKEN_ID = 4, 4
# Of a request that penalties, logit_bias or allowed_token_ids act on, per token of the vocabulary.
_SAMPLING_STATE = 4 + 1 + 4


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device.

    Attributes:
        free: that could be allocated now.
        total: of the device.
        is_gpu: whether they are a GPU's own.
    """

    free: int
    total: int
    is_gpu: bool

    @property
    def name(self) -> str:
        return "the GPU's memory" if self.is_gpu else "memory"


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of `device` as it is now."""
    if uses_gpu_memory(device):
        torch.cuda.empty_cache()  # what is only kept for later allocations is free
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(free, total, is_gpu=True)
    return DeviceMemory(_available_bytes(), _meminfo("MemTotal") or 0, is_gpu=False)


def uses_gpu_memory(device: torch.device) -> bool:
    """Whether a share of a GPU's memory means anything for this device."""
    return device.type == "cuda"


@dataclass(frozen=True)
class StepSizes:
    """What the tensors of the largest step are as large as.

    Attributes:
        network: the target.
        itemsize: bytes of a number of its activations.
        max_num_batched_tokens: rows of the largest target pass.
        max_draft_rows: of a request, in the largest pass of a drafter that gives all its draft
            tokens at once; 0 for others. Such a pass may have more rows than any of the target's.
        max_num_seqs, max_model_len: requests, and the tokens of each.
        num_speculative_tokens: K.
        draft_probabilities: whether the drafter says what it sampled from.
        graphs: whether steps are captured.
        layer_state: bytes that layers keep of each request, however long it is; 0 where all caches
            are paged.
    """

    network: DecoderConfig
    itemsize: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_speculative_tokens: int
    draft_probabilities: bool
    graphs: bool
    max_draft_rows: int = 0
    layer_state: int = 0

    @property
    def request_state(self) -> int:
        """Bytes of the tokens and of the layers' states of all requests."""
        return self.max_num_seqs * (self.max_model_len * _TOKEN_ID + self.layer_state)

    @property
    def most_rows(self) -> int:
        """Rows of the largest pass."""
        return max(self.max_num_batched_tokens, self.max_num_seqs * self.max_draft_rows)


@dataclass(frozen=True)
class Item:
    """Bytes that something takes: its name, how they come about, and what makes them fewer."""

    name: str
    size: int
    why: str
    remedy: str = ""


def step_items(sizes: StepSizes) -> tuple[Item, ...]:
    """What a GPU must hold beside weights and KV cache."""
    vocabulary, requests = sizes.network.vocab_size, sizes.max_num_seqs
    judged = requests * (sizes.num_speculative_tokens + 1)
    logits = LOGITS_COPIES * judged * vocabulary * _FLOAT32
    fewer = f"a smaller max_num_seqs than {requests}"
    items = [
        Item(
            "logits",
            logits,
            f"{LOGITS_COPIES} float32 copies of {judged} rows of {vocabulary} tokens",
            fewer,
        ),
        Item(
            "activations",
            sizes.most_rows * _numbers_per_row(sizes.network) * sizes.itemsize,
            f"of {sizes.most_rows} rows",
            fewer
            if sizes.most_rows > sizes.max_num_batched_tokens
            else f"a smaller max_num_batched_tokens than {sizes.max_num_batched_tokens}",
        ),
        Item(
            "request state",
            sizes.request_state + requests * vocabulary * _SAMPLING_STATE,
            f"of {requests} requests of {sizes.max_model_len} tokens",
            fewer,
        ),
        Item("workspace", WORKSPACE_BYTES, "kernels and libraries, an estimate"),
    ]
    if sizes.draft_probabilities and sizes.num_speculative_tokens:
        drafts = requests * sizes.num_speculative_tokens
        why = f"float32, {drafts} draft tokens over {vocabulary} tokens"
        remedy = f"fewer num_speculative_tokens than {sizes.num_speculative_tokens}"
        size = drafts * vocabulary * _FLOAT32
        items.append(Item("draft probabilities", size, why, remedy))
    if sizes.graphs:
        why = "logits of their own, and an estimate for the rest"
        items.append(Item("graphs", GRAPH_BYTES + logits, why, "enforce_eager"))
    return tuple(items)


def _numbers_per_row(network: DecoderConfig) -> int:
    """Numbers of one layer, whose tensors may all live at once, and of the residual stream."""
    width = network.hidden_size
    return max(layer.numbers_per_row(width) for layer in network.layers) + 4 * width


def usable_bytes(memory: DeviceMemory, utilization: float | None) -> int:
    """What of a GPU's free memory may be taken when only a share of the whole may be.

    Args:
        utilization: the share; None takes the default.
    """
    share = utilization or GPU_MEMORY_UTILIZATION
    return max(0, memory.free - int(memory.total * (1 - share)))


def default_cache_bytes(
    memory: DeviceMemory, utilization: float | None, reserved: int = 0
) -> tuple[int, str]:
    """Bytes for the cache when the user names none, and why.

    Args:
        memory: when the weights are in it.
        utilization: share of a GPU that may be used in all; None takes the default.
        reserved: what steps need of a GPU beside weights and cache.
    """
    if memory.is_gpu:
        share = utilization or GPU_MEMORY_UTILIZATION
        budget = max(0, usable_bytes(memory, utilization) - reserved)
        return budget, f"{share:.0%} of the GPU's memory, less weights and a step's tensors"
    half = memory.free // 2
    if half < CPU_CACHE_BYTES:
        return half, "half of the memory that is available"
    return CPU_CACHE_BYTES, "the default of 2 GiB; kv_cache_memory changes it"


def require_memory(memory: DeviceMemory, needed: int, what: str, remedy: str) -> None:
    """Raise UsageError when `needed` bytes are not there, before anything is allocated."""
    if needed > memory.free:
        raise UsageError(
            f"{what} needs {gigabytes(needed)}, but {gigabytes(memory.free)} of {memory.name} are "
            f"free; {remedy}"
        )


def no_room_error(
    memory: DeviceMemory, utilization: float | None, items: Sequence[Item], remedies: Sequence[str]
) -> UsageError:
    """The error when steps leave no room for a KV cache.

    Args:
        utilization: share of the GPU that may be used in all; None is the default.
        items: what steps take; the largest ones' remedies come first.
        remedies: what else would help.
    """
    largest = sorted(items, key=lambda item: -item.size)
    ways = dict.fromkeys((*remedies, *(item.remedy for item in largest if item.remedy)))
    taken = ", ".join(f"{item.name} {gigabytes(item.size)}" for item in largest)
    share = utilization or GPU_MEMORY_UTILIZATION
    return UsageError(
        f"no room for a KV cache: {gigabytes(memory.free)} of {memory.name} are free beside the "
        f"weights, gpu_memory_utilization={share:g} leaves {gigabytes(usable_bytes(memory, share))}"
        f" of them, and steps need {gigabytes(sum(item.size for item in items))} ({taken}); what "
        f"helps: {', '.join(ways)}"
    )


def require_weights(
    memory: DeviceMemory, name: str, size: int, rounded: Mapping[str, int], pending: int = 0
) -> None:
    """Raise UsageError when a model's weights are larger than what is free.

    Args:
        rounded: what they would take, by `quantization`; nothing when they have one.
        pending: bytes of another model that is to be loaded afterwards.
    """
    needed = size + pending
    if needed <= memory.free:
        return
    beside = f" and {gigabytes(pending)} for the target" if pending else ""
    ways = ["a smaller model"]
    for quantization in ("fp8" if memory.is_gpu else "int8", "int4"):
        taken = rounded.get(quantization)
        if taken is not None and taken + pending <= memory.free:
            ways.insert(0, f"quantization={quantization}, which takes {gigabytes(taken)}")
            break
    if memory.is_gpu:
        ways.append("a larger GPU, or device=cpu")
    raise UsageError(
        f"the weights of {name} need {gigabytes(size)}{beside}, but {gigabytes(memory.free)} of "
        f"{memory.name} are free; what would fit: {', '.join(ways)}"
    )


def gigabytes(size: int) -> str:
    """As it is shown."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e9:.3f} GB"


def _available_bytes() -> int:
    """Memory that this process could still take: the machine's, or its control group's limit."""
    available = _meminfo("MemAvailable") or 4 * CPU_CACHE_BYTES
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used + _reclaimable("/sys/fs/cgroup")))
    return available


def _reclaimable(group: str) -> int:
    """Cached file contents, which count as used and go when memory is needed."""
    try:
        lines = Path(group, "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    cached = ("inactive_file", "active_file")
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in cached)


def _meminfo(key: str) -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    return None


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return None
