"""A benchmark of a server: probe, warm up, measure, count."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slipstream.bench.client import Client, Server
from slipstream.bench.datasets import BenchPrompt, TextEncoder
from slipstream.bench.load import Ask, LoadRun, run_load
from slipstream.bench.probe import (
    RemoteModel,
    UnreachableError,
    find_model,
    read_counters,
    switch_profiler,
)
from slipstream.bench.protocol import RequestForm
from slipstream.bench.record import Record
from slipstream.bench.speculation import SpeculationCounts, from_usage
from slipstream.core.errors import UsageError

RETURN_SPECULATION, SPECULATIVE = "return_speculation", "speculative"


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """What to measure.

    Attributes:
        model: None takes the server's only one.
        form: how prompts become requests; its model is filled in.
        due: seconds from the start at which each request is due; None for a closed loop.
        num_warmups: requests that are sent before the measurement.
        ready_wait: seconds to wait for the server to start.
        num_speculative_tokens: draft tokens per step of every request; None for the server's own.
        return_speculation: ask the server, where it can, which draft tokens were accepted.
        profile: switch the server's profiler on.
        encoder: counts tokens where the server does not.
    """

    server: Server
    model: str | None
    form: RequestForm
    prompts: Sequence[BenchPrompt]
    due: Sequence[float] | None = None
    max_concurrency: int | None = None
    num_warmups: int = 1
    ready_wait: float = 0.0
    num_speculative_tokens: int | None = None
    return_speculation: bool = True
    profile: bool = False
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
        model = await find_model(client, plan.model, plan.ready_wait, plan.server.url)
        form = _form(plan, model)
        for prompt in plan.prompts:
            form.body(prompt)  # raises UsageError before anything is sent

        async def ask(prompt: BenchPrompt, due: float | None) -> Record:
            return await client.complete(prompt, form, plan.encoder, due)

        await _warm_up(ask, plan)
        if plan.profile:
            await switch_profiler(client, on=True)
        before = await read_counters(client)
        run = await run_load(
            ask,
            plan.prompts,
            due=plan.due,
            most_at_once=plan.max_concurrency,
            stopped=stopped,
            advance=advance,
        )
        after = await read_counters(client)
        if plan.profile:
            await switch_profiler(client, on=False)
    speculation = from_usage(run.records)
    if speculation is None and before is not None and after is not None:
        speculation = after.since(before)
    return ServeResult(model, run, speculation)


def _form(plan: ServePlan, model: RemoteModel) -> RequestForm:
    fields = dict(plan.form.fields)
    if plan.num_speculative_tokens is not None:
        if not model.supports_speculation:
            raise UsageError(
                f"{plan.server.url} does not accept a number of draft tokens with a request (its "
                "/v1/models does not mention speculation); set it where the server is started, and "
                "leave out --num-speculative-tokens"
            )
        fields[SPECULATIVE] = {"num_speculative_tokens": plan.num_speculative_tokens}
    if plan.return_speculation and model.supports_speculation:
        fields[RETURN_SPECULATION] = True
    return replace(plan.form, model=model.name, fields=fields)


async def _warm_up(ask: Ask, plan: ServePlan) -> None:
    """Send the first prompt repeatedly, so that no other one enters the server's prefix cache.

    The first request is sent alone: if it fails, all would.
    """
    prompts = [replace(prompt, later_turns=()) for prompt in plan.prompts[:1]] * plan.num_warmups
    if not prompts:
        return
    first = await ask(prompts[0], None)
    if first.failed:
        raise UnreachableError(f"the first request to {plan.server.url} failed: {first.error}")
    await run_load(ask, prompts[1:], most_at_once=plan.max_concurrency)
