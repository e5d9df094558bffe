"""How many threads torch's CPU ops use."""

import os

import torch

# A target whose weights take less than this is computed from a core's cache: its matmuls last
# microseconds, and threads would spend longer waiting for each other, all the more when other
# programs share the cores.
SMALL_MODEL_BYTES = 64 << 20


def set_threads(device: torch.device, requested: int | None, weight_bytes: int) -> tuple[int, str]:
    """Fix the thread count of this process; the count and why it is that.

    Args:
        requested: the user's wish; None leaves the choice here.
        weight_bytes: of the target.
    """
    if requested is not None:
        torch.set_num_threads(requested)
        return requested, "threads"
    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads(), "OMP_NUM_THREADS"
    if device.type == "cpu" and weight_bytes < SMALL_MODEL_BYTES:
        torch.set_num_threads(1)
        return 1, "so small a model gains nothing from more"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(cores or 1)
    return cores or 1, "the cores that this process may use"
