"""How many threads the CPU's ops use."""

import logging
import os
from pathlib import Path

import torch

from slipstream.core.errors import UsageError, counted
from slipstream.kernels.registry import use_threads

logger = logging.getLogger("slipstream")

MOST_THREADS = 1024  # beyond what any machine has a use for
# A target whose weights take less than this is computed from a core's cache: its matmuls last
# microseconds, and threads would spend longer waiting for each other, all the more when other
# programs share the cores.
SMALL_MODEL_BYTES = 64 << 20
_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTAS = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu")  # of version 2, and of 1


def set_threads(
    device: torch.device,
    dtype: torch.dtype,
    requested: int | None,
    weight_bytes: int,
    num_ranks: int = 1,
) -> tuple[int, str]:
    """Fix the thread count of this process; the count and why it is that.

    Args:
        dtype: of the activations.
        requested: the user's wish; None leaves the choice here.
        weight_bytes: of the target.
        num_ranks: processes of this engine, which share the cores.

    Raises:
        UsageError: more are asked for than any machine has a use for.
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
    """Cores that this process may use, and what limits them.

    Hardware threads of one core count once, for they share what a stream of weights needs; a
    container's quota of processor time counts as so many cores.
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
    """A name of the core that a processor belongs to."""
    try:
        path = topology / f"cpu{processor}" / "topology" / "thread_siblings_list"
        return path.read_text().strip()
    except OSError:
        return str(processor)


def _quota(unified: Path, legacy: Path) -> float | None:
    """Processors' worth of time; None for no limit."""
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
