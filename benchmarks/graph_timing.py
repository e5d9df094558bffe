"""Time of device work inside a CUDA graph, and what a GPU's memory gives."""

import functools
import statistics
from collections.abc import Callable

import torch

# Bytes per microsecond that kernels read, measured, by words in the device's name.
_READ = {"H100": 3.0e6, "H200": 4.35e6}


@functools.cache
def bytes_per_us() -> float:
    """This GPU's bandwidth for kernels that only read; for unknown GPUs an H200's."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((rate for known, rate in _READ.items() if known in name), _READ["H200"])


def graph_us(
    run: Callable[[], object], calls: int = 1, repeats: int = 9, warm_up: int = 2
) -> float:
    """Microseconds of one of the `calls` that `run` makes, median of `repeats` replays."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for repeat in range(repeats + warm_up):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= warm_up:
            times.append(start.elapsed_time(end))
    return float(statistics.median(times)) / calls * 1e3
