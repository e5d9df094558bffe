"""Flags of `slipstream bench serve` alone."""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.prompts import make_folder, require_writable
from slipstream.core.errors import UsageError
from slipstream.core.flags import flag, given_flags, parse_object

if TYPE_CHECKING:
    from slipstream.bench.client import Server
    from slipstream.bench.summary import SummaryOptions

_KEY = "OPENAI_API_KEY"
_HOST, _PORT = "127.0.0.1", 8000
_BACKENDS = {"openai": "completions", "openai-chat": "chat", "vllm": "completions"}


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """The server and how requests are sent to it."""

    base_url: str | None = flag(
        None,
        f"Address of the server, with or without /v1 at its end. [http://{_HOST}:{_PORT}]",
        panel="Server",
    )
    host: str | None = flag(None, f"In place of --base-url. [{_HOST}]")
    port: int | None = flag(None, f"In place of --base-url. [{_PORT}]", at_least=1, at_most=65535)
    model: str | None = flag(None, "Name of the model on the server. [the only one]")
    endpoint: str = flag(
        "auto", "completions, chat (or their paths), or auto: the one that suits each prompt."
    )
    backend: str | None = flag(
        None,
        "Spelled as in vllm bench serve: openai or vllm are --endpoint completions, openai-chat is "
        "--endpoint chat.",
    )
    api_key: str | None = flag(None, f"Sent as a bearer token. [{_KEY} of the environment]")
    header: tuple[str, ...] = flag(
        (), "Header to send with every request (repeatable).", metavar="<name: value>"
    )
    extra_body: dict[str, Any] | None = flag(
        None, "Fields to add to the body of every request.", metavar="<json>", parse=parse_object
    )
    tokenizer: str | None = flag(
        None,
        "A model's directory, hub name or a demo. Its tokenizer counts tokens where the server "
        "does not, draws random prompts, and renders chats as prompts.",
    )
    request_timeout: float = flag(600.0, "Seconds that one request may take in all.", above=0)
    ready_timeout: float = flag(0.0, "Seconds to wait for the server to start.", at_least=0)

    def server(self) -> "Server":
        """Where to send requests; raises UsageError for a bad address or header."""
        from slipstream.bench.client import Server

        url = self._url().rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url must begin with http:// or https://, not {self.base_url}")
        headers = {}
        for text in self.header:
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
        """The endpoint by --endpoint and --backend; raises UsageError if they disagree."""
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
                "benchmarked by the OpenAI protocol only"
            )
        meant = _BACKENDS[self.backend]
        if endpoint not in (AUTO, meant):
            raise UsageError(
                f"--backend {self.backend} means --endpoint {meant}, not {self.endpoint}; leave "
                "one out"
            )
        return meant

    def more_fields(self) -> dict[str, Any]:
        """The fields of --extra-body; raises UsageError for those that the benchmark sets."""
        given = self.extra_body or {}
        own = {"model", "prompt", "messages", "stream", "stream_options", "n"} & set(given)
        if own:
            raise UsageError(f"--extra-body may not have {', '.join(sorted(own))}")
        return given


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How many requests are sent, and when."""

    max_concurrency: int | None = flag(
        None, "Maximum number of concurrent requests. [no limit]", panel="Load", at_least=1
    )
    request_rate: float = flag(
        float("inf"),
        "Requests per second, sent whether or not earlier ones are answered; inf sends each as "
        "soon as --max-concurrency allows.",
    )
    burstiness: float = flag(
        1.0,
        "Shape of the gamma distribution of gaps between requests: 1 is Poisson, less is burstier.",
        above=0,
    )
    turns: str = flag(
        "first",
        "For mt-bench and spec-bench: first sends the first turn of each question, as vllm bench "
        "serve does; all sends every turn, with the answers before it.",
        metavar="<first|all>",
        choices=("first", "all"),
    )
    num_warmups: int = flag(
        1, "Warm-up requests, all of one prompt, sent before the measurement.", at_least=0
    )
    num_speculative_tokens: int | None = flag(
        None,
        "Draft tokens per step, sent with every request (slipstream servers). [the server's]",
        also=("-k",),
        at_least=0,
    )
    return_speculation: bool = flag(
        True,
        "Ask slipstream servers which draft tokens were accepted; without it, their counters are "
        "read.",
    )
    profile: bool = flag(
        False, "Switch the server's own profiler on, where it has one (/start_profile)."
    )


@dataclass(frozen=True, kw_only=True)
class SummaryFlags:
    """The figures to report."""

    percentile_metrics: str | None = flag(
        None,
        "Metrics to show percentiles of: ttft, tpot, itl, itl_per_token, e2el. [all]",
        panel="Report",
        metavar="<list>",
    )
    metric_percentiles: str = flag(
        "90,99", "Percentiles to show, such as 50,90,99.9.", metavar="<list>"
    )
    goodput: tuple[str, ...] = flag(
        (),
        "Count requests within this limit: ttft:200, tpot:30, e2el:5000 (repeatable).",
        metavar="<metric:ms>",
    )
    save_detailed: bool = flag(False, "Add the figures of every request to --output.")
    save_texts: Path | None = flag(None, "Write every answer.", metavar="<file>")
    compare_texts: Path | None = flag(
        None,
        "Compare every answer with a file of --save-texts, from here or from bench throughput.",
        metavar="<file>",
    )

    def options(self) -> "SummaryOptions":
        """What to report; raises UsageError for unknown metrics or bad percentiles."""
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
            metrics=metrics, percentiles=percentiles, goodput=read_goodput(self.goodput)
        )


@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """The flags of vllm bench serve that correspond to `--output`."""

    save_result: bool = flag(
        False, "Write all figures as JSON, to a file named after the load.", panel="Report"
    )
    result_dir: Path | None = flag(
        None, "Folder for --save-result; it is made if need be. [here]", metavar="<folder>"
    )
    result_filename: str | None = flag(
        None, "File name for --save-result, in its folder.", metavar="<name>"
    )

    def prepare(self, output: Path | None) -> None:
        """Make the folder before anything is measured; raises UsageError if it is not writable."""
        if not self.save_result:
            for name in given_flags(self):
                raise UsageError(f"{name} is for --save-result; add that, or use --output")
            return
        if output is not None:
            raise UsageError("--save-result and --output both name the file to write; give one")
        make_folder("--result-dir", self._folder)
        require_writable("--result-filename", self._folder / (self.result_filename or "any.json"))

    def file(self, model: str, load: LoadFlags, time: datetime) -> Path | None:
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


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]
