"""Capabilities of devices, and the effect of the engine's options on them."""

import platform
from pathlib import Path

import torch

from slipstream.core.errors import UsageError
from slipstream.kernels.attention import FLOAT8_PAGES, INTEGER_PAGES
from slipstream.kernels.devices import CPP_DTYPES, LEAST_FLOAT8_CAPABILITY
from slipstream.kernels.formats.catalogue import kept_on
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.registry import runs_cpp
from slipstream.models.loading import dtype_named
from slipstream.models.precision import PRECISIONS
from slipstream.models.quantized.module import StoredQuantization

LEAST_CAPABILITY = (8, 0)  # compute capability: the kernels need bf16 tensor cores


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device that "auto", "cpu" or "cuda" means here, and why.

    Raises UsageError for a GPU that is not there, or too old for the kernels.
    """
    if name == "cpu":
        return torch.device("cpu"), "device"
    if not torch.cuda.is_available():
        if name == "auto":
            return torch.device("cpu"), "torch sees no GPU"
        built = "" if torch.version.cuda else f": this torch ({torch.__version__}) knows no CUDA"
        raise UsageError(f"device=cuda, but torch sees no GPU{built}; use device=cpu")
    device = torch.device("cuda")
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise UsageError(
            f"{gpu} has compute capability {_shown(capability)}, but the kernels need "
            f"{_shown(LEAST_CAPABILITY)} (Ampere) or newer; use device=cpu"
        )
    return device, f"{gpu}, compute capability {_shown(capability)}"


def device_name(device: torch.device) -> str:
    """The manufacturer's name of a device; measured costs are shared by devices of one name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def require_quantization(device: torch.device, option: str, quantization: str) -> None:
    """Raise UsageError, which names `option`, if the device has no kernels for `quantization`."""
    if device.type != "cuda":
        return
    matrix = PRECISIONS[quantization].matrix
    if not matrix.is_for_gpus:
        raise UsageError(
            f"{option}={quantization} is for CPUs: no kernel for GPUs rounds activations to "
            f"integers; use {option}=int8 or fp8, or device=cpu"
        )
    if matrix.weight.needs_float8:
        _require_float8(device, f"{option}={quantization}")


def resolve_cache_dtype(
    asked: str, dtype: torch.dtype, device: torch.device, option: str
) -> torch.dtype:
    """The dtype of a model's keys and values, where it computes in `dtype`.

    Args:
        asked: one of `CACHE_DTYPES`.
        option: its name in messages.

    Raises:
        UsageError: attention on this device reads no such cache.
    """
    if asked == "auto":
        return dtype
    if asked == "int8":
        if device.type == "cuda":
            raise UsageError(
                f"{option}=int8 is for CPUs so far: take fp8 on a GPU, or give device=cpu"
            )
        return INTEGER_PAGES
    if asked in ("fp8", "fp8_e4m3"):
        if device.type == "cuda":
            _require_float8(device, f"{option}={asked}")
        elif runs_cpp(device):
            raise UsageError(
                f"{option}={asked} is for GPUs: take int8, which takes as many bytes, or leave it "
                "out"
            )
        return FLOAT8_PAGES
    if dtype_named(asked) != dtype:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(
            f"{option}={asked} is not the model's dtype {name}: leave it out, give dtype={asked} "
            "for both, or take int8 (CPUs) or fp8 (GPUs)"
        )
    return dtype


def _require_float8(device: torch.device, what: str) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_FLOAT8_CAPABILITY:
        raise UsageError(
            f"{what} needs compute capability {_shown(LEAST_FLOAT8_CAPABILITY)} (Ada) or newer, "
            f"and {torch.cuda.get_device_name(device)} has {_shown(capability)}; leave it out"
        )


def kept_formats(device: torch.device) -> frozenset[type[Weight]]:
    """The classes of quantised matrices that a device multiplies in stored form."""
    return kept_on(device.type)


def sums_float8(device: torch.device, stored: StoredQuantization) -> bool:
    """Whether the device multiplies a checkpoint's matrices by e4m3 activations."""
    return device.type == "cuda" and Float8Matrix in stored.kinds


def require_stored(device: torch.device, name: str, stored: StoredQuantization) -> None:
    """Raise UsageError if the device has no kernels for a checkpoint's quantised matrices."""
    if device.type != "cuda" or stored.becomes_floats:
        return
    kinds = stored.kinds
    known = kinds <= kept_formats(device) | {DenseMatrix}
    if not known or (Float8Matrix in kinds and not stored.rounds_activations):
        raise UsageError(
            f"{name} is stored as {stored.description}, for which there are no kernels on a GPU; "
            f"use the unquantised checkpoint and quantization=fp8, or device=cpu"
        )
    if any(kind.needs_float8 for kind in kinds):
        _require_float8(device, f"a checkpoint stored as {stored.description}")


def stored_note(device: torch.device) -> str:
    """A note for the user: how a quantised checkpoint's matrices are stored on this device."""
    if device.type == "cuda":
        return (
            "matrices stay as they are where there are kernels for them, or become the model's "
            "dtype; with e4m3 weights that have a scale a row, activations are rounded"
        )
    return (
        "integers and four-bit floats stay; fp8 becomes the model's dtype, or what quantization "
        "names"
    )


def quantization_note(device: torch.device, quantization: str) -> str:
    """A note for the user: how `quantization` is computed on this device."""
    precision = PRECISIONS[quantization]
    note = f"matrices rounded at load time: {precision.words}"
    if precision.matrix.weight in kept_formats(device):
        return note
    return (
        f"{note}; correct but slow on a CPU, which converts them in every pass; int8 takes as many "
        "bytes"
    )


def invariance_note(device: torch.device) -> str:
    """A note for the user: what `batch_invariant` guarantees on this device."""
    if device.type == "cuda":
        return "rows do not depend on other rows, in every matmul; slower"
    return (
        "what the C++ kernels do anyway; without them not promised: torch chooses matmuls by their "
        "row count, so the last bits of a row may depend on other rows"
    )


def default_batched_tokens(device: torch.device) -> tuple[int, str]:
    """The default of max_num_batched_tokens, and the reason for it."""
    if device.type == "cuda":
        return 8192, "a GPU's default"
    return 2048, "a CPU's default: a longer step would hold up the other requests"


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device has kernels for activations of `dtype`; plain torch is slow on a CPU."""
    return device.type == "cuda" or dtype in CPP_DTYPES


def default_dtype(device: torch.device, stored: torch.dtype) -> tuple[torch.dtype, str]:
    """The dtype for a checkpoint in `stored`, and the reason if it is another one."""
    if has_kernels(device, stored):
        return stored, ""
    name = str(stored).removeprefix("torch.")
    return torch.bfloat16, (
        f"the checkpoint's {name} is slow on a CPU, which has no kernels for it; numbers are "
        "rounded, --dtype float32 keeps every bit"
    )


def training_dtype(device: torch.device) -> torch.dtype:
    """The dtype of training: bfloat16 on devices that multiply it faster than float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _shown(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
