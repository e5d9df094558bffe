"""`slipstream doctor`: what this machine can do, which kernels are active, what is missing."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import typer
from rich.text import Text

from slipstream import __version__
from slipstream.cli.errors import FAILED
from slipstream.cli.machine_facts import MachineFacts, read_machine
from slipstream.cli.terminal import QUIET_STYLE, stderr_console, stdout_console
from slipstream.core.errors import SlipstreamError, counted
from slipstream.core.flags import flag

_PURPOSES = {
    "serve": "slipstream serve",
    "deploy": "several replicas",
    "hub": "models by their names on the hub",
    "structured": "JSON, regexes and grammars",
    "train": "slipstream train",
    "bench": "slipstream bench serve, and data sets",
}
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
    """What could be better, and how to get it; the gravest first."""
    from slipstream.runner.capability import LEAST_CAPABILITY

    if machine.processor.level is None:
        yield (
            "without the C++ kernels a CPU is several times slower: install Slipstream from a "
            "wheel, or where there is a C++ compiler (Debian: apt-get install g++ python3-dev)"
        )
    if machine.cuda is not None and not machine.gpus:
        yield (
            f"torch is a build for CUDA {machine.cuda}, and no NVIDIA GPU is to be seen. If there "
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
            f"memory is in {machine.processor.nodes} parts: on a CPU, bind a server to the cores "
            "and memory of one (numactl --cpunodebind=0 --membind=0 slipstream serve ...)"
        )
    for extra, packages in machine.missing.items():
        lacking = ", ".join(packages)
        yield (f"{_PURPOSES[extra]}: lacks {lacking}. To get it: pip install 'slipstream[{extra}]'")


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
    """A few tokens of the bundled demo, with drafts; how it went, and whether it did."""
    from slipstream import LLM, SamplingParams
    from slipstream.cli.status import Meter

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
