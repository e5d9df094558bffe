"""Profiles an engine while it serves requests."""

import gzip
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity


class StepProfiler:
    """Records steps from `start` to `stop`, both on the engine's own thread.

    Records stay in memory until `write`: some megabytes per second for a small model.
    """

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = torch.profiler.profile(activities=activities)

    def start(self) -> None:
        """Start recording."""
        self._profiler.start()

    def stop(self) -> None:
        """Stop recording; waits for launched work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()

    def write(self, trace: Path) -> None:
        """Write a trace for Chrome or Perfetto to a file ending in .json.gz; on any thread."""
        plain = trace.with_suffix("")
        self._profiler.export_chrome_trace(str(plain))
        trace.write_bytes(gzip.compress(plain.read_bytes(), compresslevel=3))
        plain.unlink()
