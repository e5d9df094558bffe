"""Which backend serves a device: the only place that picks one.

A group of ops is a frozen dataclass of functions with one signature and one meaning; a backend is
an implementation of all groups for a kind of device. `reference` (plain torch) serves every device
and defines what is right, `cpu` is C++, `triton` serves NVIDIA GPUs. Whoever needs ops gets them
handed in, or asks here once, when it is built.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.columns import Columns
from slipstream.kernels.devices import CPP_DTYPES
from slipstream.kernels.inboxes import Inboxes
from slipstream.kernels.preparation import PreparationOps
from slipstream.kernels.sampling import SamplingOps
from slipstream.kernels.table import Ops

logger = logging.getLogger("slipstream")

# Names a level of instructions of the C++ kernels, or plain torch in their place.
CPU_KERNELS = "SLIPSTREAM_CPU_KERNELS"
PLAIN_TORCH = "reference"


@dataclass(frozen=True)
class Kernels:
    """All ops of a device.

    Attributes:
        network: layers and heads.
        preparation: small work between the models' passes.
        sampling: drafting, verification, and the sampling state.
        gather: all-gather of a few bytes through `Inboxes`, [...] -> [ranks, ...], or None for what
            is too much; None: the backend cannot do that.
    """

    network: Ops
    preparation: PreparationOps
    sampling: SamplingOps
    gather: Callable[[Tensor, Inboxes], Tensor | None] | None = None


@functools.cache
def kernels_for(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    fp64_noise: bool = False,
) -> Kernels:
    """The fastest ops that serve `device`.

    Args:
        dtype: of the activations of networks.
        batch_invariant: the fastest of those networks whose rows' bits depend on nothing beside the
            row. Those of the C++ kernels never do. The reference does not promise that: torch picks
            a matmul by its row count.
        fp64_noise: sample with 63-bit noise and float64 logarithms, which the reference alone does.

    Raises:
        UsageError: the environment asks for kernels that are unknown, or not there.
    """
    from slipstream.kernels import reference

    network, preparation, sampling = (
        reference.REFERENCE, reference.PREPARATION, reference.SAMPLING,
    )  # fmt: skip
    gather = None
    if runs_cpp(device):
        from slipstream.kernels.cpu import cpu_backend
        from slipstream.kernels.cpu import preparation as cpu_preparation
        from slipstream.kernels.cpu import sampling as cpu_sampling
        from slipstream.kernels.cpu.interface import require_current

        require_current(importlib.import_module("_slipstream_cpu"))
        preparation, sampling = cpu_preparation.PREPARATION, cpu_sampling.SAMPLING
        if dtype in CPP_DTYPES:
            network = cpu_backend()
    elif runs_triton(device):
        from slipstream.kernels import triton
        from slipstream.kernels.triton import exchange
        from slipstream.kernels.triton import preparation as triton_preparation
        from slipstream.kernels.triton import sampling as triton_sampling

        network = triton.backend(dtype, batch_invariant)
        preparation, sampling = triton_preparation.PREPARATION, triton_sampling.SAMPLING
        gather = exchange.gather
    sampling = reference.FP64_SAMPLING if fp64_noise else sampling
    return Kernels(network, preparation, sampling, gather)


def sampling_over(columns: Columns, device: torch.device, fp64_noise: bool) -> SamplingOps:
    """Ops of sampling where the target's logits have these columns. The reference alone verifies by
    some of all columns."""
    from slipstream.kernels import reference

    ops = kernels_for(device, fp64_noise=fp64_noise).sampling
    return ops if columns.gather is None else reference.over(columns, ops)


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Whether the Triton kernels serve `device`; says so when a GPU has to do without."""
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
    """Whether the C++ kernels serve `device`; says so when a CPU has to do without.

    Raises:
        UsageError: the environment asks for a level that is unknown, or not there.
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
    """Let ops work on `count` threads: the C++ kernels' own, which torch's would only be in the way
    of, or torch's where those do not serve."""
    if runs_cpp(device) and dtype in CPP_DTYPES:
        importlib.import_module("_slipstream_cpu").set_num_threads(count)
        count = 1
    torch.set_num_threads(count)
