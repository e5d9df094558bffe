"""Drafters against K on one workload: AL, tokens per second and the time of an iteration.

Every point has an engine of its own, and plain decoding is measured before and after the drafters
of each batch size: a machine whose speed drifts shows in the difference.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from slipstream.bench.workload import Workload

if TYPE_CHECKING:
    from slipstream.core.outputs import RequestMetrics, RequestOutput
    from slipstream.engine.llm import LLM

PLAIN = "plain"
Open = Callable[[dict[str, Any] | None, int], "LLM"]  # speculative_config, batch -> an engine


@dataclass(frozen=True)
class Point:
    """One drafter, K and batch size.

    Attributes:
        acceptance_length: 1 + accepted draft tokens per draft.
        per_position: of all drafts, the share whose i-th token was accepted.
        tokens_per_second: output tokens over the wall time of the whole workload.
        iteration_ms: mean time of a step, prompt chunks included.
        shares: of the steps' time: draft, target, rest.
        times_plain: tokens per second over those of plain decoding at this batch size.
    """

    drafter: str
    k: int
    batch: int
    acceptance_length: float
    per_position: tuple[float, ...]
    tokens_per_second: float
    iteration_ms: float
    shares: Mapping[str, float]
    times_plain: float = 1.0


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        drafters: a `speculative_config` without K, by the name to show.
        counts: the Ks.
        batches: most requests that run at once.
    """

    drafters: Mapping[str, Mapping[str, Any]]
    counts: Sequence[int]
    batches: Sequence[int]

    @property
    def num_points(self) -> int:
        return len(self.batches) * (2 + len(self.drafters) * len(self.counts))

    def run(self, open_llm: Open, workload: Workload) -> Iterator[Point]:
        """Points as they are measured; the second plain one of a batch size comes last.

        Ratios are to the first plain point.
        """
        for batch in self.batches:
            plain = _measure(PLAIN, 0, batch, None, open_llm, workload)
            yield plain
            for name, config in self.drafters.items():
                for k in self.counts:
                    whole = {**config, "num_speculative_tokens": k}
                    yield _measure(name, k, batch, whole, open_llm, workload, plain)
            yield _measure(PLAIN, 0, batch, None, open_llm, workload, plain)


def _measure(
    name: str,
    k: int,
    batch: int,
    config: dict[str, Any] | None,
    open_llm: Open,
    workload: Workload,
    plain: Point | None = None,
) -> Point:
    llm = open_llm(config, batch)
    _warm_up(llm)
    before = _Clock(llm)
    began = perf_counter()
    outputs = workload.run(llm)
    seconds = perf_counter() - began
    after = _Clock(llm)
    accepted = _accepted(outputs)
    rate = sum(len(sample.token_ids) for it in outputs for sample in it.outputs) / seconds
    parts = [mine - old for mine, old in zip(after.parts, before.parts, strict=True)]
    point = Point(
        drafter=name,
        k=k,
        batch=batch,
        acceptance_length=1.0 + sum(accepted),
        per_position=tuple(accepted),
        tokens_per_second=rate,
        iteration_ms=sum(parts) / max(1, after.steps - before.steps) * 1e3,
        shares={
            part: own / max(sum(parts), 1e-12)
            for part, own in zip(("draft", "target", "rest"), parts, strict=True)
        },
        times_plain=1.0 if plain is None else rate / plain.tokens_per_second,
    )
    del llm, outputs
    gc.collect()  # the next engine wants the memory
    return point


def _warm_up(llm: "LLM") -> None:
    """Every kind of step once; few tokens, whatever they are."""
    from slipstream.core.sampling_params import SamplingParams

    ids = [1 + index % 7 for index in range(24)]
    llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=12))


class _Clock:
    """An engine's totals at a moment."""

    def __init__(self, llm: "LLM") -> None:
        metrics = llm.metrics
        self.steps = metrics.num_steps
        self.parts = (metrics.draft_seconds, metrics.target_seconds, metrics.rest_seconds)


def _accepted(outputs: "Sequence[RequestOutput]") -> list[float]:
    """Of all drafts, the share whose i-th token was accepted."""
    all_metrics: list[RequestMetrics] = [output.metrics for output in outputs]
    drafts = sum(metrics.num_drafts for metrics in all_metrics)
    width = max((len(metrics.num_accepted_tokens_per_pos) for metrics in all_metrics), default=0)
    counts = [0] * width
    for metrics in all_metrics:
        for place, count in enumerate(metrics.num_accepted_tokens_per_pos):
            counts[place] += count
    return [count / max(1, drafts) for count in counts]
