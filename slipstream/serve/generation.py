"""The requests that one HTTP request becomes: one for each prompt, read as one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import chain

from slipstream.core.outputs import RequestMetrics
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.prompts import EncodedPrompt
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.errors import ApiError, bad_request, generation_failed
from slipstream.serve.logs import current_request_id
from slipstream.serve.progress import Delta, Progress
from slipstream.serve.protocol.usage import PromptTokensDetails, SpeculationUsage, Usage
from slipstream.serve.stream import Stream


class Generation:
    """Runs prompts and counts their tokens.

    Args:
        return_speculation: the usage says what speculation did.
        counts_output: whether what comes is used; the engine gives a token at least.
    """

    def __init__(
        self,
        prompts: Sequence[EncodedPrompt],
        return_speculation: bool,
        counts_output: bool = True,
    ) -> None:
        self.prompts = prompts
        self._num_output_tokens = 0
        self._metrics: list[RequestMetrics | None] = [None] * len(prompts)
        self._streams: list[Stream] = []
        self._return_speculation, self._counts_output = return_speculation, counts_output
        self._has_grammar = False

    async def start(self, thread: EngineThread, params: SamplingParams) -> None:
        """Queue everything or nothing; raises what `EngineThread.submit` does."""
        self._has_grammar = params.structured is not None
        self._streams = await thread.submit_all(current_request_id(), self.prompts, params)

    async def steps(self) -> AsyncGenerator[tuple[int, Progress], None]:
        """What the prompts gain, by their places; closing this early ends them all."""
        try:
            if len(self._streams) == 1:
                async for progress in self._streams[0]:
                    self._count(0, progress)
                    yield 0, progress
                return
            async with aclosing(self._merged()) as merged:
                async for place, progress in merged:
                    self._count(place, progress)
                    yield place, progress
        finally:
            await self._leave()

    def _count(self, place: int, progress: Progress) -> None:
        """Take it in; ApiError for an output that the engine had to break off."""
        self._metrics[place] = progress.metrics
        for delta in progress.deltas:
            if delta.finish_reason == "error":
                raise self._broken_off(str(delta.stop_reason))
            if self._counts_output:
                self._num_output_tokens += len(delta.token_ids)

    def _broken_off(self, message: str) -> ApiError:
        """Nothing fits the request's grammar, or the model's logits are not finite."""
        if self._has_grammar and message.startswith("the grammar"):
            return bad_request(message, "structured_outputs", "grammar_failed")
        return generation_failed(message)

    def usage(self) -> Usage:
        """Tokens so far."""
        metrics = [it for it in self._metrics if it is not None]
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        cached = sum(it.num_cached_tokens for it in metrics)
        details = {"speculation": _speculation(metrics)} if self._return_speculation else {}
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            total_tokens=num_prompt_tokens + self._num_output_tokens,
            # A prompt counts once however many samples have found it.
            prompt_tokens_details=PromptTokensDetails(cached_tokens=min(cached, num_prompt_tokens)),
            **details,
        )

    async def _merged(self) -> AsyncGenerator[tuple[int, Progress], None]:
        # One place: whoever reads slowly is not run away from, and increments are merged instead.
        news: asyncio.Queue[tuple[int, Progress | Exception | None]] = asyncio.Queue(1)
        readers = [
            asyncio.create_task(_read(place, stream, news))
            for place, stream in enumerate(self._streams)
        ]
        try:
            open_streams = len(readers)
            while open_streams:
                place, item = await news.get()
                if item is None:
                    open_streams -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield place, item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _leave(self) -> None:
        for stream in self._streams:
            await stream.aclose()


async def _read(
    place: int, stream: Stream, news: "asyncio.Queue[tuple[int, Progress | Exception | None]]"
) -> None:
    try:
        async for progress in stream:
            await news.put((place, progress))
    except Exception as error:
        await news.put((place, error))
    else:
        await news.put((place, None))


def joined(deltas: Sequence[Delta]) -> Delta:
    """All that one sample gained, in order."""
    last = deltas[-1]
    return Delta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[*chain.from_iterable(delta.token_ids for delta in deltas)],
        logprobs=(
            None
            if last.logprobs is None
            else [*chain.from_iterable(delta.logprobs or () for delta in deltas)]
        ),
        origins=[*chain.from_iterable(delta.origins for delta in deltas)],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def _speculation(metrics: Sequence[RequestMetrics]) -> SpeculationUsage:
    total = RequestMetrics()
    for one in metrics:
        total.num_drafts += one.num_drafts
        total.num_draft_tokens += one.num_draft_tokens
        total.num_accepted_tokens += one.num_accepted_tokens
        total.num_steps += one.num_steps
        counts, own = total.num_accepted_tokens_per_pos, one.num_accepted_tokens_per_pos
        counts.extend([0] * (len(own) - len(counts)))
        for position, count in enumerate(own):
            counts[position] += count
    return SpeculationUsage(
        drafts=total.num_drafts,
        draft_tokens=total.num_draft_tokens,
        accepted_tokens=total.num_accepted_tokens,
        accepted_per_position=total.num_accepted_tokens_per_pos,
        steps=total.num_steps,
        acceptance_length=total.acceptance_length,
    )
