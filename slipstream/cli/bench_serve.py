"""`slipstream bench serve`: measure a server under load."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slipstream.bench.options import CHAT, COMPLETIONS, Server, SummaryOptions, TrafficOptions
from slipstream.cli.bench_flags import (
    BenchSamplingFlags,
    DatasetFlags,
    ReportFlags,
    model_tokenizer,
)
from slipstream.cli.bench_views import Bar, progress_bar, show_tables
from slipstream.cli.errors import FAILED, INTERRUPTED, say
from slipstream.cli.prompts import make_folder, require_writable
from slipstream.cli.terminal import interrupt_noted, stdout_console
from slipstream.core.errors import UsageError, counted
from slipstream.core.flags import flag, given_flags

if TYPE_CHECKING:
    from slipstream.bench.datasets import BenchPrompt
    from slipstream.bench.record import Record
    from slipstream.bench.report import LoadReport
    from slipstream.bench.serve import ServePlan
    from slipstream.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """Files that are written besides `--output`, and the flags of vllm bench serve for them."""

    save_detailed: bool = flag(
        False, "Add the figures of every request to --output.", panel="Report"
    )
    save_texts: Path | None = flag(None, "Write every answer.")
    compare_texts: Path | None = flag(
        None,
        "Compare every answer with a file of --save-texts, from here or from bench throughput.",
    )
    save_result: bool = flag(False, "Write all figures as JSON, to a file named after the load.")
    result_dir: Path | None = flag(
        None, "Folder for --save-result; it is created if needed. [here]", metavar="<folder>"
    )
    result_filename: str | None = flag(
        None, "File name for --save-result, in its folder.", metavar="<name>"
    )

    def prepare(self, output: Path | None) -> None:
        """Make the folder before anything is measured; raises UsageError if it is not writable."""
        require_writable("--save-texts", self.save_texts)
        if not self.save_result:
            for name in (it for it in given_flags(self) if it.startswith("--result-")):
                raise UsageError(f"{name} is for --save-result; add that, or use --output")
            return
        if output is not None:
            raise UsageError("--save-result and --output both name the file to write; give one")
        make_folder("--result-dir", self._folder)
        require_writable("--result-filename", self._folder / (self.result_filename or "any.json"))

    def file(self, model: str, load: TrafficOptions, time: datetime) -> Path | None:
        """The file to write; None without --save-result."""
        if not self.save_result:
            return None
        if self.result_filename is not None:
            return self._folder / self.result_filename
        most = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
        name = model.rstrip("/").rpartition("/")[2] or "model"
        rate = f"{load.request_rate:g}qps"
        return self._folder / f"slipstream-{rate}{most}-{name}-{time:%Y%m%d-%H%M%S}.json"

    @property
    def _folder(self) -> Path:
        return self.result_dir or Path()


def serve(
    *,
    server: Server,
    load: TrafficOptions,
    dataset: DatasetFlags,
    sampling: BenchSamplingFlags,
    summary: SummaryOptions,
    report: ReportFlags,
    result: ResultFlags,
) -> None:
    """Measure a server of the OpenAI protocol under load.

    Reports throughput, TTFT, TPOT and acceptance, under the names that vllm bench serve uses.
    Without --request-rate the load is a closed loop of --max-concurrency requests. Ctrl-C ends the
    load and reports what was measured so far. The exit code is 1 if a request failed or a text
    differs from --compare-texts.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise UsageError("bench serve needs aiohttp: pip install 'slipstream[bench]'")
    from slipstream.bench.load import num_requests
    from slipstream.bench.report import LoadReport, read_texts
    from slipstream.bench.serve import measure_server

    files = report.files()
    result.prepare(report.output)
    if result.save_detailed and report.output is None and not result.save_result:
        raise UsageError("--save-detailed adds to --output; add --output FILE")
    expected = None if result.compare_texts is None else read_texts(result.compare_texts)
    plan = _plan(server, load, dataset, sampling)
    with interrupt_noted() as pressed, progress_bar() as bar:
        bar.start("requests", num_requests(plan.prompts))
        measured = measure_server(plan, pressed, _RequestBar(bar))
        interrupted = measured.run.num_left > 0
    about = {"prompts": _describe_prompts(dataset, plan), "load": _describe_load(load)}
    if measured.model.speculative is not None:
        about["drafter"] = _describe_drafter(measured.model.speculative, load)
    outcome = LoadReport(plan, measured, about, summary, expected)
    output = report.output or result.file(measured.model.name, load, datetime.now(UTC))
    if output is not None:
        outcome.write(output, _settings(server, load, dataset), result.save_detailed)
    if result.save_texts is not None:
        outcome.write_texts(result.save_texts)
    outcome.draw(files)
    _show(outcome)  # last, because writing to a closed pipe ends the command
    if interrupted:
        say(f"interrupted; {counted(measured.run.num_left, 'request')} not finished")
        raise typer.Exit(INTERRUPTED)
    if outcome.is_wrong:
        raise typer.Exit(FAILED)


class _RequestBar:
    """Counts ended requests on a bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._done, self._failed, self._tokens = bar, 0, 0, 0

    def __call__(self, record: "Record") -> None:
        self._done += 1
        self._failed += record.failed
        self._tokens += record.num_tokens
        failed = f", {self._failed} failed" if self._failed else ""
        self._bar.update(self._done, f"{self._tokens:,} tokens{failed}")


def _show(report: "LoadReport") -> None:
    console = stdout_console()
    console.print(report.title, style="bold", soft_wrap=True)
    for name, value in report.about.items():
        console.print(f"{name}: {value}", soft_wrap=True)
    show_tables(console, report.tables)


def _plan(
    server: Server, load: TrafficOptions, dataset: DatasetFlags, sampling: BenchSamplingFlags
) -> "ServePlan":
    from slipstream.bench.load import arrival_times
    from slipstream.bench.protocol import RequestForm
    from slipstream.bench.serve import ServePlan

    endpoint = server.wanted_endpoint()
    tokenizer = _tokenizer(server, dataset)
    prompts = dataset.prompts(tokenizer, as_text=endpoint == CHAT)
    if endpoint == COMPLETIONS and tokenizer is not None:
        prompts = [_as_tokens(prompt, tokenizer) for prompt in prompts]
    prompts = _with_turns(prompts, load.turns, endpoint)
    fields = sampling.fields(dataset.seed) | server.more_fields()
    _ = server.url, server.headers  # raise UsageError
    return ServePlan(
        server=server,
        form=RequestForm(model="", endpoint=endpoint, max_tokens=dataset.length, fields=fields),
        prompts=prompts,
        due=arrival_times(len(prompts), load.request_rate, load.burstiness, dataset.seed or 0),
        load=load,
        encoder=tokenizer,
    )


def _tokenizer(server: Server, dataset: DatasetFlags) -> "Tokenizer | None":
    """The tokenizer of --tokenizer, or for prompts that are made with one that of --model, if it
    names a directory here or a demo."""
    from slipstream.models.checkpoint import local_path

    name = server.tokenizer
    if name is None and dataset.wants_tokenizer and local_path(server.model or ""):
        name = server.model
    return None if name is None else model_tokenizer(name)


def _with_turns(prompts: "Sequence[BenchPrompt]", turns: str, endpoint: str) -> "list[BenchPrompt]":
    """The prompts with the turns that --turns asks for."""
    if turns == "first":
        return [replace(prompt, later_turns=()) for prompt in prompts]
    if endpoint == COMPLETIONS:
        raise UsageError("--turns all needs the chat endpoint; give --endpoint auto or chat")
    if not any(prompt.later_turns for prompt in prompts):
        raise UsageError(
            "--turns all is for questions of several turns (mt-bench, spec-bench); these prompts "
            "have one turn each, so leave it out"
        )
    return [*prompts]


def _as_tokens(prompt: "BenchPrompt", tokenizer: "Tokenizer") -> "BenchPrompt":
    """Render a chat to token ids, for the completions endpoint."""
    from slipstream.bench.workload import chat_tokens

    if prompt.messages is None:
        return prompt
    return replace(prompt, messages=None, token_ids=tuple(chat_tokens(tokenizer, prompt)))


def _describe_prompts(dataset: DatasetFlags, plan: "ServePlan") -> str:
    from slipstream.bench.load import num_requests
    from slipstream.bench.workload import output_lengths

    distinct = len({str(prompt.shown()) for prompt in plan.prompts})
    again = "" if distinct == len(plan.prompts) else f" ({distinct} different ones)"
    fields = plan.form.fields
    length = output_lengths(plan.prompts, dataset.length, bool(fields.get("ignore_eos")))
    temperature = fields.get("temperature", 0)
    requests = num_requests(plan.prompts)
    turns = "" if requests == len(plan.prompts) else f" with all turns, {requests} requests"
    number = len(plan.prompts)
    return f"{number} of {dataset.name}{again}{turns}, {length}, temperature {temperature:g}"


def _describe_load(load: TrafficOptions) -> str:
    most = "all at once" if load.max_concurrency is None else f"{load.max_concurrency} at once"
    if load.request_rate == float("inf"):
        return f"closed loop, {most}"
    limit = "" if load.max_concurrency is None else f", at most {load.max_concurrency} at once"
    return f"open loop, {load.request_rate:g} requests/s, burstiness {load.burstiness:g}{limit}"


def _describe_drafter(speculative: Any, load: TrafficOptions) -> str:
    name = speculative.get("model") or speculative.get("method") or "?"
    k = load.num_speculative_tokens
    count = speculative.get("num_speculative_tokens") if k is None else k
    return f"{name}, K = {f'auto, up to {count}' if speculative.get('adaptive') else count}"


def _settings(server: Server, load: TrafficOptions, dataset: DatasetFlags) -> dict[str, Any]:
    rate = load.request_rate
    return {
        "tokenizer_id": server.tokenizer,
        "endpoint": server.wanted_endpoint(),
        "backend": server.backend,
        "dataset": dataset.name,
        "dataset_path": None if dataset.dataset_path is None else str(dataset.dataset_path),
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": load.burstiness,
        "turns": load.turns,
        "max_concurrency": load.max_concurrency,
        "num_speculative_tokens": load.num_speculative_tokens,
        "seed": dataset.seed,
    }
