"""A benchmark of a server: probe, warm up, measure, count."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import aiohttp

from slipstream.bench.client import Client, connection_error
from slipstream.bench.datasets import BenchPrompt, TextEncoder
from slipstream.bench.load import Ask, LoadRun, run_load
from slipstream.bench.options import Server, TrafficOptions
from slipstream.bench.protocol import RequestForm
from slipstream.bench.record import Record
from slipstream.bench.speculation import (
    LEAST_DRAFTED,
    SpeculationCounts,
    from_metrics,
    from_usage,
)
from slipstream.core.errors import SlipstreamError, UsageError

_POLL_SECONDS = 0.5


class UnreachableError(SlipstreamError):
    """No server answers, or it does not follow the protocol."""


@dataclass(frozen=True, kw_only=True)
class RemoteModel:
    """A model that a server offers.

    Attributes:
        supports_speculation: whether the server supports this project's extensions of the protocol,
            `speculative` and `return_speculation`.
        speculative: its drafter, if the server reports it.
    """

    name: str
    supports_speculation: bool
    speculative: Mapping[str, Any] | None


async def find_model(client: Client, server: Server) -> RemoteModel:
    """Find the model that the options name, or the only one.

    Raises:
        UnreachableError: there is no such server.
        UsageError: it has no such model, or it has several and none was named.
    """
    url, requested = server.url, server.model
    entries = await _models(client, server.ready_timeout, url)
    names = [str(entry.get("id")) for entry in entries]
    if requested is None and len(names) > 1:
        raise UsageError(f"{url} offers {', '.join(names)}; name one with --model")
    name = names[0] if requested is None else requested
    if name not in names:
        raise UsageError(f"{url} does not offer {name}; it offers {', '.join(names)}")
    entry = entries[names.index(name)]
    speculative = entry.get("speculative")
    return RemoteModel(
        name=name,
        supports_speculation="speculative" in entry,
        speculative=speculative if isinstance(speculative, dict) else None,
    )


async def read_counters(client: Client) -> SpeculationCounts | None:
    """Read the speculation counters of /metrics; None where there are none."""
    try:
        status, text = await client.get("/metrics")
    except (aiohttp.ClientError, OSError):
        return None
    return from_metrics(text) if status == 200 else None


async def switch_profiler(client: Client, on: bool) -> None:
    """Start or stop the server's own profiler; UsageError if it has none."""
    path = "/start_profile" if on else "/stop_profile"
    try:
        status = await client.post(path)
    except (aiohttp.ClientError, OSError) as error:
        raise UnreachableError(f"{path}: {connection_error(error)}") from None
    if status != 200:
        raise UsageError(
            f"--profile needs a server with a profiler, which this one lacks ({path}: "
            f"HTTP {status}); start slipstream serve with --enable-profiling FOLDER, or profile "
            "the engine with slipstream bench throughput --profile"
        )


async def _models(client: Client, wait: float, url: str) -> list[dict[str, Any]]:
    deadline = monotonic() + wait
    while True:
        try:
            status, text = await client.get("/v1/models")
            if status == 200:
                return _entries(text, url)
            problem = f"/v1/models: HTTP {status}"
            if status in (401, 403):
                raise UsageError(f"{url} requires an API key; give --api-key or set OPENAI_API_KEY")
        except (aiohttp.ClientError, OSError) as error:
            problem = connection_error(error)
        if monotonic() >= deadline:
            raise UnreachableError(
                f"no server answers at {url} ({problem}); start one with slipstream serve, name it "
                "with --base-url, or wait longer with --ready-timeout"
            )
        await asyncio.sleep(_POLL_SECONDS)


def _entries(text: str, url: str) -> list[dict[str, Any]]:
    try:
        listed = json.loads(text)["data"]
        entries = [entry for entry in listed if isinstance(entry, dict) and "id" in entry]
    except (ValueError, TypeError, KeyError):
        entries = []
    if not entries:
        raise UnreachableError(f"/v1/models of {url} lists no model; is it an OpenAI server?")
    return entries


RETURN_SPECULATION, SPECULATIVE = "return_speculation", "speculative"


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """Settings of the measurement.

    Attributes:
        form: how prompts become requests; its model is filled in.
        due: seconds from the start at which each request is due; None for a closed loop.
        encoder: counts tokens where the server does not.
    """

    server: Server
    form: RequestForm
    prompts: Sequence[BenchPrompt]
    load: TrafficOptions
    due: Sequence[float] | None = None
    encoder: TextEncoder | None = None


@dataclass(frozen=True)
class ServeResult:
    """The results of a load, and the model that it was on."""

    model: RemoteModel
    run: LoadRun
    speculation: SpeculationCounts | None


def measure_server(
    plan: ServePlan,
    stopped: Callable[[], bool] = lambda: False,
    advance: Callable[[Record], None] = lambda record: None,
) -> ServeResult:
    """Measure a server.

    Raises:
        UnreachableError: no server answers, or the first request fails.
        UsageError: the server does not have what the plan asks for.
    """
    return asyncio.run(_measure(plan, stopped, advance))


async def _measure(
    plan: ServePlan, stopped: Callable[[], bool], advance: Callable[[Record], None]
) -> ServeResult:
    async with Client(plan.server) as client:
        model = await find_model(client, plan.server)
        form = _form(plan, model)
        for prompt in plan.prompts:
            form.body(prompt)  # may raise UsageError, before anything is sent

        async def ask(prompt: BenchPrompt, due: float | None) -> Record:
            return await client.complete(prompt, form, plan.encoder, due)

        await _warm_up(ask, plan)
        if plan.load.profile:
            await switch_profiler(client, on=True)
        before = await read_counters(client)
        run = await run_load(
            ask,
            plan.prompts,
            due=plan.due,
            most_at_once=plan.load.max_concurrency,
            stopped=stopped,
            advance=advance,
        )
        after = await read_counters(client)
        if plan.load.profile:
            await switch_profiler(client, on=False)
    speculation = from_usage(run.records)
    if speculation is None and before is not None and after is not None:
        speculation = after.since(before)
    if speculation is not None and plan.load.num_speculative_tokens is None:
        is_long = any(record.num_tokens >= LEAST_DRAFTED for record in run.records)
        speculation.adaptive = is_long and bool((model.speculative or {}).get("adaptive"))
    return ServeResult(model, run, speculation)


def _form(plan: ServePlan, model: RemoteModel) -> RequestForm:
    fields = dict(plan.form.fields)
    if plan.load.num_speculative_tokens is not None:
        if not model.supports_speculation:
            raise UsageError(
                f"{plan.server.url} does not accept a number of draft tokens with a request (its "
                "/v1/models does not mention speculation); set it where the server is started, and "
                "leave out --num-speculative-tokens"
            )
        fields[SPECULATIVE] = {"num_speculative_tokens": plan.load.num_speculative_tokens}
    if plan.load.return_speculation and model.supports_speculation:
        fields[RETURN_SPECULATION] = True
    return replace(plan.form, model=model.name, fields=fields)


async def _warm_up(ask: Ask, plan: ServePlan) -> None:
    """Send the first prompt repeatedly, so that no other one enters the server's prefix cache.

    The first request is sent alone: if it fails, all would.
    """
    first_alone = [replace(prompt, later_turns=()) for prompt in plan.prompts[:1]]
    prompts = first_alone * plan.load.num_warmups
    if not prompts:
        return
    first = await ask(prompts[0], None)
    if first.failed:
        raise UnreachableError(f"the first request to {plan.server.url} failed: {first.error}")
    await run_load(ask, prompts[1:], most_at_once=plan.load.max_concurrency)
