"""The number of threads that CPU ops use."""

import logging
import os
from pathlib import Path

import torch

from slipstream.core.errors import UsageError, counted
from slipstream.kernels.registry import use_threads

logger = logging.getLogger("slipstream")

MOST_THREADS = 1024  # more than any machine can use
# Smaller targets fit into a core's cache: their matmuls last microseconds, and threads would spend
# longer waiting for each other, above all if other programs share the cores.
SMALL_MODEL_BYTES = 64 << 20
_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTAS = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu")  # of cgroup v2 and v1


def set_threads(
    device: torch.device,
    dtype: torch.dtype,
    requested: int | None,
    weight_bytes: int,
    num_ranks: int = 1,
) -> tuple[int, str]:
    """Set the thread count of this process; returns the count and the reason for it.

    Args:
        dtype: dtype of the activations.
        requested: the user's choice; None for the default.
        weight_bytes: bytes of the target's weights.
        num_ranks: number of this engine's processes, which share the cores.

    Raises:
        UsageError: more than `MOST_THREADS` are requested.
    """
    count, why = _choose(device, requested, weight_bytes, num_ranks)
    if count > MOST_THREADS:
        raise UsageError(f"{why} asks for {count} threads; the most is {MOST_THREADS}")
    processors = os.cpu_count()
    if processors is not None and count > processors:
        logger.warning(
            "%s asks for %d threads, and this machine has %s: threads that wait for "
            "each other make every step slower.", why, count, counted(processors, "processor"),
        )  # fmt: skip
    use_threads(device, dtype, count)
    return count, why


def _choose(
    device: torch.device, requested: int | None, weight_bytes: int, num_ranks: int
) -> tuple[int, str]:
    if requested is not None:
        return requested, "threads"
    named = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if named.isdigit() and int(named) > 0:
        return int(named), "OMP_NUM_THREADS"
    if device.type == "cpu" and weight_bytes < SMALL_MODEL_BYTES:
        return 1, "so small a model gains nothing from more"
    cores, why = usable_cores()
    if num_ranks == 1 or device.type != "cpu":
        return cores, why
    return max(1, cores // num_ranks), f"{why}, over {num_ranks} ranks"


def usable_cores(
    topology: Path = _TOPOLOGY, quotas: tuple[Path, Path] = _QUOTAS
) -> tuple[int, str]:
    """The number of cores that this process may use, and what limits it.

    Hardware threads of one core count once, since they share its memory bandwidth. A container's
    quota of CPU time limits the number too.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
    else:
        allowed = set(range(os.cpu_count() or 1))
    cores = len({_siblings(topology, one) for one in allowed})
    quota = _quota(*quotas)
    if quota is not None and quota < cores:
        return max(1, int(quota)), "the processor time of this container"
    return cores, "the cores that this process may use"


def _siblings(topology: Path, processor: int) -> str:
    """An identifier of the core that a logical processor belongs to."""
    try:
        path = topology / f"cpu{processor}" / "topology" / "thread_siblings_list"
        return path.read_text().strip()
    except OSError:
        return str(processor)


def _quota(unified: Path, legacy: Path) -> float | None:
    """The cgroup's quota of CPU time, in processors; None if there is no limit."""
    try:
        quota, period = unified.read_text().split()
    except (OSError, ValueError):
        try:
            quota = (legacy / "cpu.cfs_quota_us").read_text().strip()
            period = (legacy / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit():  # "max", or -1
        return None
    return int(quota) / int(period)
