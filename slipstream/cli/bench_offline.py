"""`slipstream bench latency` and `throughput`: an engine in this process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import __version__
from slipstream.cli.bench_flags import (
    BenchSamplingFlags,
    DatasetFlags,
    ProfileFlags,
    read_workload,
    refuse_num_seqs,
)
from slipstream.cli.bench_views import machine, show_tables, watching
from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.errors import INTERRUPTED, say
from slipstream.cli.flags import RunFlags
from slipstream.cli.interrupt import interrupt_noted
from slipstream.cli.open_llm import open_llm
from slipstream.cli.terminal import stdout_console
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError

if TYPE_CHECKING:
    from slipstream.bench.tables import ReportTable
    from slipstream.bench.workload import OfflineRun, Workload
    from slipstream.engine.llm import LLM

# A batch that comes again would find its prompts computed.
_WITHOUT_PREFIXES = EngineConfig(enable_prefix_caching=False)
_PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)

OutputFlag = Annotated[
    Path | None,
    typer.Option("--output", "--output-json", metavar="<file>", help="Write all figures as JSON."),
]


def throughput(
    *,
    output: OutputFlag = None,
    save_texts: Annotated[
        Path | None,
        typer.Option(metavar="<file>", help="Write every answer, to be compared with others."),
    ] = None,
    dataset: DatasetFlags,
    sampling: BenchSamplingFlags,
    profile: ProfileFlags,
    drafter: DrafterFlags,
    engine: EngineConfig,
    run: RunFlags,
) -> None:
    """All prompts at once to an engine in this process: how many tokens a second.

    --max-num-seqs says how many of them run together. Ctrl-C ends it and reports what was
    measured so far.
    """
    from slipstream.bench.report import require_writable, text_entry, write_texts
    from slipstream.bench.workload import run_offline, warm_up

    _prepare(output, profile)
    require_writable("--save-texts", save_texts)
    config = drafter.apply(engine)
    asked = read_workload(dataset, sampling, engine)
    llm = open_llm(config, run.verbose)[0]
    warm_up(llm)
    size = len(asked.prompts)
    with interrupt_noted() as pressed, watching() as watch:
        watch.begin("requests", size)
        measured = run_offline(
            llm, asked, pressed, lambda done, tokens: watch.move(done, f"{tokens:,} tokens")
        )
    figures = _throughput_figures(measured, size)
    tables = [_throughput_table(figures), *_step_tables(measured)]
    if not measured.stopped:
        tables += _profiled(llm, asked, profile, "throughput")
    if save_texts is not None:
        entries = [
            text_entry(asked.prompts[place], it.outputs[0].text)
            for place, it in _in_order(measured)
        ]
        write_texts(entries, save_texts)
    _report(f"{engine.model}, {asked.title}", tables, figures | _run_figures(measured), output)
    _leave(measured.stopped)


def latency(
    *,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Batches that are measured.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before.")] = 2,
    output: OutputFlag = None,
    dataset: DatasetFlags,
    sampling: BenchSamplingFlags,
    profile: ProfileFlags,
    drafter: DrafterFlags,
    engine: EngineConfig = _WITHOUT_PREFIXES,
    run: RunFlags,
) -> None:
    """One batch again and again in this process: seconds from its start to its last token.

    The batch is the data set's first prompts, every answer at its full length, without prefix
    caching unless --enable-prefix-caching is given. Ctrl-C ends it and reports what was measured
    so far.
    """
    from slipstream.bench.workload import run_offline

    _prepare(output, profile)
    refuse_num_seqs("--batch-size", engine.max_num_seqs)
    if dataset.num_prompts is not None:
        raise UsageError("--batch-size says how many prompts there are; leave out --num-prompts")
    config = replace(drafter.apply(engine), max_num_seqs=batch_size)
    batches = replace(dataset, num_prompts=batch_size)
    asked = read_workload(batches, replace(sampling, ignore_eos=True), engine)
    llm = open_llm(config, run.verbose)[0]
    runs: list[OfflineRun] = []
    with interrupt_noted() as pressed, watching() as watch:
        for _ in range(num_iters_warmup):
            if not pressed():
                run_offline(llm, asked, pressed)
        watch.begin("batches", num_iters)
        for number in range(num_iters):
            one = run_offline(llm, asked, pressed)
            if one.stopped or pressed():
                break
            runs.append(one)
            watch.move(number + 1, f"{one.seconds:.3f} s")
    if not runs:
        raise typer.Exit(INTERRUPTED)
    figures = _latency_figures([one.seconds for one in runs])
    whole = _joined(runs)
    tables = [_latency_table(figures), *_step_tables(whole)]
    if len(runs) == num_iters:
        tables += _profiled(llm, asked, profile, "latency")
    _report(f"{engine.model}, {asked.title}", tables, figures | _run_figures(whole), output)
    _leave(len(runs) < num_iters)


def _prepare(output: Path | None, profile: ProfileFlags) -> None:
    from slipstream.bench.report import require_writable

    require_writable("--output", output)
    profile.prepare()


def _in_order(run: "OfflineRun") -> list[tuple[int, Any]]:
    """Finished requests with the place of their prompt."""
    return [
        (place, run.latest[number])
        for place, number in enumerate(sorted(run.latest))
        if run.latest[number].finished
    ]


def _joined(runs: "Sequence[OfflineRun]") -> "OfflineRun":
    """Several runs as one; their requests are all different."""
    from slipstream.bench.workload import OfflineRun

    whole = OfflineRun()
    for run in runs:
        whole.latest |= run.latest
        whole.iterations += run.iterations
        whole.seconds += run.seconds
        whole.parts = tuple(old + new for old, new in zip(whole.parts, run.parts, strict=True))
    return whole


def _throughput_figures(run: "OfflineRun", size: int) -> dict[str, Any]:
    """The names are those of `vllm bench throughput`."""
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


def _throughput_table(figures: dict[str, Any]) -> "ReportTable":
    from slipstream.bench.tables import ReportTable

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


def _latency_figures(seconds: Sequence[float]) -> dict[str, Any]:
    """The names are those of `vllm bench latency`."""
    import numpy

    values = {f"{it:g}": float(numpy.percentile(seconds, it)) for it in _PERCENTILES}
    mean = sum(seconds) / len(seconds)
    return {"avg_latency": mean, "latencies": list(seconds), "percentiles": values}


def _latency_table(figures: dict[str, Any]) -> "ReportTable":
    from slipstream.bench.tables import ReportTable

    names = ("mean", *(f"p{it:g}" for it in _PERCENTILES))
    values = (figures["avg_latency"], *figures["percentiles"].values())
    return ReportTable(
        f"Latency of a batch, s ({len(figures['latencies'])} batches)",
        names,
        [[f"{value:.4f}" for value in values]],
    )


def _step_tables(run: "OfflineRun") -> "list[ReportTable]":
    """What both commands tell of requests, steps and drafts."""
    from slipstream.bench.summary import spread
    from slipstream.bench.tables import ReportTable, speculation_rows

    times = {"TTFT": run.ttfts_ms(), "TPOT": run.tpots_ms()}
    times["step"] = [seconds * 1e3 for seconds in run.iterations]
    spreads = {name: spread(own, (99.0,)) for name, own in times.items() if own}
    tables = []
    if spreads:
        rows = [
            [name, *(f"{value:.2f}" for value in own.values() if value is not None)]
            for name, own in spreads.items()
        ]
        tables.append(ReportTable("Times, ms", ("", "mean", "median", "std", "p99"), rows))
    shares = " · ".join(f"{part} {share:.0%}" for part, share in run.shares.items())
    rows = [list(row) for row in speculation_rows(run.speculation)]
    tables.append(ReportTable("Speculation", ("", ""), [*rows, ["time of a step", shares]]))
    return tables


def _run_figures(run: "OfflineRun") -> dict[str, Any]:
    from slipstream.bench.summary import speculation_figures, spread

    figures: dict[str, Any] = {"interrupted": run.stopped}
    times = {"ttft": run.ttfts_ms(), "tpot": run.tpots_ms()}
    times["step"] = [seconds * 1e3 for seconds in run.iterations]
    for metric, own in times.items():
        for name, value in spread(own, (90.0, 99.0)).items():
            figures[f"{name}_{metric}_ms"] = value
    figures["time_shares"] = run.shares
    return figures | speculation_figures(run.speculation)


def _profiled(
    llm: "LLM", workload: "Workload", flags: ProfileFlags, name: str
) -> "list[ReportTable]":
    trace = flags.trace(name)
    if trace is None:
        return []
    from slipstream.bench.profile import profile
    from slipstream.bench.tables import profile_table

    return [profile_table(profile(llm, workload, flags.profile_steps, trace))]


def _report(
    title: str, tables: "Sequence[ReportTable]", figures: dict[str, Any], output: Path | None
) -> None:
    from slipstream.bench.report import write_json

    if output is not None:  # before the tables, whose reader may leave
        about = {"title": title, "slipstream": __version__, "machine": machine()}
        write_json(about | figures, output)
    console = stdout_console()
    console.print(f"{title}; slipstream {__version__}, {machine()}", soft_wrap=True)
    show_tables(console, tables)


def _leave(interrupted: bool) -> None:
    if interrupted:
        say("interrupted; the figures are of what was done until then")
        raise typer.Exit(INTERRUPTED)
