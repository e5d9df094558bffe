"""`slipstream bench serve`: measure a server under load."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slipstream import __version__
from slipstream.cli.bench_flags import (
    BenchSamplingFlags,
    DatasetFlags,
    ReportFlags,
    model_tokenizer,
)
from slipstream.cli.bench_serve_flags import (
    LoadFlags,
    ResultFlags,
    ServerFlags,
    SummaryFlags,
)
from slipstream.cli.bench_views import Bar, progress_bar, show_tables
from slipstream.cli.errors import FAILED, INTERRUPTED, say
from slipstream.cli.paths import require_writable
from slipstream.cli.terminal import interrupt_noted, stdout_console
from slipstream.core.errors import UsageError
from slipstream.core.wording import counted

if TYPE_CHECKING:
    from slipstream.bench.datasets import BenchPrompt
    from slipstream.bench.record import Record
    from slipstream.bench.serve import ServePlan, ServeResult
    from slipstream.bench.summary import SummaryOptions
    from slipstream.bench.tables import ReportTable
    from slipstream.models.tokenizer import Tokenizer


def serve(
    *,
    server: ServerFlags,
    load: LoadFlags,
    dataset: DatasetFlags,
    sampling: BenchSamplingFlags,
    summary: SummaryFlags,
    report: ReportFlags,
    result: ResultFlags,
) -> None:
    """Measure a server of the OpenAI protocol under load.

    Reports throughput, TTFT, TPOT and acceptance, under the names that vllm bench serve uses.
    Without --request-rate the load is a closed loop of --max-concurrency requests. Ctrl-C ends the
    load and reports what was measured so far. The exit code is 1 if a request failed or a text
    differs from --compare-texts.
    """
    _require_client()
    from slipstream.bench.load import num_requests
    from slipstream.bench.report import read_texts
    from slipstream.bench.serve import measure_server

    options, files = summary.options(), report.files()
    require_writable("--save-texts", summary.save_texts)
    result.prepare(report.output)
    if summary.save_detailed and report.output is None and not result.save_result:
        raise UsageError("--save-detailed adds to --output; add --output FILE")
    expected = None if summary.compare_texts is None else read_texts(summary.compare_texts)
    plan = _plan(server, load, dataset, sampling)
    with interrupt_noted() as pressed, progress_bar() as bar:
        bar.start("requests", num_requests(plan.prompts))
        measured = measure_server(plan, pressed, _RequestBar(bar))
        interrupted = measured.run.num_left > 0
    title = f"{measured.model.name} at {plan.server.url}"
    about = {"prompts": _describe_prompts(dataset, plan), "load": _describe_load(load)}
    if measured.model.speculative is not None:
        about["drafter"] = _describe_drafter(measured.model.speculative, load)
    outcome = _Outcome(title, about, plan, measured)
    outcome.sum_up(options, expected)
    output = report.output or result.file(measured.model.name, load, datetime.now(UTC))
    if output is not None:
        outcome.write(output, _settings(server, load, dataset), summary.save_detailed)
    if summary.save_texts is not None:
        outcome.write_texts(summary.save_texts)
    outcome.draw(files)
    outcome.show()  # last: the reader of a pipe may be gone, which ends the command
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


class _Outcome:
    """The results of a load, and the files that they are written to."""

    def __init__(
        self, title: str, about: dict[str, str], plan: "ServePlan", result: "ServeResult"
    ) -> None:
        self._title, self._plan, self._result = title, plan, result
        self._about = {**about, "measured": f"{_now()} by slipstream {__version__}"}
        self._figures: dict[str, Any] = {}
        self._tables: list[ReportTable] = []

    @property
    def is_wrong(self) -> bool:
        """Whether a request failed or a text differs from the expected one."""
        return bool(self._figures["failed"] or self._figures.get("texts_differing"))

    def sum_up(self, options: "SummaryOptions", expected: dict[str, str] | None) -> None:
        """Compute all figures, and compare the texts with the expected ones."""
        from slipstream.bench.report import differing
        from slipstream.bench.summary import summarise
        from slipstream.bench.tables import load_tables

        run, speculation = self._result.run, self._result.speculation
        self._figures = summarise(run, speculation, options)
        self._tables = load_tables(self._figures, speculation, options)
        if expected is not None:
            texts = {record.id: record.text for record in run.records if not record.failed}
            wrong = differing(texts, expected)
            self._figures |= {"texts_compared": len(texts), "texts_differing": wrong}
            self._tables.append(_texts_table(len(texts), wrong))

    def show(self) -> None:
        """Print title, settings and tables."""
        console = stdout_console()
        console.print(self._title, style="bold", soft_wrap=True)
        for name, value in self._about.items():
            console.print(f"{name}: {value}", soft_wrap=True)
        show_tables(console, self._tables)

    def draw(self, files: Sequence[Path]) -> None:
        """Write pictures and HTML pages."""
        from slipstream.bench.report import draw_load

        speculation = self._result.speculation
        shares = () if speculation is None else speculation.shares
        draw_load(self._result.run, shares, self._title, self._about, self._tables, files)

    def write(self, file: Path, settings: dict[str, Any], detailed: bool) -> None:
        """Write figures and settings as JSON."""
        from slipstream.bench.report import write_json
        from slipstream.bench.summary import details

        head = {
            "date": _now(),
            "slipstream": __version__,
            "base_url": self._plan.server.url,
            "model_id": self._result.model.name,
            "server_speculative": self._result.model.speculative,
            **settings,
            "num_prompts": len(self._plan.prompts),
        }
        more = details(self._result.run) if detailed else {}
        write_json(head | self._figures | more, file)

    def write_texts(self, file: Path) -> None:
        """Write every answer with its prompt."""
        from slipstream.bench.report import text_entry, write_texts

        prompts = {prompt.id: prompt for prompt in self._plan.prompts} | self._result.run.later
        done = [record for record in self._result.run.records if not record.failed]
        write_texts([text_entry(prompts[it.id], it.text) for it in done], file)


def _plan(
    server: ServerFlags, load: LoadFlags, dataset: DatasetFlags, sampling: BenchSamplingFlags
) -> "ServePlan":
    from slipstream.bench.load import arrival_times
    from slipstream.bench.protocol import CHAT, COMPLETIONS, RequestForm
    from slipstream.bench.serve import ServePlan

    endpoint = server.wanted_endpoint()
    tokenizer = None if server.tokenizer is None else model_tokenizer(server.tokenizer)
    prompts = dataset.prompts(tokenizer, as_text=endpoint == CHAT)
    if endpoint == COMPLETIONS and tokenizer is not None:
        prompts = [_as_tokens(prompt, tokenizer) for prompt in prompts]
    prompts = _with_turns(prompts, load.turns, endpoint)
    return ServePlan(
        server=server.server(),
        model=server.model,
        form=RequestForm(
            model="",
            endpoint=endpoint,
            max_tokens=dataset.length,
            fields=sampling.fields(dataset.seed) | server.more_fields(),
        ),
        prompts=prompts,
        due=arrival_times(len(prompts), load.request_rate, load.burstiness, dataset.seed or 0),
        max_concurrency=load.max_concurrency,
        num_warmups=load.num_warmups,
        ready_wait=server.ready_timeout,
        num_speculative_tokens=load.num_speculative_tokens,
        return_speculation=load.return_speculation,
        profile=load.profile,
        encoder=tokenizer,
    )


def _with_turns(prompts: "Sequence[BenchPrompt]", turns: str, endpoint: str) -> "list[BenchPrompt]":
    """The prompts with the turns that --turns asks for."""
    from slipstream.bench.protocol import COMPLETIONS

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


def _require_client() -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise UsageError("bench serve needs aiohttp: pip install 'slipstream[bench]'")


def _describe_prompts(dataset: DatasetFlags, plan: "ServePlan") -> str:
    from slipstream.bench.load import num_requests

    distinct = len({str(prompt.shown()) for prompt in plan.prompts})
    again = "" if distinct == len(plan.prompts) else f" ({distinct} different ones)"
    own = any(prompt.max_tokens is not None for prompt in plan.prompts)
    length = (
        "output lengths of the data set"
        if own
        else f"up to {counted(dataset.length, 'token')} each"
    )
    temperature = plan.form.fields.get("temperature", 0)
    requests = num_requests(plan.prompts)
    turns = "" if requests == len(plan.prompts) else f" with all turns, {requests} requests"
    number = len(plan.prompts)
    return f"{number} of {dataset.name}{again}{turns}, {length}, temperature {temperature:g}"


def _describe_load(load: LoadFlags) -> str:
    most = "all at once" if load.max_concurrency is None else f"{load.max_concurrency} at once"
    if load.request_rate == float("inf"):
        return f"closed loop, {most}"
    limit = "" if load.max_concurrency is None else f", at most {load.max_concurrency} at once"
    return f"open loop, {load.request_rate:g} requests/s, burstiness {load.burstiness:g}{limit}"


def _describe_drafter(speculative: Any, load: LoadFlags) -> str:
    name = speculative.get("model") or speculative.get("method") or "?"
    k = load.num_speculative_tokens
    count = speculative.get("num_speculative_tokens") if k is None else k
    return f"{name}, K = {count}"


def _settings(server: ServerFlags, load: LoadFlags, dataset: DatasetFlags) -> dict[str, Any]:
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


def _texts_table(compared: int, wrong: Sequence[str]) -> "ReportTable":
    from slipstream.bench.tables import ReportTable

    rows = [("compared", str(compared)), ("as expected", str(compared - len(wrong)))]
    if wrong:
        more = "" if len(wrong) <= 5 else f" and {len(wrong) - 5} more"
        rows.append(("differing", ", ".join(wrong[:5]) + more))
    return ReportTable("Texts", ("", ""), rows)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
