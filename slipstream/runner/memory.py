"""How much memory the KV cache may take."""

from pathlib import Path

import torch

from slipstream.core.errors import UsageError

CPU_CACHE_BYTES = 2 << 30
GPU_MEMORY_UTILIZATION = 0.9
_GPU_RESERVE = 1 << 30  # activations and logits of the largest step


def uses_gpu_memory(device: torch.device) -> bool:
    """Whether a share of a GPU's memory means anything for this device."""
    return device.type == "cuda"


def default_cache_bytes(device: torch.device, utilization: float | None) -> tuple[int, str]:
    """Bytes for the cache when the user names none, and why.

    To be called when the weights are in memory.
    """
    if uses_gpu_memory(device):
        free, total = torch.cuda.mem_get_info(device)
        share = utilization or GPU_MEMORY_UTILIZATION
        budget = free - int(total * (1 - share)) - _GPU_RESERVE
        return max(0, budget), f"{share:.0%} of the GPU's memory, less weights and activations"
    half = _available_bytes() // 2
    if half < CPU_CACHE_BYTES:
        return half, "half of the memory that is available"
    return CPU_CACHE_BYTES, "the default of 2 GiB; kv_cache_memory changes it"


def require_memory(device: torch.device, needed: int, what: str, remedy: str) -> None:
    """Raise UsageError when `needed` bytes are not there, before anything is allocated."""
    free = torch.cuda.mem_get_info(device)[0] if uses_gpu_memory(device) else _available_bytes()
    if needed > free:
        raise UsageError(
            f"{what} needs {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB of memory are free; "
            f"{remedy}"
        )


def _available_bytes() -> int:
    """Memory that this process could still take: the machine's, or its control group's limit."""
    available = _meminfo("MemAvailable") or 4 * CPU_CACHE_BYTES
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


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
