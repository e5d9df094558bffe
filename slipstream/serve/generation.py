"""Runs the engine requests of one HTTP request (one per prompt) and merges their updates."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from slipstream.core.outputs import RequestMetrics
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.prompts import EncodedPrompt
from slipstream.engine.stop_conditions import NOT_FINITE
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.errors import bad_request, generation_failed
from slipstream.serve.logs import current_request_id
from slipstream.serve.protocol.sampling import SamplingFields
from slipstream.serve.protocol.usage import PromptTokensDetails, SpeculationUsage, Usage
from slipstream.serve.updates import RequestUpdate, UpdateStream


class Generation:
    """Runs the prompts of one HTTP request and counts tokens for its usage.

    Args:
        counts_output: whether output tokens count; False if the one token that the engine always
            generates is not used.
    """

    def __init__(
        self, prompts: Sequence[EncodedPrompt], return_speculation: bool, counts_output: bool = True
    ) -> None:
        self.prompts = prompts
        self._num_output_tokens = 0
        self._metrics: list[RequestMetrics | None] = [None] * len(prompts)
        self._streams: list[UpdateStream] = []
        self._return_speculation, self._counts_output = return_speculation, counts_output
        self._has_grammar = False

    async def start(
        self, thread: EngineThread, params: SamplingParams, body: SamplingFields
    ) -> None:
        """Submit all prompts; raises the errors of `EngineThread.submit`."""
        self._has_grammar = params.structured is not None
        name = body.request_id or current_request_id()  # for the log
        self._streams = await thread.submit(
            name, self.prompts, params, stream_interval=body.stream_interval
        )

    async def updates(self) -> AsyncGenerator[tuple[int, RequestUpdate], None]:
        """Yield (prompt index, update); closing the generator early aborts all requests.

        Prompts that were not submitted have one update, without output.
        """
        if not self._streams:
            for place in range(len(self.prompts)):
                yield place, RequestUpdate((), True, RequestMetrics())
            return
        try:
            if len(self._streams) == 1:
                async for update in self._streams[0]:
                    self._count(0, update)
                    yield 0, update
                return
            async with aclosing(self._merged()) as merged:
                async for place, update in merged:
                    self._count(place, update)
                    yield place, update
        finally:
            for stream in self._streams:
                await stream.aclose()

    def _count(self, place: int, update: RequestUpdate) -> None:
        """Count the tokens of an update; raises ApiError if a sample ended with an error."""
        self._metrics[place] = update.metrics
        for delta in update.deltas:
            if delta.finish_reason == "error":
                message = str(delta.stop_reason)
                if self._has_grammar and message != NOT_FINITE:  # no token fits
                    raise bad_request(message, "structured_outputs", "grammar_failed")
                raise generation_failed(message)
            if self._counts_output:
                self._num_output_tokens += len(delta.token_ids)

    def usage(self) -> Usage:
        metrics = [it for it in self._metrics if it is not None]
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        cached = sum(it.num_cached_tokens for it in metrics)
        usage = Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            total_tokens=num_prompt_tokens + self._num_output_tokens,
            # Each sample counts its own cache hits, but the prompt counts only once.
            prompt_tokens_details=PromptTokensDetails(cached_tokens=min(cached, num_prompt_tokens)),
        )
        if self._return_speculation:
            usage.speculation = _speculation(metrics)
        return usage

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestUpdate], None]:
        # One update of each stream is read ahead; the streams merge further ones meanwhile.
        reads = {asyncio.create_task(_next(it)): place for place, it in enumerate(self._streams)}
        try:
            while reads:
                done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                for read in done:
                    place, update = reads.pop(read), read.result()
                    if update is not None:
                        reads[asyncio.create_task(_next(self._streams[place]))] = place
                        yield place, update
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)


async def _next(stream: UpdateStream) -> RequestUpdate | None:
    return await anext(stream, None)


def _speculation(metrics: Sequence[RequestMetrics]) -> SpeculationUsage:
    total = RequestMetrics()
    for one in metrics:
        total.add(one)
    return SpeculationUsage(
        drafts=total.num_drafts,
        draft_tokens=total.num_draft_tokens,
        accepted_tokens=total.num_accepted_tokens,
        accepted_per_position=total.num_accepted_tokens_per_pos,
        steps=total.num_steps,
        steps_by_draft_tokens=total.num_steps_by_draft_tokens,
        acceptance_length=total.acceptance_length,
        estimated_speedup=total.estimated_speedup,
        decode_seconds=total.decode_seconds,
        refused_drafting_seconds=total.refused_drafting_seconds,
    )
