"""The benchmark's end of an engine's process."""

import contextlib
import json
import os
import select
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Job, Prompts

_TREE = Path(__file__).parent.parent.parent  # `benchmarks` is imported from its root
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


class PeerError(Exception):
    """An engine failed, or did not answer in time."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One engine of a comparison.

    Attributes:
        name: of its rows.
        module: of `benchmarks.peers`.
        python: the interpreter of its virtual environment.
        environment: what its process needs beside ours.
        converts: it has to convert checkpoints first.
    """

    name: str
    module: str
    python: Path
    job: Job
    environment: dict[str, str]
    converts: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One answered run; `peak_bytes` is the process's largest resident set so far."""

    seconds: float
    tokens: list[list[int]]
    al: float | None
    peak_bytes: int


class Peer:
    """An engine that is loaded, in its process.

    Args:
        log: receives what the process prints.
        timeout: seconds that any answer may take.

    Raises:
        PeerError: it cannot be loaded.

    Attributes:
        ready: seconds from the start of the process until it could be asked.
        facts: what the engine told about itself.
    """

    def __init__(self, entry: Entry, log: Path, timeout: float) -> None:
        self.entry, self._timeout = entry, timeout
        began = time.perf_counter()
        self._process = _start(entry, log, [])
        self.facts: dict[str, Any] = self._ask(entry.job.text())["facts"]
        self.ready = time.perf_counter() - began

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        """Decode; PeerError when the engine cannot."""
        asked = {"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens}
        return Run(**self._ask(json.dumps(asked)))

    def close(self) -> None:
        """End the process."""
        _end(self._process)

    def _ask(self, line: str) -> dict[str, Any]:
        try:
            return _ask(self._process, line, self._timeout)
        except BaseException:
            if self._process.poll() is not None or not hasattr(self, "ready"):
                _end(self._process)
            raise


def prepare(entry: Entry, log: Path, timeout: float) -> None:
    """Have the engine convert its checkpoints; PeerError when it cannot."""
    process = _start(entry, log, ["prepare"])
    try:
        _ask(process, entry.job.text(), timeout)
    finally:
        _end(process)


def _start(entry: Entry, log: Path, arguments: list[str]) -> subprocess.Popen[str]:
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": str(entry.job.threads)}
    if not entry.python.exists():
        raise PeerError(f"there is no {entry.python}")
    with log.open("a") as sink:
        return subprocess.Popen(
            [str(entry.python), "-m", f"benchmarks.peers.{entry.module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            cwd=_TREE,
            env={**os.environ, **_OFFLINE, **threads, **entry.environment},
        )


def _ask(process: subprocess.Popen[str], line: str, timeout: float) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    if process.stdin.closed:
        raise PeerError("the process has ended")
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise PeerError("the process has ended") from error
    # Every answer is one line, and nothing is asked before it came: no line waits in a buffer.
    ready, _, _ = select.select([process.stdout], [], [], timeout)
    if not ready:
        process.kill()
        raise PeerError(f"no answer within {timeout:g} s")
    text = process.stdout.readline()
    if not text:
        raise PeerError(f"the process ended with status {process.wait()}")
    answer: dict[str, Any] = json.loads(text)
    if "error" in answer:
        raise PeerError(answer["error"])
    return answer


def _end(process: subprocess.Popen[str]) -> None:
    """Close its input, which ends it; kill it where that is not enough."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
