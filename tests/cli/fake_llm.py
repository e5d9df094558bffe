"""An LLM without a model: every prompt is continued by a fixed text, one byte a token."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from slipstream.core.sampling_params import SamplingDefaults, SamplingParams
from slipstream.engine.metrics import EngineMetrics

STEP = 5  # tokens of one step: four accepted ones and the target's own


class ByteTokenizer:
    """Token ids are bytes."""

    path = Path("fake")
    special_tokens: ClassVar[dict[str, str]] = {}
    settings: ClassVar[dict[str, Any]] = {"chat_template": "{{ messages[-1].content }}"}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class FakeLLM:
    """Records what it was asked; answers `reply` to everything."""

    reply = "Hello, wörld!\nSecond line.\n"
    reason = "length"
    defaults: ClassVar[SamplingDefaults] = SamplingDefaults()
    made: ClassVar[list["FakeLLM"]] = []

    def __init__(self, config: EngineConfig, progress_bar: Any = None) -> None:
        if progress_bar is not None:
            with progress_bar("loading fake", 10, "bytes") as report:
                report(10)
        self.options, self.tokenizer, self.metrics = vars(config), ByteTokenizer(), EngineMetrics()
        self.engine = SimpleNamespace(
            resolved=SimpleNamespace(
                method="draft_model",
                device=torch.device("cpu"),
                dtype=torch.bfloat16,
                num_blocks=8,
                seed=config.seed,
                drafts="4",
                sampling_defaults=self.defaults,
                limits=SimpleNamespace(
                    cache_bounds_length=False,
                    num_speculative_tokens=4,
                    max_model_len=64,
                    drafter_max_model_len=32,
                    max_num_seqs=2,
                    max_num_batched_tokens=16,
                ),
                reasons=(("num_kv_blocks", "8", "because"), ("async_scheduling", "False", "turns")),
            )
        )
        self.prompts: list[str] = []
        self.params: SamplingParams | None = None
        self.conversations: list[list[dict[str, str]]] = []
        self.templates: list[str | None] = []
        self.aborted: list[str] = []
        self._next = 0
        FakeLLM.made.append(self)

    def stream(self, prompts: Sequence[str], params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts, self.params = list(prompts), params
        return self._run(list(prompts), params)

    def stream_chat(
        self,
        messages: Sequence[dict[str, str]],
        params: SamplingParams,
        chat_template: str | None = None,
    ) -> Iterator[RequestOutput]:
        self.templates.append(chat_template)
        self.conversations.append([dict(message) for message in messages])
        self.params = params
        if len(messages[-1]["content"]) > 40:
            raise UsageError("the prompt has more tokens than max_model_len=40")
        return self._run([messages[-1]["content"]], params)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def _run(self, prompts: list[str], params: SamplingParams) -> Iterator[RequestOutput]:
        """Later prompts end first, so their outputs must be held back."""
        first, self._next = self._next, self._next + len(prompts)
        ids = list(self.reply.encode())[: params.max_tokens]
        lengths = [*range(STEP, len(ids), STEP), len(ids)]
        for place in reversed(range(len(prompts))):
            metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.5)
            for length in lengths:
                metrics.num_steps += 1
                metrics.count_draft(4, 3)
                self.metrics.speculation.count_draft(4, 3)
                self.metrics.draft_seconds += 1.0
                self.metrics.target_seconds += 2.0
                self.metrics.verify_seconds += 1.0
                done = length == len(ids)
                metrics.finished_time = 3.0 if done else None
                yield RequestOutput(
                    request_id=str(first + place),
                    prompt=prompts[place],
                    prompt_token_ids=list(prompts[place].encode()),
                    prompt_logprobs=None if params.prompt_logprobs is None else [None],
                    outputs=[_sample(i, ids[:length], done, params) for i in range(params.n)],
                    finished=done,
                    metrics=metrics,
                )


def _sample(index: int, ids: list[int], done: bool, params: SamplingParams) -> CompletionOutput:
    logprobs = None
    if params.logprobs is not None:
        logprobs = [{token: Logprob(-0.5, 1, chr(token))} for token in ids]
    return CompletionOutput(
        index=index,
        text=_whole_characters(ids) if not done else bytes(ids).decode(errors="replace"),
        token_ids=ids,
        cumulative_logprob=None if logprobs is None else -0.5 * len(ids),
        logprobs=logprobs,
        from_draft=[place % STEP != STEP - 1 for place in range(len(ids))],
        finish_reason=FakeLLM.reason if done else None,
        stop_reason="it broke" if done and FakeLLM.reason == "error" else None,
    )


def _whole_characters(ids: list[int]) -> str:
    return bytes(ids).decode(errors="ignore")
