"""Results as tables, for the terminal and for HTML pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.bench.options import E2EL, ITL, ITL_PER_TOKEN, TPOT, TTFT, SummaryOptions
from slipstream.bench.profile import GROUPS, Profile
from slipstream.bench.record import CHUNKS, TOKENIZER, USAGE
from slipstream.bench.speculation import NOT_REPORTED, SpeculationCounts
from slipstream.bench.summary import percentile_name
from slipstream.bench.sweep import CellResult, Failure, best
from slipstream.bench.workload import PARTS
from slipstream.core.errors import counted

METRIC_NAMES = {
    TTFT: "TTFT",
    TPOT: "TPOT",
    ITL: "ITL, per chunk",
    ITL_PER_TOKEN: "ITL, per token",
    E2EL: "end to end",
}
_COUNTED = {
    USAGE: "the server's usage",
    TOKENIZER: "the given tokenizer",
    CHUNKS: "chunks (the server sends no counts; give --tokenizer)",
}
_MANY = 16  # positions that are always shown


@dataclass(frozen=True)
class ReportTable:
    """Rows of cells; `best` has the indices of bold rows, `note` is printed below the heading."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[int] = frozenset()
    note: str = ""


def load_tables(
    summary: Mapping[str, Any], speculation: SpeculationCounts | None, options: SummaryOptions
) -> list[ReportTable]:
    """The tables for a load on a server; `summary` comes from `summarise`."""
    tables = [ReportTable("Requests", ("", ""), _requests(summary))]
    if any(f"mean_{metric}_ms" in summary for metric in options.metrics):
        tables.append(_times(summary, options))
    drafts = [("drafts", NOT_REPORTED)]
    if speculation is not None:
        drafts = [*speculation_rows(speculation), ("reported by", speculation.source)]
    tables.append(ReportTable("Speculation", ("", ""), drafts))
    if summary["errors"]:
        rows = [(reason, str(count)) for reason, count in summary["errors"].items()]
        tables.append(ReportTable("Failures", ("reason", "requests"), rows))
    return tables


def texts_table(compared: int, wrong: Sequence[str]) -> ReportTable:
    """How many texts were as expected; `wrong` has the ids of the others."""
    rows = [("compared", str(compared)), ("as expected", str(compared - len(wrong)))]
    if wrong:
        more = "" if len(wrong) <= 5 else f" and {len(wrong) - 5} more"
        rows.append(("differing", ", ".join(wrong[:5]) + more))
    return ReportTable("Texts", ("", ""), rows)


def speculation_rows(counts: SpeculationCounts) -> list[tuple[str, str]]:
    if not counts.num_drafts:
        return [("drafts", counts.note or "none")]
    rows = [
        ("acceptance length (AL)", f"{counts.acceptance_length:.2f}"),
        ("acceptance rate", f"{counts.acceptance_rate:.1%}"),
        ("drafts", f"{counts.num_drafts:,}"),
        ("draft tokens", f"{counts.num_draft_tokens:,}"),
        ("accepted tokens", f"{counts.num_accepted_tokens:,}"),
        ("accepted by position", by_position(counts.acceptance_per_position)),
    ]
    if counts.without_drafts is not None:
        rows.append(("steps without drafts", f"{counts.without_drafts:.1%}"))
    if counts.steps_by_draft_tokens is not None:
        rows.append(("draft tokens per step", by_draft_tokens(counts.steps_by_draft_tokens)))
        rows.append(("time of refused drafts", f"{counts.refused_drafting_seconds:.2f} s"))
    if counts.estimated_speedup is not None:
        rows.append(("estimated speed-up", f"{counts.estimated_speedup:.2f}x plain"))
    return rows


def by_draft_tokens(steps: Sequence[int]) -> str:
    """The mean number of draft tokens per step, and the shares of the most frequent numbers."""
    whole = max(1, sum(steps))
    mean = sum(number * count for number, count in enumerate(steps)) / whole
    frequent = sorted(range(len(steps)), key=lambda number: -steps[number])[:_MANY]
    shares = [f"{it}: {steps[it] / whole:.0%}" for it in sorted(frequent) if steps[it]]
    return f"mean {mean:.1f} ({', '.join(shares)})"


def by_position(shares: Sequence[float]) -> str:
    """Shares by position; of long drafts (trees) up to the last accepted position."""
    kept = list(shares)
    while len(kept) > _MANY and kept[-1] == 0:
        kept.pop()
    return " ".join(f"{share:.2f}" for share in kept)


SWEEP_COLUMNS = (
    *("checkpoint", "K", "batch", "AL", "iter. ms", "TPOT ms", "tokens/s", "x plain", "draft"),
)


def sweep_table(points: Sequence[CellResult]) -> ReportTable:
    """The results of a sweep; the fastest row of each batch size is bold."""
    winners = best(points)
    return ReportTable(
        "Drafters against K",
        SWEEP_COLUMNS,
        [_sweep_row(point, index in winners) for index, point in enumerate(points)],
        winners,
        "iter. is the median time of a step, draft the share of drafting in it; * and bold mark "
        "the most tokens per second at that batch size.",
    )


def drafting_tables(points: Sequence[CellResult]) -> list[ReportTable]:
    """How much the drafters of a sweep drafted, and what it cost; none for plain decoding alone."""
    rows = [
        (
            *(point.drafter, str(point.k), str(point.batch)),
            "-" if point.estimated_speedup is None else f"{point.estimated_speedup:.2f}",
            f"{point.refused_drafting_seconds:.2f}",
            by_draft_tokens(point.steps_by_draft_tokens),
        )
        for point in points
        if point.k and point.steps_by_draft_tokens
    ]
    if not rows:
        return []
    return [
        ReportTable(
            "Draft tokens per step",
            ("checkpoint", "K", "batch", "est. x plain", "refused s", "draft tokens per step"),
            rows,
            note="est. x plain is the engine's own estimate, refused s the time spent "
            "drafting tokens that were refused.",
        )
    ]


def failures_table(failures: Sequence[Failure]) -> ReportTable:
    rows = [(failure.title, failure.reason) for failure in failures]
    return ReportTable("Not measured", ("cell", "reason"), rows)


def profile_table(profile: Profile) -> ReportTable:
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
    work = "Kernels (they may overlap)" if profile.on_device else "Ops on the host"
    return ReportTable(
        f"Time of {counted(profile.steps, 'step')} under the profiler, ms per step",
        ("", *PARTS, "all", ""),
        rows,
        frozenset({len(rows) - 2}),
        f"{work}, by the part of the step that ran them. Trace: {profile.trace}",
    )


def _requests(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    methods = "; ".join(_COUNTED[how] for how in summary["output_tokens_counted_by"])
    rows = [
        ("completed", f"{summary['completed']:,}"),
        ("failed", f"{summary['failed']:,}"),
        ("duration", f"{summary['duration']:.2f} s"),
        ("input tokens", f"{summary['total_input_tokens']:,}"),
        ("output tokens", f"{summary['total_output_tokens']:,}"),
        ("tokens counted by", methods or "-"),
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
        rows.append(("mean wait in the client", f"{waited:.2f} ms"))
    return rows


def _times(summary: Mapping[str, Any], options: SummaryOptions) -> ReportTable:
    names = ["mean", "median", "std", *map(percentile_name, options.percentiles)]
    rows = []
    for metric in options.metrics:
        values = [summary[f"{name}_{metric}_ms"] for name in names]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        rows.append([METRIC_NAMES[metric], *cells])
    notes = []
    if ITL in options.metrics or ITL_PER_TOKEN in options.metrics:
        notes.append(
            "A speculative server sends several tokens in one chunk: compare TPOT, not ITL. Per "
            "token, the times within a chunk are 0."
        )
        if ITL_PER_TOKEN in options.metrics and summary[f"mean_{ITL_PER_TOKEN}_ms"] is None:
            notes.append("This server does not report the number of tokens per chunk.")
    return ReportTable("Times, ms", ("", *names), rows, note=" ".join(notes))


def _sweep_row(point: CellResult, is_best: bool) -> list[str]:
    return [
        point.drafter + (" (part)" if point.partial else ""),
        str(point.k),
        str(point.batch),
        f"{point.acceptance_length:.2f}",
        f"{point.median_iteration_ms:.2f}",
        "-" if point.tpot_ms is None else f"{point.tpot_ms:.2f}",
        f"{point.tokens_per_second:.1f}{'*' if is_best else ' '}",
        f"{point.times_plain:.2f}",
        f"{point.shares['draft']:.0%}" if point.k else "-",
    ]
