"""What this machine has, and which of it serves: processors, kernels, GPUs, optional packages."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# A package of each optional part: where it is missing, so is the part.
_EXTRAS = {
    "serve": ("fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance"),
    "deploy": ("ray", "jsonschema"),
    "hub": ("huggingface_hub",),
    "structured": ("llguidance",),
    "train": ("matplotlib", "safetensors"),
    "bench": ("aiohttp", "matplotlib", "pyarrow", "transformers"),
}
_NODES = Path("/sys/devices/system/node")
_CPUINFO = Path("/proc/cpuinfo")
_BANDWIDTH_BYTES = 256 << 20  # more than caches hold, and read in a tenth of a second


@dataclass(frozen=True)
class Processor:
    """The processors of this machine, and how the C++ kernels use them.

    Attributes:
        threads: hardware threads that this process may use.
        cores: of those threads; `limit` says what they are limited by.
        nodes: parts of the memory, each near to some of the cores.
        levels: of instructions that the C++ kernels could use, lowest first; empty without them.
        level: the one in use; None without the kernels.
        bandwidth: bytes a second at which the cores read memory; None without the kernels.
    """

    name: str
    threads: int
    cores: int
    limit: str
    nodes: int
    levels: tuple[str, ...]
    level: str | None
    bandwidth: float | None


@dataclass(frozen=True)
class Gpu:
    """One GPU; capability as NVIDIA numbers it, memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class MachineFacts:
    """A machine, and the packages that are installed on it.

    Attributes:
        cuda: the version that torch was built for; None for a build without CUDA.
        backend: the kernels that models run on by default.
        missing: packages that optional parts lack, by the name of the part.
    """

    python: str
    torch: str
    cuda: str | None
    triton: str | None
    processor: Processor
    memory: int
    available_memory: int
    gpus: tuple[Gpu, ...]
    backend: str
    missing: Mapping[str, tuple[str, ...]]


def read_machine() -> MachineFacts:
    """Look at this machine; takes about a second, most of it to import torch."""
    import torch

    from slipstream.cli.checkpoint_facts import kernel_backend
    from slipstream.runner.memory import device_memory

    memory = device_memory(torch.device("cpu"))
    return MachineFacts(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=_version("triton"),
        processor=_read_processor(),
        memory=memory.total,
        available_memory=memory.free,
        gpus=_gpus(),
        backend=kernel_backend(),
        missing={
            extra: lacking
            for extra, names in _EXTRAS.items()
            if (lacking := tuple(name for name in names if _version(name) is None))
        },
    )


def _read_processor() -> Processor:
    import torch

    from slipstream.kernels.registry import runs_cpp, use_threads
    from slipstream.runner.threads import usable_cores

    cores, limit = usable_cores()
    levels: tuple[str, ...] = ()
    level = bandwidth = None
    if runs_cpp(torch.device("cpu")):
        import _slipstream_cpu as cpp

        use_threads(torch.device("cpu"), torch.float32, cores)
        levels, level = tuple(cpp.levels()), cpp.level()
        bandwidth = cpp.read_bandwidth(_BANDWIDTH_BYTES)
    return Processor(
        name=processor_name(),
        threads=_usable_threads(),
        cores=cores,
        limit=limit,
        nodes=max(1, sum(1 for _ in _NODES.glob("node[0-9]*"))),
        levels=levels,
        level=level,
        bandwidth=bandwidth,
    )


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """What the processor calls itself; else its architecture."""
    try:
        lines = cpuinfo.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _usable_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Gpu(one.name, (one.major, one.minor), one.total_memory) for one in found)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
