"""One engine in a process: JSON lines that ask it to load a pair and to decode tokens.

The first line is a `Job`; the answer comes when the engine is loaded. Every further line asks for
one run over given prompts; its answer has the seconds, taken inside the process, and the tokens. A
failing run is answered with its error, and the process stays; the end of its input ends it.

Only the standard library is imported, since every engine's environment imports this.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model and settings that an engine is to load.

    Attributes:
        target, draft: GGUF files or directories in the layout of Hugging Face; without a draft,
            plain decoding.
        num_speculative_tokens: K.
        form: "bf16", "int8" or "int4", of all matrices.
        threads: that compute.
        max_batch: prompts that run at once.
        max_tokens: of a prompt and its output.
        work: a folder for converted checkpoints, which later jobs find again.
        options: of one engine alone.
    """

    target: str
    draft: str | None = None
    num_speculative_tokens: int = 0
    form: str = "bf16"
    threads: int
    max_batch: int
    max_tokens: int
    work: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    def text(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Output:
    """The result of a run: tokens of each prompt, and the acceptance length (AL) if known."""

    tokens: list[list[int]]
    al: float | None = None


class Engine(Protocol):
    """A loaded pair.

    Attributes:
        facts: what to know about it, such as versions; any JSON.
    """

    facts: dict[str, Any]

    def generate(self, prompts: Prompts, num_tokens: int) -> Output:
        """Greedy output of exactly `num_tokens` for each prompt, all at once."""


def serve(load: Callable[[Job], Engine], prepare: Callable[[Job], None] | None = None) -> None:
    """Be one engine's process.

    With "prepare" on the command line it only runs `prepare`, which converts checkpoints.
    """
    channel = _only_ours()
    job = Job(**json.loads(sys.stdin.readline()))
    try:
        if "prepare" in sys.argv[1:]:
            if prepare is not None:
                prepare(job)
            _say(channel, {})
            return
        engine = load(job)
    except Exception as error:
        _say(channel, _failure(error))
        sys.exit(1)
    _say(channel, {"facts": engine.facts})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            _say(channel, _run(engine, asked["prompts"], asked["num_tokens"]))
        except Exception as error:
            _say(channel, _failure(error))


def _run(engine: Engine, prompts: Prompts, num_tokens: int) -> dict[str, Any]:
    began = time.perf_counter()
    output = engine.generate(prompts, num_tokens)
    seconds = time.perf_counter() - began
    counts = [len(tokens) for tokens in output.tokens]
    if counts != [num_tokens] * len(prompts):
        raise RuntimeError(f"{num_tokens} tokens were asked for each prompt, but {counts} came")
    return {"seconds": seconds, "peak_bytes": peak_bytes(), **asdict(output)}


def peak_bytes() -> int:
    """The largest resident set that this process had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def _only_ours() -> TextIO:
    """The standard output as it was; whatever else is printed goes to the standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def _say(channel: TextIO, answer: dict[str, Any]) -> None:
    channel.write(json.dumps(answer) + "\n")
    channel.flush()


def _failure(error: Exception) -> dict[str, Any]:
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"}
