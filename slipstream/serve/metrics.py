"""Prometheus metrics, with the names and meanings that vLLM's dashboards know.

Totals that the engine counts anyway are read on request; only distributions are observed as they
come.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
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

from slipstream.engine.drafting.policy import AdaptivePolicy
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
    """The registry of one server; an `Observer` of its engine's thread.

    Args:
        model_name: a label of all metrics.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._engine_totals = _EngineTotals(engine, model_name)
        self.registry.register(self._engine_totals)
        self._inter_token = _UnlockedHistogram(
            "inter_token_latency_seconds",
            "Between two steps that gave a request tokens",
            _PER_TOKEN,
            model_name,
        )
        self.registry.register(self._inter_token)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            labels, registry = ["model_name"], self.registry
            made = Histogram(PREFIX + name, text, labels, buckets=buckets, registry=registry)
            return made.labels(model_name)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after the first",
            _PER_TOKEN,
        )
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the end", _WHOLE)
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens", _TOKENS)
        self._output_sizes = histogram("request_generation_tokens", "Output tokens", _TOKENS)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, ["model_name", *labels], registry=self.registry)

        prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began")
        self._prompt_tokens = prompt_tokens.labels(model_name)
        success = counter("request_success", "Requests that ended", "finished_reason")
        self._ended = {reason: success.labels(model_name, reason) for reason in REASONS}

    def render(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def tokens_added(self, submission: Submission, gap: float | None) -> None:
        """Observe the time since the request's last tokens."""
        if gap is not None:
            self._inter_token.observe(gap)
            return
        first = submission.metrics.time_to_first_token
        if first is not None:
            self._first_token.observe(first)
        self._prompt_tokens.inc(len(submission.prompt_token_ids))

    def request_ended(self, request_id: str, submission: Submission, reason: str) -> None:
        """Observe the request's size and times."""
        self._ended[reason].inc()
        metrics = submission.metrics
        latency, first = metrics.latency, metrics.time_to_first_token
        num_tokens = sum(sample.num_taken for sample in submission.samples)
        self._prompt_sizes.observe(len(submission.prompt_token_ids))
        self._output_sizes.observe(num_tokens)
        if latency is None:
            return
        self._latency.observe(latency)
        after_first = num_tokens / len(submission.samples) - 1
        if first is not None and after_first > 0:
            self._per_token.observe((latency - first) / after_first)

    def step_done(self, engine: Engine) -> None:
        """Note the drafts of the step."""
        self._engine_totals.note_drafts()


class _OneModelCollector(Collector):
    """Builds metric families with the label of one model."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering does not collect."""
        return iter(())

    def _family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float],
        label: str | None = None,
    ) -> Metric:
        """One metric; with a further label, one value for each of its values."""
        labels = ["model_name"] if label is None else ["model_name", label]
        family = kind(PREFIX + name, text, labels=labels)
        for key, value in values.items():
            family.add_metric([self._model_name, key][: len(labels)], value)
        return family


class _UnlockedHistogram(_OneModelCollector):
    """A histogram without a lock, which would cost more than its two additions: only the engine's
    thread observes, for every request in every step."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> None:
        super().__init__(model_name)
        self._name, self._text, self._bounds = PREFIX + name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        """The metric."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        names = [*map(str, self._bounds), "+Inf"]
        counts = accumulate([*self._counts])
        family.add_metric([self._model_name], [*zip(names, counts, strict=True)], self._sum)
        yield family


class _EngineTotals(_OneModelCollector):
    """Reads the engine's counts, from any thread: they are plain numbers."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        super().__init__(model_name)
        self._engine = engine
        self._drafts = self._draft_tokens = 0
        self._current_k = 0.0

    def note_drafts(self) -> None:
        """Keep the draft tokens per draft of the last step that drafted."""
        seen = self._engine.metrics.speculation
        drafts = seen.num_drafts - self._drafts
        if drafts:
            self._current_k = (seen.num_draft_tokens - self._draft_tokens) / drafts
            self._drafts, self._draft_tokens = seen.num_drafts, seen.num_draft_tokens

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        yield from self._totals()
        yield from self._choices()

    def _totals(self) -> Iterator[Metric]:
        scheduler, metrics = self._engine.scheduler, self._engine.metrics
        blocks, spec = scheduler.block_manager, metrics.speculation
        limits = self._engine.resolved.limits
        gauges = (
            ("num_requests_running", "Samples that have a place", scheduler.num_running),
            ("num_requests_waiting", "Samples that wait for a place", scheduler.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it", blocks.usage),
            ("num_speculative_tokens", "K: most draft tokens", limits.num_speculative_tokens),
            ("spec_decode_current_k", "Draft tokens a draft, in the last step", self._current_k),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up", blocks.num_queried_tokens),
            ("prefix_cache_hits", "Prompt tokens found", blocks.num_hit_tokens),
            ("generation_tokens", "Output tokens", metrics.num_output_tokens),
            ("num_nonfinite_logits", "Samples whose logits were not finite", metrics.num_broken),
            ("num_preemptions", "Requests that gave their blocks back", scheduler.num_preemptions),
            ("engine_steps", "Steps of the engine", metrics.num_steps),
            ("spec_decode_num_drafts", "Drafts", spec.num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens", spec.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens", spec.num_accepted_tokens),
            (
                "spec_decode_refused_drafting_seconds",
                "Time spent on draft tokens that were refused",
                spec.refused_drafting_seconds,
            ),
        )
        for name, text, value in gauges:
            yield self._family(GaugeMetricFamily, name, text, {"": value})
        for name, text, count in counters:
            yield self._family(CounterMetricFamily, name, text, {"": count})
        accepted = [*spec.num_accepted_tokens_per_pos]
        accepted += [0] * (limits.num_positions - len(accepted))
        yield self._family(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft",
            {str(position): count for position, count in enumerate(accepted)},
            "position",
        )
        yield self._family(
            CounterMetricFamily,
            "step_time_seconds",
            "Time of the steps: drafting, the target's pass, verification, the rest",
            metrics.seconds,
            "part",
        )

    def _choices(self) -> Iterator[Metric]:
        """How much was drafted, and where that is chosen, what the choice rests on."""
        engine = self._engine
        spec, policy = engine.metrics.speculation, engine.scheduler.policy
        yield self._family(
            CounterMetricFamily,
            "spec_decode_num_draft_tokens_chosen",
            "Steps that gave a request tokens, by the draft tokens it had",
            {str(k): count for k, count in enumerate([*spec.num_steps_by_draft_tokens])},
            "k",
        )
        speedup = spec.estimated_speedup
        if speedup is not None:
            name, text = "spec_decode_estimated_speedup", "Estimated speed-up over plain decoding"
            yield self._family(GaugeMetricFamily, name, text, {"": speedup})
        costs = GaugeMetricFamily(
            PREFIX + "step_cost_seconds",
            "Predicted time of a decode step in which each request drafts so many tokens",
            labels=["model_name", "requests", "draft_tokens"],
        )
        for row in engine.costs:
            labels = [self._model_name, str(row.requests), str(row.drafts)]
            costs.add_metric(labels, row.seconds)
        yield costs
        if isinstance(policy, AdaptivePolicy):
            bins = policy.acceptance.reliability.bins
            tops = [f"{(place + 1) / len(bins):g}" for place in range(len(bins))]
            for name, text, values in (
                ("judged", "Draft tokens that were judged", [it.count for it in bins]),
                ("accepted", "Those of them that were accepted", [it.accepted for it in bins]),
                ("predicted", "Sum of their predicted chances", [it.predicted for it in bins]),
            ):
                yield self._family(
                    CounterMetricFamily,
                    f"spec_decode_reliability_{name}",
                    f"{text}, by predicted chance up to `bin`",
                    dict(zip(tops, values, strict=True)),
                    "bin",
                )
