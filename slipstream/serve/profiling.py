"""/start_profile and /stop_profile: a trace of the steps between, as vLLM's clients ask for it."""

import asyncio
import logging
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.profiler import StepProfiler
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.errors import ApiError
from slipstream.serve.protocol.server import Profiling

logger = logging.getLogger("slipstream.serve")


class Profiles:
    """Answers the requests of both endpoints; there is one profile at a time.

    Args:
        folder: where traces go; is there.
    """

    def __init__(self, thread: EngineThread, folder: Path) -> None:
        self._thread, self._folder = thread, folder
        self._running: StepProfiler | None = None
        self._busy = asyncio.Lock()

    async def start(self, _: Request) -> Response:
        """Begin to profile the engine's steps."""
        async with self._busy:
            if self._running is not None:
                raise _conflict("a profile is being taken already; POST /stop_profile ends it")
            profiler = StepProfiler()
            await self._thread.between_steps(profiler.start)
            self._running = profiler
        logger.info("profiling begins; POST /stop_profile ends it")
        return _told(Profiling(running=True))

    async def stop(self, _: Request) -> Response:
        """End the profile, and write its trace."""
        async with self._busy:
            profiler, self._running = self._running, None
            if profiler is None:
                raise _conflict("no profile is being taken; POST /start_profile begins one")
            await self._thread.between_steps(profiler.stop)
            trace = self._folder / f"{datetime.now(UTC):serve-%Y%m%d-%H%M%S-%f}.json.gz"
            await asyncio.to_thread(profiler.write, trace)
        logger.info("profiling ended; its trace is %s", trace)
        return _told(Profiling(running=False, trace=str(trace)))


def _conflict(message: str) -> ApiError:
    return ApiError(HTTPStatus.CONFLICT, message)


def _told(state: Profiling) -> Response:
    return Response(state.model_dump_json(exclude_none=True), media_type="application/json")
