"""Results as tables, for a terminal and for a page alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.bench.profile import GROUPS, Profile
from slipstream.bench.record import CHUNKS, TOKENIZER, USAGE
from slipstream.bench.speculation import NOT_REPORTED, SpeculationCounts
from slipstream.bench.summary import (
    E2EL,
    ITL,
    ITL_PER_TOKEN,
    TPOT,
    TTFT,
    SummaryOptions,
    percentile_name,
)
from slipstream.bench.sweep import Failure, Point, best
from slipstream.bench.workload import PARTS
from slipstream.core.wording import counted

_METRICS = {
    TTFT: "TTFT",
    TPOT: "TPOT",
    ITL: "ITL, per chunk",
    ITL_PER_TOKEN: "ITL, per token",
    E2EL: "end to end",
}
_COUNTED = {
    USAGE: "the server's usage",
    TOKENIZER: "the tokenizer here",
    CHUNKS: "chunks (the server counts none: give --tokenizer)",
}
_MANY = 16  # positions that are all told


@dataclass(frozen=True)
class ReportTable:
    """Rows of cells; `best` are the places of rows in bold, `note` a sentence below the heading."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[int] = frozenset()
    note: str = ""


def load_tables(
    summary: Mapping[str, Any], speculation: SpeculationCounts | None, options: SummaryOptions
) -> list[ReportTable]:
    """The tables for a load on a server; `summary` is that of `summarise`."""
    tables = [ReportTable("Requests", ("", ""), _requests(summary))]
    if any(f"mean_{metric}_ms" in summary for metric in options.metrics):
        tables.append(_times(summary, options))
    drafts = [("drafts", NOT_REPORTED)]
    if speculation is not None:
        drafts = [*speculation_rows(speculation), ("told by", speculation.source)]
    tables.append(ReportTable("Speculation", ("", ""), drafts))
    if summary["errors"]:
        rows = [(reason, str(count)) for reason, count in summary["errors"].items()]
        tables.append(ReportTable("Failures", ("reason", "requests"), rows))
    return tables


def speculation_rows(counts: SpeculationCounts) -> list[tuple[str, str]]:
    """What there is to say of drafts; where nothing was drafted, just that."""
    if not counts.drafts:
        return [("drafts", "none")]
    rows = [
        ("acceptance length (AL)", f"{counts.acceptance_length:.2f}"),
        ("acceptance rate", f"{counts.acceptance_rate:.1%}"),
        ("drafts", f"{counts.drafts:,}"),
        ("draft tokens", f"{counts.draft_tokens:,}"),
        ("accepted tokens", f"{counts.accepted:,}"),
        ("accepted by position", by_position(counts.shares)),
    ]
    if counts.without_drafts is not None:
        rows.append(("steps without drafts", f"{counts.without_drafts:.1%}"))
    return rows


def by_position(shares: Sequence[float]) -> str:
    """Of a long draft (a tree) up to the last position that ever was accepted."""
    told = list(shares)
    while len(told) > _MANY and told[-1] == 0:
        told.pop()
    return " ".join(f"{share:.2f}" for share in told)


SWEEP_COLUMNS = (
    *("checkpoint", "K", "batch", "AL", "iter. ms", "TPOT ms", "tokens/s", "x plain", "draft"),
)


def sweep_table(points: Sequence[Point]) -> ReportTable:
    """The table of the field; the best of each batch size stands out."""
    winners = best(points)
    return ReportTable(
        "Drafters against K",
        SWEEP_COLUMNS,
        [_sweep_row(point, any(point is it for it in winners)) for point in points],
        frozenset(index for index, it in enumerate(points) if any(it is one for one in winners)),
        "iter. is the median of a step's time, draft the share of drafting in it; * and bold: "
        "the most tokens a second at that batch size.",
    )


def failures_table(failures: Sequence[Failure]) -> ReportTable:
    """Cells that could not be measured."""
    rows = [(failure.title, failure.reason) for failure in failures]
    return ReportTable("Not measured", ("cell", "reason"), rows)


def profile_table(profile: Profile) -> ReportTable:
    """Milliseconds a step by part and by group of ops."""
    steps = max(1, profile.steps)
    total = sum(sum(own.values()) for own in profile.times.values())
    rows = []
    for group in GROUPS:
        own = [profile.times[part][group] / steps for part in PARTS]
        if sum(own) > 0:
            cells = [f"{time:.3f}" for time in (*own, sum(own))]
            rows.append((group, *cells, f"{sum(own) * steps / total:.0%}"))
    sums = [sum(profile.times[part].values()) / steps for part in PARTS]
    rows.append(("all", *(f"{time:.3f}" for time in (*sums, sum(sums))), "100%"))
    clock = [profile.wall_ms[part] / steps for part in PARTS]
    rows.append(("the engine's clock", *(f"{time:.3f}" for time in (*clock, sum(clock))), ""))
    work = "kernels (they may overlap)" if profile.on_device else "ops on the host"
    return ReportTable(
        f"Time of {counted(profile.steps, 'step')} under the profiler, ms a step",
        ("", *PARTS, "all", ""),
        rows,
        frozenset({len(rows) - 2}),
        f"Of {work}, by the part of the step that ran them. Trace: {profile.trace}",
    )


def _requests(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    counted = "; ".join(_COUNTED[how] for how in summary["output_tokens_counted_by"])
    rows = [
        ("completed", f"{summary['completed']:,}"),
        ("failed", f"{summary['failed']:,}"),
        ("duration", f"{summary['duration']:.2f} s"),
        ("input tokens", f"{summary['total_input_tokens']:,}"),
        ("output tokens", f"{summary['total_output_tokens']:,}"),
        ("tokens counted by", counted or "nobody"),
        ("requests/s", f"{summary['request_throughput']:.2f}"),
        ("output tokens/s", f"{summary['output_throughput']:.1f}"),
        ("all tokens/s", f"{summary['total_token_throughput']:.1f}"),
        ("peak output tokens/s", f"{summary['max_output_tokens_per_s']:.0f}"),
        ("peak concurrency", f"{summary['max_concurrent_requests']}"),
    ]
    if summary["not_finished"]:
        rows.insert(2, ("not finished", f"{summary['not_finished']:,}"))
    if summary["request_goodput"] is not None:
        rows.append(("good requests/s", f"{summary['request_goodput']:.2f}"))
    if summary.get("mean_client_queue_time_ms") is not None:
        waited = summary["mean_client_queue_time_ms"]
        rows.append(("mean wait for a free place here", f"{waited:.2f} ms"))
    return rows


def _times(summary: Mapping[str, Any], options: SummaryOptions) -> ReportTable:
    names = ["mean", "median", "std", *map(percentile_name, options.percentiles)]
    rows = []
    for metric in options.metrics:
        values = [summary[f"{name}_{metric}_ms"] for name in names]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        rows.append([_METRICS[metric], *cells])
    notes = []
    if ITL in options.metrics or ITL_PER_TOKEN in options.metrics:
        notes.append(
            "A speculative server sends several tokens in one chunk: compare TPOT, not ITL. Per "
            "token, those of one chunk come at once."
        )
        if ITL_PER_TOKEN in options.metrics and summary[f"mean_{ITL_PER_TOKEN}_ms"] is None:
            notes.append("This server does not tell how many tokens a chunk has.")
    return ReportTable("Times, ms", ("", *names), rows, note=" ".join(notes))


def _sweep_row(point: Point, is_best: bool) -> list[str]:
    return [
        point.drafter + (" (part)" if point.partial else ""),
        str(point.k),
        str(point.batch),
        f"{point.acceptance_length:.2f}",
        f"{point.median_iteration_ms:.2f}",
        "-" if point.tpot_ms is None else f"{point.tpot_ms:.2f}",
        f"{point.tokens_per_second:.1f}{'*' if is_best else ' '}",
        f"{point.times_plain:.2f}",
        f"{point.shares['draft']:.0%}",
    ]
