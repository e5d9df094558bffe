"""/start_profile and /stop_profile: traces of the engine's steps, with the paths of vLLM."""

import asyncio
import gzip
import logging
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path

import torch
from starlette.requests import Request
from starlette.responses import Response
from torch.profiler import ProfilerActivity

from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.errors import ApiError
from slipstream.serve.openapi import json_response
from slipstream.serve.protocol.server import Profiling

logger = logging.getLogger("slipstream.serve")


class StepProfiler:
    """Records steps from `start` to `stop`, both on the engine's own thread.

    Records stay in memory until `write`: some megabytes per second for a small model.
    """

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = torch.profiler.profile(activities=activities)

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> None:
        """Stop recording; waits for launched work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()

    def write(self, trace: Path) -> None:
        """Write a trace for Chrome or Perfetto to a file ending in .json.gz; on any thread."""
        plain = trace.with_suffix("")
        self._profiler.export_chrome_trace(str(plain))
        trace.write_bytes(gzip.compress(plain.read_bytes(), compresslevel=3))
        plain.unlink()


class ProfilingEndpoints:
    """Handles both paths; there is one profile at a time. The folder of the traces exists."""

    def __init__(self, thread: EngineThread, folder: Path) -> None:
        self._thread, self._folder = thread, folder
        self._running: StepProfiler | None = None
        self._lock = asyncio.Lock()

    async def start(self, _: Request) -> Response:
        """Begin to profile the engine's steps"""
        async with self._lock:
            if self._running is not None:
                message = "a profile is being taken already; POST /stop_profile ends it"
                raise ApiError(HTTPStatus.CONFLICT, message)
            profiler = StepProfiler()
            await self._thread.between_steps(profiler.start)
            self._running = profiler
        logger.info("profiling begins; POST /stop_profile ends it")
        return json_response(Profiling(running=True))

    async def stop(self, _: Request) -> Response:
        """End the profile and write its trace"""
        async with self._lock:
            profiler, self._running = self._running, None
            if profiler is None:
                message = "no profile is being taken; POST /start_profile begins one"
                raise ApiError(HTTPStatus.CONFLICT, message)
            await self._thread.between_steps(profiler.stop)
            trace = self._folder / f"{datetime.now(UTC):serve-%Y%m%d-%H%M%S-%f}.json.gz"
            await asyncio.to_thread(profiler.write, trace)
        logger.info("profiling ended; its trace is %s", trace)
        return json_response(Profiling(running=False, trace=str(trace)))
