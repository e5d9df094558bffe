"""Questions to a server before and after the measurement: models, counters, profiler."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import aiohttp

from slipstream.bench.client import Client, connection_error
from slipstream.bench.speculation import SpeculationCounts, from_metrics
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


async def find_model(client: Client, requested: str | None, wait: float, url: str) -> RemoteModel:
    """Find the model of that name, or the only one.

    Args:
        wait: seconds to wait for the server to start.

    Raises:
        UnreachableError: there is no such server.
        UsageError: it has no such model, or it has several and none was named.
    """
    entries = await _models(client, wait, url)
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
    """Start or stop the server's own profiler.

    Raises:
        UsageError: it has none.
    """
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
                raise UsageError(f"{url} wants an API key; give --api-key or set OPENAI_API_KEY")
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
