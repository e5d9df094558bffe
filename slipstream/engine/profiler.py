"""The profiler of an engine that runs on: begun and ended between two of its steps."""

import gzip
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity


class StepProfiler:
    """Records steps from `start` to `stop`, both on the engine's own thread.

    What it records is kept in memory, some megabytes a second of a small model, until `write`.
    """

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = torch.profiler.profile(activities=activities)

    def start(self) -> None:
        """Begin."""
        self._profiler.start()

    def stop(self) -> None:
        """End; what was launched is waited for."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()

    def write(self, trace: Path) -> None:
        """A trace for Chrome or Perfetto, into a file that ends in .json.gz; on any thread."""
        plain = trace.with_suffix("")
        self._profiler.export_chrome_trace(str(plain))
        trace.write_bytes(gzip.compress(plain.read_bytes(), compresslevel=3))
        plain.unlink()
