"""Decoding on the CPU: time of a token, what speculation makes of it, and the memory's limit.

    python -m benchmarks.cpu_decode [--target DIR --draft DIR] [--forms bf16,int8,int4] [-k 4]
        [--draft-vocab-sizes 16384] [--batch-sizes 1,8] [--threads 2] [--quick] [--json FILE]

Without checkpoints it writes a pair of twins (`benchmarks/write_twins.py`) of the geometry of
Qwen3-0.6B or another. Where layers keep states of requests only plain decoding is measured. Greedy,
bf16 activations; of every form the engines take turns in --rounds rounds, each in a process of its
own, over the same prompts of --prompt tokens of a fixed text.

    form      of all matrices of target and draft: bf16, or a `quantization`
    ms/token  of each request: (time of --new-tokens + 8 tokens - time of 8) / --new-tokens
    tokens/s  of all requests together
    AL        1 + accepted draft tokens per draft
    limit     bytes of a step (matrices, keys and values of the mean context, states twice: they
              are written too) over the read bandwidth, by AL: the least that a token can take
    share     limit / ms a token
    of plain  ms a token over that of plain decoding, of the same form and batch
    prefill   seconds of a prompt of --prefill tokens and one output token
    ready     from the start of the process until the first request could be sent
    peak      largest resident set; above: over weights and KV budget

The read bandwidth is measured before, between and after (`benchmarks/cpu_bandwidth.py`), and its
median counts. Nothing else may run, please. Bars are printed last; those in milliseconds are of the
machine, geometry and threads that they were set for, and are left out elsewhere.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.cpu_bandwidth import measured_apart
from benchmarks.cpu_bars import Bar, best, ratio, table
from benchmarks.cpu_own import (
    coverage,
    keeps_states,
    matrix_bytes,
    own_entry,
    resident_bytes,
    round_bytes,
    trimmed,
    write_draft_text,
)
from benchmarks.cpu_rounds import PREFILL, SHORT, Plan, Result, batch_measure, compare
from benchmarks.peers.protocol import Job
from benchmarks.prompt_ids import PromptText
from benchmarks.write_twins import write_twins

_MB = 1e6
_QUICK = {"rounds": 2, "new_tokens": 48, "batch_tokens": 24}
_FULL = {"rounds": 3, "new_tokens": 128, "batch_tokens": 64}
# ms a token at batch 1 that plain decoding may take, by form, and ms with speculation; of 24.8 GB/s
# and the geometry of Qwen3-0.6B on two threads, where the best peers take 64.2, 32.7 and 23.0
# plain, and 58.3 with speculation.
_PLAIN_MS = {"bf16": 56.6, "int8": 0.9 * 32.7, "int4": 0.85 * 23.0}
_DRAFTED_MS = {"bf16": 0.6 * 58.3}
_BATCH_8_TOKENS = 1.4 * 88.8
_PREFILL_S = 0.84


@dataclass(frozen=True)
class Row:
    """An engine's job and figures."""

    job: Job
    result: Result

    @property
    def drafting(self) -> str:
        if self.job.draft is None:
            return "plain"
        size = self.job.options.get("draft_vocab_size")
        return f"K={self.job.num_speculative_tokens} " + (f"head {size}" if size else "whole head")


@dataclass
class Report:
    """All figures of a run."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)
    coverage: dict[int, float | None] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return statistics.median(self.bandwidths)

    def find(self, form: str, plain: bool) -> list[Row]:
        """The rows of a form that draft, or that do not."""
        return [
            row for row in self.rows if row.job.form == form and (row.job.draft is None) == plain
        ]

    def plain(self, form: str, batch: int) -> float | None:
        """Seconds a token of plain decoding."""
        return best(row.result.median(batch_measure(batch)) for row in self.find(form, True))

    def limit(self, row: Row, batch: int) -> float:
        """Seconds a token at the memory's rate."""
        context = self.plan.prompt + SHORT + self.plan.decode[batch] // 2
        al = row.result.values[batch_measure(batch)].al or 1.0
        return round_bytes(row.job, batch, context) / self.bandwidth / al


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(given.work or folder)
        if given.target is None:
            given.target, given.draft = write_twins(work / "twins", given.geometry, 4)
            given.draft = None if keeps_states(given.target) else given.draft
        report = _measure(given, work)
        # Bytes and bars are told by the checkpoints, which may go with the folder.
        _print(report)
        bars = [*_ratio_bars(report), *(_machine_bars(report) if _as_bars(given) else [])]
    print("\n" + "\n".join(bar.line() for bar in bars))
    if given.json:
        Path(given.json).write_text(json.dumps(_document(report, bars), indent=1))
    return 0 if all(row.result.error is None for row in report.rows) else 1


def _measure(given: argparse.Namespace, work: Path) -> Report:
    decode = {
        batch: given.new_tokens if batch == 1 else given.batch_tokens for batch in given.batch_sizes
    }
    plan = Plan(prompt=given.prompt, decode=decode, prefill=given.prefill, rounds=given.rounds)
    report = Report(plan)
    text = given.draft_vocab_text or write_draft_text(work / "draft_vocabulary.txt")
    _read_bandwidth(report, given.threads)
    for form in given.forms:
        jobs = {Row(job, Result(name="")).drafting: job for job in _jobs(given, form, plan, text)}
        entries = [own_entry(f"{form} {name}", job) for name, job in jobs.items()]
        prompts = PromptText(Path(given.target))
        results = compare(entries, plan, prompts, work / "logs", given.timeout, _say)
        report.rows += map(Row, jobs.values(), results)
        _read_bandwidth(report, given.threads)
    plain = [row.result for row in report.rows if row.job.draft is None]
    tokens = [row for result in plain for rows in result.tokens.values() for row in rows]
    if given.draft is not None:
        for size in given.draft_vocab_sizes:
            report.coverage[size] = coverage(Path(given.target), size, Path(text), tokens)
    return report


def _jobs(given: argparse.Namespace, form: str, plan: Plan, text: Path) -> Iterable[Job]:
    plain = Job(
        target=str(given.target),
        form=form,
        threads=given.threads,
        max_batch=max(given.batch_sizes),
        max_tokens=plan.max_tokens,
        work="",
    )
    yield plain
    if given.draft is None:
        return
    for k in given.num_speculative_tokens:
        drafting = replace(plain, draft=str(given.draft), num_speculative_tokens=k)
        yield drafting
        for size in given.draft_vocab_sizes:
            yield trimmed(drafting, size, text)


def _read_bandwidth(report: Report, threads: int) -> None:
    rate, by = measured_apart(threads)
    report.bandwidths.append(rate)
    _say(f"read bandwidth {rate / 1e9:.1f} GB/s ({by})")


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _print(report: Report) -> None:
    rates = [f"{rate / 1e9:.1f}" for rate in report.bandwidths]
    print(f"read bandwidth {report.bandwidth / 1e9:.1f} GB/s (median of {', '.join(rates)})")
    kernels = {str(row.result.facts.get("kernels")) for row in report.rows if not row.result.error}
    print(f"kernels: {', '.join(sorted(kernels))}\n")
    head = ("form", "drafting", "batch", "ms/token", "tokens/s", "AL", "limit", "share", "of plain")
    lines: list[tuple[str, ...]] = [head]
    for row in report.rows:
        lines += [_decode_line(report, row, batch) for batch in report.plan.decode]
    print(table(lines) + "\n")
    lines = [("form", "drafting", "prefill, s", "ready, s", "peak, MB", "above, MB")]
    lines += [_engine_line(row) for row in report.rows]
    print(table(lines))
    for row in report.rows:
        reasons = [row.result.error, *(values.error for values in row.result.values.values())]
        for reason in filter(None, dict.fromkeys(reasons)):
            print(f"{row.job.form} {row.drafting}: {reason}")
    for size, share in report.coverage.items():
        covered = "no" if share is None else f"{share:.1%} of"
        print(f"a head of {size} tokens has {covered} the tokens that plain decoding gave")


def _decode_line(report: Report, row: Row, batch: int) -> tuple[str, ...]:
    values = row.result.values.get(batch_measure(batch))
    name = (row.job.form, row.drafting, str(batch))
    if values is None or values.median is None:
        return (*name, *["-"] * 6)
    seconds, limit = values.median, report.limit(row, batch)
    plain = ratio(seconds, report.plain(row.job.form, batch))
    return (
        *name,
        f"{seconds * 1e3:.1f}",
        f"{batch / seconds:.1f}",
        "" if values.al is None else f"{values.al:.2f}",
        f"{limit * 1e3:.1f}",
        f"{limit / seconds:.0%}",
        "" if row.job.draft is None or plain is None else f"{plain:.2f}",
    )


def _engine_line(row: Row) -> tuple[str, ...]:
    result = row.result
    name = (row.job.form, row.drafting)
    if result.error is not None:
        return (*name, *["-"] * 4)
    prefill = result.median(PREFILL)
    return (
        *name,
        "-" if prefill is None else f"{prefill:.2f}",
        f"{result.ready:.1f}",
        f"{result.peak_bytes / _MB:.0f}",
        f"{_above(row) / _MB:.0f}",
    )


def _above(row: Row) -> float:
    kept: int = row.result.facts["kv_bytes"]
    return row.result.peak_bytes - resident_bytes(row.job) - kept


def _ratio_bars(report: Report) -> Iterable[Bar]:
    """The bars that hold on any machine."""
    for row in report.find("bf16", True):
        seconds = row.result.median(batch_measure(1))
        rate = None if seconds is None else matrix_bytes(row.job) / seconds / report.bandwidth
        title = "plain bf16, batch 1: weights alone, of the read bandwidth"
        yield Bar(title, rate, 0.85, at_least=True)
    for row in (row for row in report.rows if row.job.draft is not None):
        name = f"{row.job.form} {row.drafting}"
        if row.job.form != "bf16":
            value = ratio(row.result.median(batch_measure(1)), report.plain(row.job.form, 1))
            yield Bar(f"{name}, batch 1: time over plain", value, 0.6)
        for batch in (batch for batch in report.plan.decode if batch > 1):
            measure = batch_measure(batch)
            value = ratio(row.result.median(measure), report.plain(row.job.form, batch))
            yield Bar(f"{name}, batch {batch}: time over plain", value, 1.0)
    for row in report.rows:
        name = f"{row.job.form} {row.drafting}"
        above = None if row.result.error else _above(row) / _MB
        yield Bar(f"{name}: start-up", row.result.ready, 6.0, "s")
        yield Bar(f"{name}: peak above weights and KV budget", above, 400.0, "MB")


def _machine_bars(report: Report) -> Iterable[Bar]:
    """Against figures of the peers that were taken on such a machine, at 24.8 GB/s."""
    for row in report.rows:
        name, form = f"{row.job.form} {row.drafting}", row.job.form.partition("-")[0]
        bars = _PLAIN_MS if row.job.draft is None else _DRAFTED_MS
        if form in bars:
            seconds = row.result.median(batch_measure(1))
            value = None if seconds is None else seconds * 1e3
            yield Bar(f"{name}, batch 1, by the peers' figures", value, bars[form], "ms")
        if name == "bf16 plain":
            seconds = row.result.median(batch_measure(8))
            rate = None if seconds is None else 8 / seconds
            title = f"{name}, batch 8, by the peers' figures"
            yield Bar(title, rate, _BATCH_8_TOKENS, "tokens/s", at_least=True)
            title = f"{name}: prefill of 1,024 tokens, by the peers' figures"
            yield Bar(title, row.result.median(PREFILL), _PREFILL_S, "s")


def _as_bars(given: argparse.Namespace) -> bool:
    """Whether this is what the bars in milliseconds were set for."""
    config = json.loads((Path(given.target) / "config.json").read_text())
    shape = (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"])
    small: bool = shape == (1024, 28, 151936)
    return small and (given.threads, given.prompt, given.prefill) == (2, 128, 1024)


def _document(report: Report, bars: Iterable[Bar]) -> dict[str, Any]:
    return {
        "bandwidths": report.bandwidths,
        "coverage": report.coverage,
        "rows": [
            {"form": row.job.form, "drafting": row.drafting, **row.result.document()}
            for row in report.rows
        ],
        "bars": [bar.document() for bar in bars],
    }


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--target", type=Path, help="a checkpoint [twins are written]")
    cli.add_argument("--draft", type=Path, help="its draft model [plain decoding alone]")
    cli.add_argument("--geometry", default="qwen3-0.6b", help="of the twins")
    cli.add_argument("--forms", type=_words, default=("bf16", "int8", "int4"))
    cli.add_argument("--num-speculative-tokens", "-k", type=_numbers, default=(4,))
    cli.add_argument("--draft-vocab-sizes", type=_numbers, default=(16384,))
    cli.add_argument("--draft-vocab-text", type=Path, help="[sources of the standard library]")
    cli.add_argument("--batch-sizes", type=_numbers, default=(1, 8))
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--prompt", type=int, default=128)
    cli.add_argument("--new-tokens", type=int, help="at batch 1 [128]")
    cli.add_argument("--batch-tokens", type=int, help="of each request of a batch [64]")
    cli.add_argument("--prefill", type=int, default=1024)
    cli.add_argument("--rounds", type=int, help="[3]")
    cli.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    cli.add_argument("--timeout", type=float, default=600.0, help="seconds of any single run")
    cli.add_argument("--work", help="a folder that is kept, with the processes' logs")
    cli.add_argument("--json", help="a file for all figures")
    given = cli.parse_args(arguments)
    for name, value in (_QUICK if given.quick else _FULL).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.draft is not None and given.target is None:
        cli.error("--draft needs --target")
    return given


if __name__ == "__main__":
    sys.exit(main())
