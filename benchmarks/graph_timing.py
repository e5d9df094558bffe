"""Time of device work inside a CUDA graph."""

import statistics
from collections.abc import Callable

import torch


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
