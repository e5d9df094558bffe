"""The options of `bench serve`: the server, the load on it, and what is reported."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slipstream.core.errors import UsageError
from slipstream.core.flags import flag, parse_object

AUTO, COMPLETIONS, CHAT = "auto", "completions", "chat"
ENDPOINTS = (AUTO, COMPLETIONS, CHAT)
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
_KEY = "OPENAI_API_KEY"
_HOST, _PORT = "127.0.0.1", 8000
_BACKENDS = {"openai": "completions", "openai-chat": "chat", "vllm": "completions"}


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, and how requests are sent to it."""

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
        None, "Fields to add to the body of every request.", parse=parse_object
    )
    tokenizer: str | None = flag(
        None,
        "A model's directory, hub name or a demo. Its tokenizer counts tokens where the server "
        "does not, draws random prompts, and renders chats as prompts. [for random prompts that of "
        "--model, if that is here]",
    )
    request_timeout: float = flag(600.0, "Seconds that one request may take in all.", above=0)
    ready_timeout: float = flag(0.0, "Seconds to wait for the server to start.", at_least=0)

    @cached_property
    def url(self) -> str:
        """The address without /v1; raises UsageError for a bad one."""
        url = self._given_url().rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url must begin with http:// or https://, not {self.base_url}")
        return url

    @cached_property
    def headers(self) -> dict[str, str]:
        """Headers of every request; raises UsageError for a bad one."""
        headers = {}
        for text in self.header:
            name, colon, value = text.partition(":")
            if not colon or not name.strip():
                raise UsageError(f"--header must be such as 'name: value', not {text!r}")
            headers[name.strip()] = value.strip()
        key = self.api_key or os.environ.get(_KEY)
        if key:
            headers.setdefault("Authorization", f"Bearer {key}")
        return headers

    def _given_url(self) -> str:
        if self.base_url is None:
            host = self.host or _HOST
            shown = f"[{host}]" if ":" in host else host
            return f"http://{shown}:{self.port or _PORT}"
        if self.host is not None or self.port is not None:
            raise UsageError("--base-url names host and port; leave --host and --port out")
        return self.base_url

    def wanted_endpoint(self) -> str:
        """The endpoint by --endpoint and --backend; raises UsageError if they disagree."""
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
class TrafficOptions:
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
        1, "Warm-up requests, with one prompt, sent before the measurement.", at_least=0
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


TTFT, TPOT, ITL, ITL_PER_TOKEN, E2EL = "ttft", "tpot", "itl", "itl_per_token", "e2el"
METRICS = (TTFT, TPOT, ITL, ITL_PER_TOKEN, E2EL)
GOODPUT_METRICS = (TTFT, TPOT, E2EL)


def _parse_metrics(name: str, text: str) -> tuple[str, ...]:
    """Read names of METRICS; none are all."""
    for metric in _listed(text):
        if metric not in METRICS:
            raise UsageError(f"{name} takes {', '.join(METRICS)}, not {metric!r}")
    return _listed(text) or METRICS


def _parse_percentiles(name: str, text: str) -> tuple[float, ...]:
    """Read numbers from 0 to 100."""
    try:
        percentiles = tuple(map(float, _listed(text)))
    except ValueError:
        percentiles = (-1.0,)
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise UsageError(f"{name} must be numbers from 0 to 100 such as 50,99, not {text!r}")
    return percentiles


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True, kw_only=True)
class SummaryOptions:
    """The figures to report."""

    metrics: tuple[str, ...] = flag(
        METRICS,
        "Metrics to show percentiles of: ttft, tpot, itl, itl_per_token, e2el. [all]",
        panel="Report",
        name="--percentile-metrics",
        metavar="<list>",
        parse=_parse_metrics,
    )
    percentiles: tuple[float, ...] = flag(
        (90.0, 99.0),
        "Percentiles to show, such as 50,90,99.9. [90,99]",
        name="--metric-percentiles",
        metavar="<list>",
        parse=_parse_percentiles,
    )
    goodput: tuple[str, ...] = flag(
        (),
        "Count requests within this limit: ttft:200, tpot:30, e2el:5000 (repeatable).",
        metavar="<metric:ms>",
    )

    def __post_init__(self) -> None:
        read_goodput(self.goodput)


def read_goodput(texts: Sequence[str]) -> dict[str, float] | None:
    """Read goals such as `ttft:200`; raises UsageError for anything else."""
    goals: dict[str, float] = {}
    for text in texts:
        name, colon, value = text.partition(":")
        try:
            goal = float(value)
        except ValueError:
            goal = -1.0
        if not colon or name not in GOODPUT_METRICS or not goal > 0:
            raise UsageError(
                f"--goodput must be such as ttft:200 (milliseconds; {', '.join(GOODPUT_METRICS)}), "
                f"not {text!r}"
            )
        goals[name] = goal
    return goals or None
