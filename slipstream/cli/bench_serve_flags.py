"""Flags of `slipstream bench serve` alone."""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.drafter_flags import read_object
from slipstream.core.errors import UsageError

if TYPE_CHECKING:
    from slipstream.bench.client import Server
    from slipstream.bench.summary import SummaryOptions

_SERVER, _LOAD, _REPORT = "Server", "Load", "Report"
_KEY = "OPENAI_API_KEY"
_HOST, _PORT = "127.0.0.1", 8000
_BACKENDS = {"openai": "completions", "openai-chat": "chat", "vllm": "completions"}
FIRST_TURN, ALL_TURNS = "first", "all"


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Where the server is and how it is asked."""

    base_url: Annotated[
        str | None,
        typer.Option(
            help=f"With or without /v1 at its end. [http://{_HOST}:{_PORT}]",
            rich_help_panel=_SERVER,
        ),
    ] = None
    host: Annotated[
        str | None,
        typer.Option(help=f"In place of --base-url. [{_HOST}]", rich_help_panel=_SERVER),
    ] = None
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help=f"In place of --base-url. [{_PORT}]",
            rich_help_panel=_SERVER,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="By its name there. [the only one]", rich_help_panel=_SERVER),
    ] = None
    endpoint: Annotated[
        str,
        typer.Option(
            help="completions, chat (or their paths), or auto: the one that suits each prompt.",
            rich_help_panel=_SERVER,
        ),
    ] = "auto"
    backend: Annotated[
        str | None,
        typer.Option(
            help="As vllm bench serve has it: openai or vllm are --endpoint completions, "
            "openai-chat is --endpoint chat.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(help=f"Sent as a bearer token. [{_KEY}]", rich_help_panel=_SERVER),
    ] = None
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<name: value>",
            help="Sent with requests (repeatable).",
            rich_help_panel=_SERVER,
        ),
    ] = None
    extra_body: Annotated[
        str | None,
        typer.Option(
            metavar="<json>", help="More fields of every request.", rich_help_panel=_SERVER
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="A model's directory, name or a demo: counts tokens where the server does not, "
            "draws random prompts, writes chats as prompts.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    request_timeout: Annotated[
        float, typer.Option(help="Seconds for one request in all.", rich_help_panel=_SERVER)
    ] = 600.0
    ready_timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the server.", rich_help_panel=_SERVER)
    ] = 0.0

    def server(self) -> "Server":
        """Raises UsageError for an address or a header that is none."""
        from slipstream.bench.client import Server

        url = self._url().rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url must begin with http:// or https://, not {self.base_url}")
        if not self.request_timeout > 0:
            raise UsageError(f"--request-timeout must be above 0, not {self.request_timeout:g}")
        headers = {}
        for text in self.header or ():
            name, colon, value = text.partition(":")
            if not colon or not name.strip():
                raise UsageError(f"--header must be such as 'name: value', not {text!r}")
            headers[name.strip()] = value.strip()
        key = self.api_key or os.environ.get(_KEY)
        if key:
            headers.setdefault("Authorization", f"Bearer {key}")
        return Server(url=url, headers=headers, timeout=self.request_timeout)

    def _url(self) -> str:
        if self.base_url is None:
            host = self.host or _HOST
            shown = f"[{host}]" if ":" in host else host
            return f"http://{shown}:{self.port or _PORT}"
        if self.host is not None or self.port is not None:
            raise UsageError("--base-url names host and port; leave --host and --port out")
        return self.base_url

    def wanted_endpoint(self) -> str:
        """By --endpoint and --backend; UsageError where they name none, or two."""
        from slipstream.bench.protocol import AUTO, ENDPOINTS, PATHS

        names = {path: name for name, path in PATHS.items()}
        endpoint = names.get(self.endpoint, self.endpoint)
        if endpoint not in ENDPOINTS:
            raise UsageError(
                f"--endpoint must be one of {', '.join(ENDPOINTS)}, not {self.endpoint}"
            )
        if self.backend is None:
            return endpoint
        if self.backend not in _BACKENDS:
            raise UsageError(
                f"--backend must be one of {', '.join(_BACKENDS)}, not {self.backend}: servers are "
                "asked by the OpenAI protocol only"
            )
        meant = _BACKENDS[self.backend]
        if endpoint not in (AUTO, meant):
            raise UsageError(
                f"--backend {self.backend} means --endpoint {meant}, not {self.endpoint}; leave "
                "one out"
            )
        return meant

    def more_fields(self) -> dict[str, Any]:
        """What --extra-body adds; UsageError for what the measurement itself sets."""
        given = {} if self.extra_body is None else read_object("--extra-body", self.extra_body)
        own = {"model", "prompt", "messages", "stream", "stream_options", "n"} & set(given or {})
        if own:
            raise UsageError(f"--extra-body may not have {', '.join(sorted(own))}")
        return given or {}


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How much at once, and how soon."""

    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests under way. [no limit]", rich_help_panel=_LOAD),
    ] = None
    request_rate: Annotated[
        float,
        typer.Option(
            help="Requests a second, whether answers keep up or not; inf sends as places get free.",
            rich_help_panel=_LOAD,
        ),
    ] = float("inf")
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier.",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0
    turns: Annotated[
        str,
        typer.Option(
            metavar="<first|all>",
            help="Of mt-bench and spec-bench: the first turn of each question, as vllm bench serve "
            "sends it, or all, each with the answers before it.",
            rich_help_panel=_LOAD,
        ),
    ] = FIRST_TURN
    num_warmups: Annotated[
        int,
        typer.Option(min=0, help="Requests before, all of one prompt.", rich_help_panel=_LOAD),
    ] = 1
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            min=0,
            help="Draft tokens a step, with every request (slipstream servers). [the server's]",
            rich_help_panel=_LOAD,
        ),
    ] = None
    return_speculation: Annotated[
        bool,
        typer.Option(
            help="Ask slipstream servers for the verdict on each token; else their counters are "
            "read.",
            rich_help_panel=_LOAD,
        ),
    ] = True
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Switch the server's own profiler on, where it has one (/start_profile).",
            rich_help_panel=_LOAD,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SummaryFlags:
    """What is told."""

    percentile_metrics: Annotated[
        str | None,
        typer.Option(
            metavar="<list>",
            help="Of ttft, tpot, itl, itl_per_token, e2el. [all]",
            rich_help_panel=_REPORT,
        ),
    ] = None
    metric_percentiles: Annotated[
        str, typer.Option(metavar="<list>", help="Such as 50,90,99.9.", rich_help_panel=_REPORT)
    ] = "90,99"
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<metric:ms>",
            help="Count requests that meet this: ttft:200, tpot:30, e2el:5000 (repeatable).",
            rich_help_panel=_REPORT,
        ),
    ] = None
    save_detailed: Annotated[
        bool,
        typer.Option(
            "--save-detailed", help="--output with every request's own.", rich_help_panel=_REPORT
        ),
    ] = False
    save_texts: Annotated[
        Path | None,
        typer.Option(metavar="<file>", help="Write every answer.", rich_help_panel=_REPORT),
    ] = None
    compare_texts: Annotated[
        Path | None,
        typer.Option(
            metavar="<file>",
            help="Compare every answer with those of --save-texts, here or of bench throughput.",
            rich_help_panel=_REPORT,
        ),
    ] = None

    def options(self) -> "SummaryOptions":
        """Raises UsageError for metrics and percentiles that there are none of."""
        from slipstream.bench.summary import METRICS, SummaryOptions, read_goodput

        metrics = _listed(self.percentile_metrics) or list(METRICS)
        for metric in metrics:
            if metric not in METRICS:
                raise UsageError(f"--percentile-metrics takes {', '.join(METRICS)}, not {metric!r}")
        try:
            percentiles = [float(text) for text in _listed(self.metric_percentiles)]
        except ValueError:
            percentiles = [-1.0]
        if not all(0 <= percentile <= 100 for percentile in percentiles):
            raise UsageError(
                "--metric-percentiles must be numbers from 0 to 100 such as 50,99, not "
                f"{self.metric_percentiles!r}"
            )
        return SummaryOptions(
            metrics=metrics, percentiles=percentiles, goodput=read_goodput(self.goodput or ())
        )


@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """`--output` as vllm bench serve spells it."""

    save_result: Annotated[
        bool,
        typer.Option(
            "--save-result",
            help="Write all figures as JSON, into a file named after the load.",
            rich_help_panel=_REPORT,
        ),
    ] = False
    result_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="<folder>",
            help="Of --save-result; made if it is not there. [here]",
            rich_help_panel=_REPORT,
        ),
    ] = None
    result_filename: Annotated[
        str | None,
        typer.Option(
            metavar="<name>", help="Of --save-result, in its folder.", rich_help_panel=_REPORT
        ),
    ] = None

    def prepare(self, output: Path | None) -> None:
        """Before anything is measured; UsageError for a place that cannot be written to."""
        if not self.save_result:
            for name in ("result_dir", "result_filename"):
                if getattr(self, name) is not None:
                    flag = "--" + name.replace("_", "-")
                    raise UsageError(f"{flag} is for --save-result; add that, or use --output")
            return
        if output is not None:
            raise UsageError("--save-result and --output both say where figures go; give one")
        from slipstream.bench.report import require_writable

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--result-dir {self._folder} cannot be made a folder ({error.strerror}); name "
                "another"
            ) from None
        require_writable("--result-filename", self._folder / (self.result_filename or "any.json"))

    def file(self, model: str, load: LoadFlags, time: datetime) -> Path | None:
        """Where the figures go; None where they do not."""
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


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]
