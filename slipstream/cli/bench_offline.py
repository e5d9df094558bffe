"""`slipstream bench latency` and `throughput`: an engine in this process."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from slipstream.cli.bench_flags import (
    BenchSamplingFlags,
    DatasetFlags,
    OutputFlags,
    ProfileFlags,
    read_workload,
    refuse_num_seqs,
)
from slipstream.cli.bench_views import about, progress_bar, show_report
from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.errors import INTERRUPTED, say
from slipstream.cli.flags import RunFlags
from slipstream.cli.open_llm import open_llm
from slipstream.cli.prompts import require_writable
from slipstream.cli.terminal import interrupt_noted
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.flags import flag

if TYPE_CHECKING:
    from slipstream.bench.tables import ReportTable
    from slipstream.bench.workload import OfflineRun, Workload
    from slipstream.engine.llm import LLM

# With prefix caching, every batch after the first would find its prompts computed.
_WITHOUT_PREFIXES = EngineConfig(enable_prefix_caching=False)


@dataclass(frozen=True, kw_only=True)
class ThroughputFlags(OutputFlags):
    """What `bench throughput` writes."""

    save_texts: Path | None = flag(None, "Write every answer, to be compared with others.")


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """The batches of `bench latency`."""

    batch_size: int = flag(1, "Requests per batch.", at_least=1)
    num_iters: int = flag(10, "Batches to measure.", at_least=1)
    num_iters_warmup: int = flag(2, "Warm-up batches, which are not measured.", at_least=0)


def throughput(
    *,
    dataset: DatasetFlags,
    sampling: BenchSamplingFlags,
    output: ThroughputFlags,
    profile: ProfileFlags,
    drafter: DrafterFlags,
    engine: EngineConfig,
    run: RunFlags,
) -> None:
    """Measure tokens per second of an engine in this process.

    It gets all prompts at once; --max-num-seqs says how many of them run together. Ctrl-C ends the
    run and reports what was measured so far.
    """
    from slipstream.bench.offline import throughput_figures, throughput_table
    from slipstream.bench.report import text_entry, write_texts
    from slipstream.bench.workload import run_offline, warm_up

    output.check()
    profile.prepare()
    require_writable("--save-texts", output.save_texts)
    config = drafter.apply(engine).warmed_up()
    workload = read_workload(dataset, sampling, engine)
    llm = open_llm(config, run.verbose)[0]
    warm_up(llm)
    size = len(workload.prompts)
    with interrupt_noted() as pressed, progress_bar() as bar:
        bar.start("requests", size)
        measured = run_offline(
            llm, workload, pressed, lambda done, tokens: bar.update(done, f"{tokens:,} tokens")
        )
    if output.save_texts is not None:
        answered = zip(workload.prompts, measured.by_prompt(), strict=False)
        entries = [text_entry(prompt, it.outputs[0].text) for prompt, it in answered if it.finished]
        write_texts(entries, output.save_texts)
    figures = throughput_figures(measured, size)
    profiled = [] if measured.stopped else profile.tables(llm, workload, "throughput")
    tables = [throughput_table(figures), *profiled]
    _report(f"{engine.model}, {workload.title}", measured, figures, tables, output.output)


def latency(
    *,
    batch: BatchFlags,
    dataset: DatasetFlags,
    sampling: BenchSamplingFlags,
    output: OutputFlags,
    profile: ProfileFlags,
    drafter: DrafterFlags,
    engine: EngineConfig = _WITHOUT_PREFIXES,
    run: RunFlags,
) -> None:
    """Measure how long one batch takes in this process.

    The batch is the data set's first prompts, every answer at its full length, without prefix
    caching unless --enable-prefix-caching is given. Ctrl-C ends the run and reports what was
    measured so far.
    """
    from slipstream.bench.offline import joined, latency_figures, latency_table

    output.check()
    profile.prepare()
    refuse_num_seqs("--batch-size", engine.max_num_seqs)
    if dataset.num_prompts is not None:
        raise UsageError("--batch-size says how many prompts there are; leave out --num-prompts")
    config = replace(drafter.apply(engine), max_num_seqs=batch.batch_size)
    batches = replace(dataset, num_prompts=batch.batch_size)
    workload = read_workload(batches, replace(sampling, ignore_eos=True), engine)
    llm = open_llm(config, run.verbose)[0]
    runs = _batches(llm, workload, batch)
    if not runs:
        raise typer.Exit(INTERRUPTED)
    whole = joined(runs)
    whole.stopped = len(runs) < batch.num_iters
    figures = latency_figures([one.seconds for one in runs])
    profiled = [] if whole.stopped else profile.tables(llm, workload, "latency")
    tables = [latency_table(figures), *profiled]
    _report(f"{engine.model}, {workload.title}", whole, figures, tables, output.output)


def _batches(llm: "LLM", workload: "Workload", batch: BatchFlags) -> "list[OfflineRun]":
    """The batches that were measured, until Ctrl-C."""
    from slipstream.bench.workload import run_offline

    runs: list[OfflineRun] = []
    with interrupt_noted() as pressed, progress_bar() as bar:
        for _ in range(batch.num_iters_warmup):
            if not pressed():
                run_offline(llm, workload, pressed)
        bar.start("batches", batch.num_iters)
        for number in range(batch.num_iters):
            one = run_offline(llm, workload, pressed)
            if one.stopped or pressed():
                break
            runs.append(one)
            bar.update(number + 1, f"{one.seconds:.3f} s")
    return runs


def _report(
    title: str,
    run: "OfflineRun",
    figures: dict[str, object],
    tables: "list[ReportTable]",
    output: Path | None,
) -> None:
    """Write and show the figures; raises typer.Exit if the run was interrupted."""
    from slipstream.bench.offline import run_figures, step_tables
    from slipstream.bench.report import write_json

    if output is not None:  # before the tables, because writing to a closed pipe ends the command
        write_json({"title": title, **about()} | figures | run_figures(run), output)
    show_report(title, [tables[0], *step_tables(run), *tables[1:]])
    if run.stopped:
        say("interrupted; the figures cover what was measured until then")
        raise typer.Exit(INTERRUPTED)
