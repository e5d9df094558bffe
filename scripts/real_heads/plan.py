"""What is run: the heads' settings, and commands with time limits, side by side."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HEADS: Final[Mapping[str, Sequence[str]]] = {
    # The vocabulary of a head is drafted over in each of its passes: a quarter of the target's
    # 49,152 tokens covers nearly all of its answers, and takes a quarter of its own head's time.
    "eagle3": (
        *("-k", "4", "--draft-vocab-size", "12288", "--norm-output", "--norm-before-residual"),
        *("--learning-rate", "1.5e-3", "--argmax-weight", "0.5"),
    ),
    "p-eagle": (
        *("-k", "4", "--draft-vocab-size", "12288", "--norm-before-residual", "--share-embedding"),
        *("--num-layers", "3", "--intermediate-size", "768"),
        *("--learning-rate", "1e-3", "--argmax-weight", "0.5"),
    ),
    "dflash": (
        *("-k", "7", "--num-layers", "3", "--intermediate-size", "1024"),
        *("--learning-rate", "1.5e-3", "--argmax-weight", "0.5"),
    ),
    "draft": (
        *("-k", "4", "--num-layers", "2", "--hidden-size", "256", "--intermediate-size", "768"),
        *("--num-heads", "4", "--num-kv-heads", "4", "--head-dim", "64"),
        *("--learning-rate", "2e-3", "--argmax-weight", "0.5"),
    ),
}
"""Flags of `slipstream train` by kind, for SmolLM2-135M."""

BARS: Final = ("eagle3", "p-eagle")
"""Kinds that are trained for the whole time; others share the device for half of it."""

OTHERS: Final = ("none", "ngram", "suffix")
"""What is measured beside the heads."""


@dataclass(frozen=True)
class Clock:
    """Seconds since the start, by which everything must have ended."""

    began: float
    end: float

    @classmethod
    def of_minutes(cls, minutes: float) -> "Clock":
        now = time.monotonic()
        return cls(now, now + 60 * minutes)

    def left(self) -> float:
        return self.end - time.monotonic()

    def say(self, words: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {words}", flush=True)


def start(arguments: Sequence[str], log: Path, threads: int) -> subprocess.Popen[bytes]:
    """A Python process in a session of its own, whose output goes to a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def run(name: str, arguments: Sequence[str], log: Path, until: float, clock: Clock) -> bool:
    """Whether a process came to a good end by a time of the monotonic clock; else it is killed."""
    clock.say(f"{name}: begins")
    process = start(arguments, log, 3)
    try:
        code = process.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        clock.say(f"{name}: out of time; {last_line(log)}")
        return False
    clock.say(f"{name}: {'done' if code == 0 else f'failed ({code})'}; {last_line(log)}")
    return code == 0


def last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines() if log.is_file() else []
    return lines[-1][:300] if lines else "no output"
