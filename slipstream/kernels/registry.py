"""Chooses the backend of a device; no other module does.

A group of ops is an object with a function for each; a backend implements all groups for a kind of
device. `reference` (plain torch) runs on every device and defines the correct results, `cpu` is
C++, and `triton` is for NVIDIA GPUs. Objects that need ops get them as arguments, or ask here once,
when they are built.
"""

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.columns import Columns
from slipstream.kernels.devices import CPP_DTYPES
from slipstream.kernels.inboxes import Inboxes
from slipstream.kernels.ops import Ops
from slipstream.kernels.preparation import PreparationOps
from slipstream.kernels.sampling import SamplingOps

logger = logging.getLogger("slipstream")

# Environment variable: the instruction level of the C++ kernels, or `PLAIN_TORCH` to disable them.
CPU_KERNELS = "SLIPSTREAM_CPU_KERNELS"
PLAIN_TORCH = "reference"


@dataclass(frozen=True)
class Kernels:
    """All ops of a device.

    Attributes:
        network: ops of layers and heads.
        preparation: ops that prepare batches between the models' passes.
        sampling: ops of drafting, verification, and the sampling state.
        gather: all-gather of a few bytes through `Inboxes`, [...] -> [ranks, ...]; it returns None
            if the tensor is too large. None: the backend has no such op.
        splits_heads: a page of the KV cache has all tokens of its first head, then those of the
            next. A core reads one head at a time, fastest where that lies in one piece.
    """

    network: Ops
    preparation: PreparationOps
    sampling: SamplingOps
    gather: Callable[[Tensor, Inboxes], Tensor | None] | None = None
    splits_heads: bool = False


@functools.cache
def kernels_for(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    fp64_noise: bool = False,
) -> Kernels:
    """The fastest ops for `device`.

    Args:
        dtype: dtype of the networks' activations.
        batch_invariant: choose network ops in which a row's bits do not depend on the other rows
            of the batch. The C++ kernels always have this property. The reference does not: torch
            chooses a matmul by its row count.
        fp64_noise: sample with 63-bit noise and float64 logarithms; only the reference does that.

    Raises:
        UsageError: `CPU_KERNELS` names kernels that are unknown or unavailable.
    """
    from slipstream.kernels import reference

    network: Ops = reference.REFERENCE
    preparation, sampling = reference.PREPARATION, reference.SAMPLING
    gather = None
    if runs_cpp(device):
        from slipstream.kernels.cpu import CppOps
        from slipstream.kernels.cpu import preparation as cpu_preparation
        from slipstream.kernels.cpu import sampling as cpu_sampling
        from slipstream.kernels.cpu.interface import require_current

        require_current(importlib.import_module("_slipstream_cpu"))
        preparation, sampling = cpu_preparation.PREPARATION, cpu_sampling.SAMPLING
        if dtype in CPP_DTYPES:
            network = CppOps()
    elif runs_triton(device):
        from slipstream.kernels import triton
        from slipstream.kernels.triton import exchange
        from slipstream.kernels.triton import preparation as triton_preparation
        from slipstream.kernels.triton import sampling as triton_sampling

        network = triton.backend(dtype, batch_invariant)
        preparation, sampling = triton_preparation.PREPARATION, triton_sampling.SAMPLING
        gather = exchange.gather
    sampling = reference.FP64_SAMPLING if fp64_noise else sampling
    return Kernels(network, preparation, sampling, gather, runs_cpp(device))


def sampling_over(columns: Columns, device: torch.device, fp64_noise: bool) -> SamplingOps:
    """Sampling ops for logits with these columns. If ranks split the vocabulary, these are the
    reference's, since no other backend supports that."""
    from slipstream.kernels import reference

    ops = kernels_for(device, fp64_noise=fp64_noise).sampling
    return ops if columns.gather is None else reference.with_columns(columns, ops)


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Whether the Triton kernels serve `device`; logs a warning if they are missing on a GPU."""
    if device.type != "cuda":
        return False
    try:
        importlib.import_module("slipstream.kernels.triton")
    except ImportError as error:
        logger.warning("Triton cannot be imported (%s): plain torch kernels serve the GPU.", error)
        return False
    return True


@functools.cache
def runs_cpp(device: torch.device) -> bool:
    """Whether the C++ kernels serve `device`; logs a warning if they are missing on a CPU.

    Raises:
        UsageError: `CPU_KERNELS` names a level that is unknown or unavailable.
    """
    if device.type != "cpu":
        return False
    level = os.environ.get(CPU_KERNELS, "")
    if level == PLAIN_TORCH:
        return False
    try:
        cpp = importlib.import_module("_slipstream_cpu")
    except ImportError as error:
        if level:
            raise UsageError(
                f"{CPU_KERNELS}={level} needs the C++ kernels, which cannot be imported ({error}); "
                f"install Slipstream where there is a C++ compiler, or set it to {PLAIN_TORCH!r}"
            ) from error
        logger.warning(
            "The C++ kernels cannot be imported (%s): plain torch serves the CPU, several times "
            "slower. Install Slipstream where there is a C++ compiler, or set %s=%s.",
            error, CPU_KERNELS, PLAIN_TORCH,
        )  # fmt: skip
        return False
    if level:
        known = cpp.levels()
        if level not in known:
            raise UsageError(
                f"{CPU_KERNELS}={level}: this machine has {', '.join(known)} (and {PLAIN_TORCH})"
            )
        cpp.set_level(level)
    return True


def use_threads(device: torch.device, dtype: torch.dtype, count: int) -> None:
    """Let ops use `count` threads: the C++ kernels' own ones, and then torch gets only one; or
    torch's, if the C++ kernels do not serve the device and dtype."""
    if runs_cpp(device) and dtype in CPP_DTYPES:
        importlib.import_module("_slipstream_cpu").set_num_threads(count)
        count = 1
    torch.set_num_threads(count)


def threads_in_use() -> int:
    """The number of threads that ops on the CPU use since `use_threads`: torch's, or those of the
    C++ kernels if torch got only one."""
    cpp = sys.modules.get("_slipstream_cpu")
    return max(torch.get_num_threads(), 1 if cpp is None else cpp.num_threads())
