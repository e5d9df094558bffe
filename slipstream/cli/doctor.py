"""`slipstream doctor`: this machine, what it can do, which kernels are active, what is missing."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.text import Text

from slipstream import __version__
from slipstream.cli.errors import FAILED
from slipstream.cli.terminal import QUIET_STYLE, stderr_console, stdout_console
from slipstream.core.errors import SlipstreamError, counted
from slipstream.core.flags import flag

# The optional parts: what each is for, and packages without which it is not available.
_EXTRAS = {
    "serve": (
        "slipstream serve",
        ("fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance"),
    ),
    "deploy": ("several replicas", ("ray", "jsonschema")),
    "hub": ("models by their names on the hub", ("huggingface_hub",)),
    "structured": ("JSON, regexes and grammars", ("llguidance",)),
    "train": ("slipstream train", ("matplotlib", "safetensors")),
    "bench": (
        "slipstream bench serve, and data sets",
        ("aiohttp", "matplotlib", "pyarrow", "transformers"),
    ),
}
_NODES = Path("/sys/devices/system/node")
_CPUINFO = Path("/proc/cpuinfo")
_BANDWIDTH_BYTES = 256 << 20  # larger than caches; read in a tenth of a second


@dataclass(frozen=True)
class Processor:
    """The processors of this machine, and how the C++ kernels use them.

    Attributes:
        threads: hardware threads that this process may use.
        cores: cores of those threads; `limit` names what limits them.
        nodes: number of NUMA nodes.
        levels: instruction sets that the C++ kernels could use, lowest first; empty without them.
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
    """Collect the facts; takes about a second, most of it to import torch."""
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
            for extra, (_, names) in _EXTRAS.items()
            if (lacking := tuple(name for name in names if _version(name) is None))
        },
    )


def _read_processor() -> Processor:
    import torch

    from slipstream.kernels.registry import runs_cpp, use_threads
    from slipstream.runner.threads import usable_cores

    (cores, limit), linux = usable_cores(), hasattr(os, "sched_getaffinity")
    levels: tuple[str, ...] = ()
    level = bandwidth = None
    if runs_cpp(torch.device("cpu")):
        import _slipstream_cpu as cpp

        use_threads(torch.device("cpu"), torch.float32, cores)
        levels, level = tuple(cpp.levels()), cpp.level()
        bandwidth = cpp.read_bandwidth(_BANDWIDTH_BYTES)
    return Processor(
        name=processor_name(),
        threads=len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1,
        cores=cores,
        limit=limit,
        nodes=max(1, sum(1 for _ in _NODES.glob("node[0-9]*"))),
        levels=levels,
        level=level,
        bandwidth=bandwidth,
    )


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's model name, or its architecture."""
    try:
        lines = cpuinfo.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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


CPU_BUILD = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """How to report."""

    json: bool = flag(False, "Print one JSON document.")


def doctor(*, flags: DoctorFlags) -> None:
    """Tell what this machine can run, and what is missing.

    It names the active kernels and measures the memory's speed. The bundled demo is
    run as a trial; the exit code is 1 if that fails.
    """
    with stderr_console().status("looking at this machine"):
        machine = read_machine()
        trial, works = _trial()
    advice = list(advise(machine))
    if flags.json:
        document = {"version": __version__, **asdict(machine), "trial": trial, "works": works}
        print(json.dumps({**document, "advice": advice}, ensure_ascii=False, indent=2))
    else:
        console = stdout_console()
        for name, value in {**_rows(machine), "trial": trial}.items():
            console.print(Text.assemble((f"{name:14}", QUIET_STYLE), value), soft_wrap=True)
        for line in advice:
            console.print(f"- {line}", soft_wrap=True)
    if not works:
        raise typer.Exit(FAILED)


def advise(machine: MachineFacts) -> Iterator[str]:
    """Suggestions for this machine, the most important first."""
    from slipstream.runner.capability import LEAST_CAPABILITY

    if machine.processor.level is None:
        yield (
            "without the C++ kernels a CPU is several times slower: install Slipstream from a "
            "wheel, or where there is a C++ compiler (Debian: apt-get install g++ python3-dev)"
        )
    if machine.cuda is not None and not machine.gpus:
        yield (
            f"torch is built for CUDA {machine.cuda}, but no NVIDIA GPU was found. If there "
            "is one, install its driver; if there is none, the build for CPUs saves gigabytes: "
            f"{CPU_BUILD}"
        )
    for gpu in machine.gpus:
        if gpu.capability < LEAST_CAPABILITY:
            yield (
                f"{gpu.name} has compute capability {_dotted(gpu.capability)}; the kernels need "
                f"{_dotted(LEAST_CAPABILITY)} or newer, so use --device cpu"
            )
    if machine.gpus and machine.triton is None:
        yield "without Triton plain torch serves the GPU, slowly: pip install triton"
    if machine.processor.nodes > 1:
        yield (
            f"memory is split into {machine.processor.nodes} NUMA nodes: bind a server on a CPU to "
            "the cores and memory of one (numactl --cpunodebind=0 --membind=0 slipstream serve ...)"
        )
    for extra, packages in machine.missing.items():
        lacking = ", ".join(packages)
        yield (
            f"{_EXTRAS[extra][0]}: lacks {lacking}. To get it: pip install 'slipstream[{extra}]'"
        )


def _rows(machine: MachineFacts) -> dict[str, str]:
    processor = machine.processor
    cores = f"{processor.name}, {counted(processor.cores, 'core')}"
    if processor.threads > processor.cores:
        cores += f" ({counted(processor.threads, 'hardware thread')}; {processor.limit})"
    rows = {
        "slipstream": f"{__version__}, Python {machine.python}",
        "torch": f"{machine.torch}, " + (f"CUDA {machine.cuda}" if machine.cuda else "for CPUs"),
        "processor": cores,
        "memory": f"{_gib(machine.memory)}, {_gib(machine.available_memory)} of it free",
    }
    if processor.level is not None and processor.bandwidth is not None:
        rows["CPU kernels"] = f"{processor.level} (of {', '.join(processor.levels)})"
        rows["memory speed"] = f"{processor.bandwidth / 1e9:.1f} GB/s read by all cores"
    else:
        rows["CPU kernels"] = "plain torch"
    rows["GPU"] = "; ".join(
        f"{gpu.name}, {_gib(gpu.memory)}, compute capability {_dotted(gpu.capability)}"
        for gpu in machine.gpus
    )
    rows["GPU"] = rows["GPU"] or "none"
    rows["default"] = f"models run on {machine.backend}"
    return rows


def _trial() -> tuple[str, bool]:
    """Generate some tokens with the bundled demo and its drafter: a summary, and whether it ran."""
    from slipstream import LLM, SamplingParams
    from slipstream.cli.views import Meter

    try:
        llm = LLM("demo", speculative_config={"model": "demo/draft", "num_speculative_tokens": 4})
        meter = Meter(llm)
        params = SamplingParams(temperature=0.0, max_tokens=64)
        sample = llm.generate(["import "], params)[0].outputs[0]
    except (SlipstreamError, RuntimeError, OSError) as error:
        return f"the demo does not run: {error}", False
    return f"the demo runs: {meter.read(len(sample.token_ids)).summary()}", True


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _gib(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"
