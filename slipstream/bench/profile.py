"""Where a step's time goes: a trace for Chrome or Perfetto, and sums by part and kind of work."""

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.bench.workload import PARTS, Workload
from slipstream.engine.step import PART_LABELS

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

Times = dict[str, dict[str, float]]
# Kinds of events in a trace.
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cpu_op", "user_annotation")

# Groups of ops and kernels by their names; the first match counts.
_GROUPS: Mapping[str, re.Pattern[str]] = {
    group: re.compile(pattern, re.IGNORECASE)
    for group, pattern in {
        "attention": r"attention|attend|sdpa|flash|(chunk|short|shared|combine)_kernel|fmha",
        "matmul": r"mm\b|bmm|matmul|linear|gemm|gemv|cutlass|nvjet|splitk|dot\b|resident_kernel"
        r"|stream_kernel|mkldnn",
        "sampling, verification": r"race|accept|verdict|scan_kernel|threshold|argmax|argmin|topk"
        r"|sort|multinomial|philox|choice|exponential|cumsum|softmax|log_|bitwise|logsumexp",
        "norm, rotation, activation": r"norm|rsqrt|rotate|rope|silu|gated|gelu|sigmoid|round_kernel"
        r"|mean|pow",
        "preparation": r"expand_kernel|commit_kernel|advance_kernel|keep_path|lookup|timestamp",
        "copies, indexing": r"copy|memcpy|memset|index|gather|scatter|cat\b|stack|fill|zero|empty"
        r"|select|slice|to\b|clone|arange|where|view|reshape|expand|transpose|embedding|masked"
        r"|narrow|split|unsqueeze|squeeze|permute|as_strided|item|local_scalar|lift|tensor",
    }.items()
}
OTHER = "other"
GROUPS = (*_GROUPS, OTHER)
_STAMP = "timestamp_kernel"


@dataclass(frozen=True)
class Profile:
    """Milliseconds by part of the step and group of ops.

    Attributes:
        steps: how many were profiled.
        on_device: whether these are kernels of an accelerator (else ops on the host).
        wall_ms: of the steps by the engine's clock, by part.
    """

    times: Times
    steps: int
    on_device: bool
    wall_ms: Mapping[str, float]
    trace: Path


@lru_cache(maxsize=4096)
def group_of(name: str) -> str:
    """The kind of work that an op or kernel of this name does."""
    return next((group for group, names in _GROUPS.items() if names.search(name)), OTHER)


def profile(llm: "LLM", workload: Workload, steps: int, trace: Path) -> Profile:
    """Profile some steps of the workload and write their trace.

    Run this apart from measurements: the profiler slows steps down. `trace` ends in .json.gz.
    """
    import torch
    from torch.profiler import ProfilerActivity

    has_device = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * has_device
    before, first = llm.metrics.seconds, llm.metrics.num_steps
    with (
        torch.profiler.profile(activities=activities) as profiler,
        closing(workload.stream(llm)) as outputs,  # type: ignore[type-var]
    ):
        for _ in outputs:
            if llm.metrics.num_steps - first >= steps:
                break
        if has_device:
            torch.cuda.synchronize()
    after = llm.metrics.seconds
    plain = trace.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    data = plain.read_bytes()
    trace.write_bytes(gzip.compress(data, compresslevel=3))  # several times faster than by torch
    plain.unlink()
    on_device, times = read_trace(json.loads(data)["traceEvents"])
    return Profile(
        times=times,
        steps=llm.metrics.num_steps - first,
        on_device=on_device,
        wall_ms={part: (after[part] - before[part]) * 1e3 for part in PARTS},
        trace=trace,
    )


def read_trace(events: Iterable[Mapping[str, Any]]) -> tuple[bool, Times]:
    """(on_device, milliseconds by part and group): of the accelerator's kernels if there are any,
    else of the host's ops."""
    listed = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in listed if event.get("cat") in _ON_DEVICE]
    if kernels:
        return True, _by_stamp(kernels)
    return False, _by_range([event for event in listed if event.get("cat") in _ON_HOST])


def _empty() -> Times:
    return {part: dict.fromkeys(GROUPS, 0.0) for part in PARTS}


def _by_range(events: Iterable[Mapping[str, Any]]) -> Times:
    """Each op's own time, without nested ops, by the range of the step that it lies in."""
    times = _empty()
    threads: dict[Any, list[tuple[float, str, str]]] = {}  # open events: end, part, group
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        name, begin, length = event["name"], event["ts"], event["dur"] / 1e3
        outer = threads.setdefault(event["tid"], [])
        while outer and outer[-1][0] <= begin:
            outer.pop()
        part = outer[-1][1] if outer else "rest"
        is_range = name in PART_LABELS
        if outer and outer[-1][2]:
            times[part][outer[-1][2]] -= length
        if is_range:
            outer.append((begin + event["dur"], PART_LABELS[name], ""))
        else:
            times[part][group_of(name)] += length
            outer.append((begin + event["dur"], part, group_of(name)))
    return times


def _by_stamp(kernels: Iterable[Mapping[str, Any]]) -> Times:
    """Sum up kernels in the order in which they ran. A captured step has no ranges; its parts are
    split by kernels that read the clock: at its start, after drafts, after logits, at its end."""
    times, stamps = _empty(), 0
    for kernel in sorted(kernels, key=lambda event: event["ts"]):
        stamps += _STAMP in kernel["name"]
        part = ("rest", "draft", "target", "verify")[stamps % 4]
        times[part][group_of(kernel["name"])] += kernel["dur"] / 1e3
    return times
