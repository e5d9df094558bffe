"""What Prometheus reads: the quantities, and the meanings, that dashboards of such servers know.

Totals that the engine keeps anyway are read when somebody asks; only what needs a distribution is
observed as it happens.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from slipstream.engine.engine import Engine
from slipstream.engine.samples import Submission

PREFIX = "slipstream:"
REASONS = ("stop", "length", "abort", "error", "timeout")

_SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2)
_PER_TOKEN = (*_SHORT, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_FIRST_TOKEN = (*_SHORT, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0)
_WHOLE = (*_SECONDS, 240.0, 480.0, 960.0, 1920.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class ServerMetrics:
    """The registry of one server; a `Watcher` of its engine's thread.

    Args:
        model_name: label of everything.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._engine_totals = _EngineTotals(engine, model_name)
        self.registry.register(self._engine_totals)
        self._model_name = model_name
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN
        )
        self._itl = _Gaps(
            PREFIX + "inter_token_latency_seconds",
            "Between two steps that gave a request tokens",
            _PER_TOKEN,
            model_name,
        )
        self.registry.register(self._itl)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token behind the first",
            _PER_TOKEN,
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end", _WHOLE
        )
        self._prompt_sizes = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request", _TOKENS
        )
        self._output_sizes = self._histogram(
            "request_generation_tokens", "Output tokens of a request", _TOKENS
        )
        prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that began")
        self._prompt_tokens = prompt_tokens.labels(model_name)
        success = self._counter("request_success", "Requests that ended", "finished_reason")
        self._ended = {reason: success.labels(model_name, reason) for reason in REASONS}

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def gained(self, submission: Submission, num_tokens: int, gap: float | None) -> None:
        """A step gave a request tokens."""
        if gap is not None:
            self._itl.observe(gap)
            return
        first = submission.metrics.time_to_first_token
        if first is not None:
            self._ttft.observe(first)
        self._prompt_tokens.inc(len(submission.prompt_token_ids))

    def ended(self, request_id: str, submission: Submission, reason: str) -> None:
        """A request ended."""
        self._ended[reason].inc()
        metrics = submission.metrics
        latency, first = metrics.latency, metrics.time_to_first_token
        num_tokens = sum(sample.num_taken for sample in submission.samples)
        self._prompt_sizes.observe(len(submission.prompt_token_ids))
        self._output_sizes.observe(num_tokens)
        if latency is None:
            return
        self._latency.observe(latency)
        behind_first = num_tokens / len(submission.samples) - 1
        if first is not None and behind_first > 0:
            self._tpot.observe((latency - first) / behind_first)

    def stepped(self, engine: Engine) -> None:
        """A step is done."""
        self._engine_totals.look()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(
            PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry
        )
        return made.labels(self._model_name)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name", *labels], registry=self.registry)


class _Gaps(Collector):
    """A histogram of one writer, the engine's thread: it is fed for every request in every step,
    and a lock around two additions costs more than they do."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering does not collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        names = [*map(str, self._bounds), "+Inf"]
        counts = accumulate([*self._counts])
        family.add_metric([self._model_name], [*zip(names, counts, strict=True)], self._sum)
        yield family


class _EngineTotals(Collector):
    """Reads the engine's own counts, from any thread: they are plain numbers."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name
        self._drafts = self._draft_tokens = 0
        self._current_k = 0.0

    def look(self) -> None:
        """Draft tokens a draft in the last step that drafted."""
        seen = self._engine.metrics.speculation
        drafts = seen.num_drafts - self._drafts
        if drafts:
            self._current_k = (seen.num_draft_tokens - self._draft_tokens) / drafts
            self._drafts, self._draft_tokens = seen.num_drafts, seen.num_draft_tokens

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering does not collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        engine, scheduler = self._engine, self._engine.scheduler
        blocks, metrics = scheduler.block_manager, engine.metrics
        spec = metrics.speculation
        used = 1.0 - blocks.num_available / blocks.num_blocks
        gauges = (
            ("num_requests_running", "Samples that have a place", scheduler.num_running),
            ("num_requests_waiting", "Samples that wait for one", scheduler.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it", used),
            (
                "num_speculative_tokens",
                "K: most draft tokens",
                engine.resolved.limits.num_speculative_tokens,
            ),
            ("spec_decode_current_k", "Draft tokens a draft, in the last step", self._current_k),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up", blocks.num_queried_tokens),
            ("prefix_cache_hits", "Prompt tokens found", blocks.num_hit_tokens),
            ("generation_tokens", "Output tokens", metrics.num_output_tokens),
            ("num_preemptions", "Requests that gave their blocks back", scheduler.num_preemptions),
            ("engine_steps", "Steps of the engine", metrics.num_steps),
            ("spec_decode_num_drafts", "Drafts", spec.num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens", spec.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens", spec.num_accepted_tokens),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, count in counters:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model_name], count)
            yield counter
        yield self._positions([*spec.num_accepted_tokens_per_pos])
        yield self._step_times()

    def _positions(self, counts: list[int]) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their place in the draft",
            labels=["model_name", "position"],
        )
        most = self._engine.resolved.limits.num_positions
        for position, count in enumerate([*counts, *[0] * (most - len(counts))]):
            family.add_metric([self._model_name, str(position)], count)
        return family

    def _step_times(self) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "step_time_seconds",
            "Time of the steps: drafting, the target's pass, verification, the rest",
            labels=["model_name", "part"],
        )
        for part, seconds in self._engine.metrics.seconds.items():
            family.add_metric([self._model_name, part], seconds)
        return family
