"""Available memory, the memory that steps need, and the resulting size of the KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.core.errors import UsageError
from slipstream.models.decoder_config import DecoderConfig

CPU_CACHE_BYTES = 2 << 30
GPU_MEMORY_UTILIZATION = 0.9

# float32 copies of the target's logits: raw, processed, and a temporary one during sampling.
LOGITS_COPIES = 3
# CUDA graphs of the default buckets, which share one memory pool, without their own logits.
GRAPH_BYTES = 768 << 20
# Split-KV and split-K buffers, libraries' workspaces and fragmentation: with GRAPH_BYTES, what an
# H200 used beyond the other items at 64 requests of Qwen3-8B's geometry.
WORKSPACE_BYTES = 1 << 30
_FLOAT32, _TOKEN_ID = 4, 4
# Per token of the vocabulary, for a request with penalties, logit_bias or allowed_token_ids.
_SAMPLING_STATE = 4 + 1 + 4


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, in bytes.

    Attributes:
        free: bytes that could be allocated now.
        total: bytes of the device.
        is_gpu: whether this is a GPU's own memory.
    """

    free: int
    total: int
    is_gpu: bool

    @property
    def name(self) -> str:
        return "the GPU's memory" if self.is_gpu else "memory"


def device_memory(device: torch.device) -> DeviceMemory:
    if uses_gpu_memory(device):
        torch.cuda.empty_cache()  # count cached blocks of the allocator as free
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(free, total, is_gpu=True)
    return DeviceMemory(_available_bytes(), _meminfo("MemTotal") or 0, is_gpu=False)


def uses_gpu_memory(device: torch.device) -> bool:
    """Whether this device has memory of its own, to which gpu_memory_utilization applies."""
    return device.type == "cuda"


@dataclass(frozen=True)
class StepSizes:
    """The parameters that determine the sizes of the largest step's tensors.

    Attributes:
        network: the target's config.
        itemsize: bytes of an element of its activations.
        max_num_batched_tokens: rows of the largest target pass.
        max_draft_rows: rows per request of the largest pass of a parallel drafter, which may have
            more rows than any target pass; 0 for other drafters.
        max_num_seqs, max_model_len: maximum of requests, and of tokens of each.
        num_speculative_tokens: K.
        draft_probabilities: whether the drafter returns the distributions that it sampled from.
        graphs: whether steps are captured.
        layer_state: bytes of a request's recurrent state, whatever its length; 0 if all caches are
            paged.
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
        """Bytes of all requests' token ids and recurrent layer states."""
        return self.max_num_seqs * (self.max_model_len * _TOKEN_ID + self.layer_state)

    @property
    def most_rows(self) -> int:
        """Rows of the largest pass of the target or the drafter."""
        return max(self.max_num_batched_tokens, self.max_num_seqs * self.max_draft_rows)


@dataclass(frozen=True)
class Item:
    """A use of memory: its name, its bytes, how they are computed, and how to reduce them."""

    name: str
    size: int
    why: str
    remedy: str = ""


def step_items(sizes: StepSizes) -> tuple[Item, ...]:
    """The memory that steps need on a GPU in addition to weights and KV cache."""
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
    """Elements per row of one layer's tensors, which may all be alive at once, and of its input."""
    width = network.hidden_size
    return max(layer.numbers_per_row(width) for layer in network.layers) + 4 * width


def usable_bytes(memory: DeviceMemory, utilization: float | None) -> int:
    """The free bytes of a GPU that may be used within gpu_memory_utilization.

    Args:
        utilization: the usable share of the GPU's total memory; None takes the default.
    """
    share = utilization or GPU_MEMORY_UTILIZATION
    return max(0, memory.free - int(memory.total * (1 - share)))


def default_cache_bytes(
    memory: DeviceMemory, utilization: float | None, reserved: int = 0
) -> tuple[int, str]:
    """The default size of the KV cache in bytes, and the reason for it.

    Args:
        memory: measured after the weights were loaded.
        utilization: the usable share of a GPU's total memory; None takes the default.
        reserved: bytes that steps need on a GPU in addition to weights and cache.
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
    """Raise UsageError if less than `needed` bytes are free, before anything is allocated."""
    if needed > memory.free:
        raise UsageError(
            f"{what} needs {gigabytes(needed)}, but {gigabytes(memory.free)} of {memory.name} are "
            f"free; {remedy}"
        )


def no_room_error(
    memory: DeviceMemory, utilization: float | None, items: Sequence[Item], remedies: Sequence[str]
) -> UsageError:
    """The error for steps that leave no room for a KV cache.

    Args:
        utilization: the usable share of the GPU's total memory; None is the default.
        items: the memory that steps need; remedies of the largest items are named first.
        remedies: further remedies.
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
    memory: DeviceMemory,
    name: str,
    size: int,
    rounded: Callable[[str], int] | None,
    pending: int = 0,
) -> None:
    """Raise UsageError if a model's weights are larger than the free memory.

    Args:
        rounded: gives the bytes with a value of `quantization`; None: they are quantised already.
        pending: bytes of another model that will be loaded afterwards.
    """
    needed = size + pending
    if needed <= memory.free:
        return
    for_target = f" and {gigabytes(pending)} for the target" if pending else ""
    ways = ["a smaller model"]
    for quantization in ("fp8" if memory.is_gpu else "int8", "int4"):
        taken = None if rounded is None else rounded(quantization)
        if taken is not None and taken + pending <= memory.free:
            ways.insert(0, f"quantization={quantization}, which takes {gigabytes(taken)}")
            break
    if memory.is_gpu:
        ways.append("a larger GPU, or device=cpu")
    raise UsageError(
        f"the weights of {name} need {gigabytes(size)}{for_target}, but {gigabytes(memory.free)} "
        f"of {memory.name} are free; what would fit: {', '.join(ways)}"
    )


def gigabytes(size: int) -> str:
    """Format bytes in GB for messages."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e9:.3f} GB"


def _available_bytes() -> int:
    """Bytes that this process could still allocate, by the machine's memory and its cgroup."""
    available = _meminfo("MemAvailable") or 4 * CPU_CACHE_BYTES
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used + _reclaimable("/sys/fs/cgroup")))
    return available


def _reclaimable(group: str) -> int:
    """Bytes of the cgroup's page cache, which count as used but are freed when needed."""
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
    except (OSError, ValueError):  # no cgroup, or no limit ("max")
        return None
