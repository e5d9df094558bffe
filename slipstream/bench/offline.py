"""The figures and tables of a run in this process."""

from collections.abc import Sequence
from typing import Any

from slipstream.bench.summary import speculation_figures, spread
from slipstream.bench.tables import ReportTable, speculation_rows
from slipstream.bench.workload import OfflineRun

_PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "step": "step"}


def joined(runs: Sequence[OfflineRun]) -> OfflineRun:
    """Several runs of one engine as one run."""
    whole = OfflineRun(adaptive=any(run.adaptive for run in runs))
    for run in runs:
        whole.latest |= run.latest
        whole.iterations += run.iterations
        whole.seconds += run.seconds
        whole.parts = tuple(old + new for old, new in zip(whole.parts, run.parts, strict=True))
    return whole


def throughput_figures(run: OfflineRun, size: int) -> dict[str, Any]:
    """Figures with the names of `vllm bench throughput`."""
    done = len(run.outputs)
    tokens = run.num_tokens + run.num_prompt_tokens
    return {
        "elapsed_time": run.seconds,
        "num_requests": done,
        "not_finished": size - done,
        "total_num_tokens": tokens,
        "total_output_tokens": run.num_tokens,
        "requests_per_second": done / run.seconds,
        "tokens_per_second": tokens / run.seconds,
        "output_tokens_per_second": run.tokens_per_second,
    }


def throughput_table(figures: dict[str, Any]) -> ReportTable:
    rows = [
        ("requests", f"{figures['num_requests']:,}"),
        ("duration", f"{figures['elapsed_time']:.2f} s"),
        ("output tokens", f"{figures['total_output_tokens']:,}"),
        ("requests/s", f"{figures['requests_per_second']:.2f}"),
        ("output tokens/s", f"{figures['output_tokens_per_second']:.1f}"),
        ("all tokens/s", f"{figures['tokens_per_second']:.1f}"),
    ]
    if figures["not_finished"]:
        rows.insert(1, ("not finished", f"{figures['not_finished']:,}"))
    return ReportTable("Throughput", ("", ""), rows)


def latency_figures(seconds: Sequence[float]) -> dict[str, Any]:
    """Figures with the names of `vllm bench latency`."""
    import numpy

    values = {f"{it:g}": float(numpy.percentile(seconds, it)) for it in _PERCENTILES}
    mean = sum(seconds) / len(seconds)
    return {"avg_latency": mean, "latencies": list(seconds), "percentiles": values}


def latency_table(figures: dict[str, Any]) -> ReportTable:
    names = ("mean", *(f"p{it:g}" for it in _PERCENTILES))
    values = (figures["avg_latency"], *figures["percentiles"].values())
    return ReportTable(
        f"Latency of a batch, s ({len(figures['latencies'])} batches)",
        names,
        [[f"{value:.4f}" for value in values]],
    )


def step_tables(run: OfflineRun) -> list[ReportTable]:
    spreads = {name: spread(own, (99.0,)) for name, own in run.times_ms().items() if own}
    tables = []
    if spreads:
        rows = [
            [_NAMES[name], *(f"{value:.2f}" for value in own.values() if value is not None)]
            for name, own in spreads.items()
        ]
        tables.append(ReportTable("Times, ms", ("", "mean", "median", "std", "p99"), rows))
    shown = [it for it in run.shares.items() if it != ("draft", 0.0)]
    shares = " · ".join(f"{part} {share:.0%}" for part, share in shown)
    rows = [list(row) for row in speculation_rows(run.speculation)]
    tables.append(ReportTable("Speculation", ("", ""), [*rows, ["time of a step", shares]]))
    return tables


def run_figures(run: OfflineRun) -> dict[str, Any]:
    figures: dict[str, Any] = {"interrupted": run.stopped}
    for metric, own in run.times_ms().items():
        for name, value in spread(own, (90.0, 99.0)).items():
            figures[f"{name}_{metric}_ms"] = value
    figures["time_shares"] = run.shares
    return figures | speculation_figures(run.speculation)
