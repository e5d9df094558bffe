"""Prometheus metrics of a server.

Counters and gauges are read from the engine when the metrics are scraped; only histograms are
updated while requests run.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from slipstream.engine.drafting.policy import AdaptivePolicy
from slipstream.engine.engine import Engine
from slipstream.engine.samples import Submission
from slipstream.serve.metric_families import Families, Histogram, Kind, Values
from slipstream.serve.observers import Observer

Row = tuple[Kind, str, str, Values, *tuple[str, ...]]  # with the names of further labels

_METHODS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD")  # all else is "other"
_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily
_DRAFTED = {
    "num_drafts": "Drafts",
    "num_draft_tokens": "Draft tokens",
    "num_accepted_tokens": "Accepted draft tokens",
}
REASONS = ("stop", "length", "abort", "error", "timeout")

# Bounds of buckets: all of vLLM's, so that queries by `le` work, and finer ones for fast models.
_FAST = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.08),
    *(0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
    *(640.0, 2560.0),
)
_SECONDS = (
    *(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = tuple(2**power for power in range(15))
_FEW = (1, 2, 3, 4, 5, 10, 20)


def _histograms(max_model_len: int) -> dict[str, Histogram]:
    series = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    tokens = tuple(bound for bound in series if bound <= max_model_len)
    made = (
        ("time_to_first_token_seconds", "From arrival to the first token", _FAST),
        ("inter_token_latency_seconds", "Between two steps that gave a request tokens", _FAST),
        (
            "request_time_per_output_token_seconds",
            "A request's mean time per token after the first",
            _FAST,
        ),
        ("e2e_request_latency_seconds", "From arrival to the end", _SECONDS),
        ("request_queue_time_seconds", "From arrival to a place among those that run", _SECONDS),
        ("request_prefill_time_seconds", "From the place to the first token", _SECONDS),
        ("request_decode_time_seconds", "From the first token to the end", _SECONDS),
        ("request_inference_time_seconds", "From the place to the end", _SECONDS),
        ("request_prompt_tokens", "Prompt tokens", tokens),
        ("request_generation_tokens", "Output tokens", tokens),
        ("request_max_num_generation_tokens", "Output tokens of the longest sample", tokens),
        ("request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache", tokens),
        ("request_params_max_tokens", "Output tokens that a sample may have", tokens),
        ("request_params_n", "Samples asked for", _FEW),
        ("request_num_preemptions", "How often a request gave its blocks back", _FEW),
        ("iteration_tokens_total", "Prompt and output tokens of a step", _STEP_TOKENS),
    )
    return {name: Histogram(text, bounds) for name, text, bounds in made}


class ServerMetrics(Collector, Observer):
    """The metrics of one server; arguments as for `Families`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine, model_name: str, as_vllm: bool = False) -> None:
        self._families = Families(model_name, as_vllm)
        self._engine_totals = _EngineTotals(engine)
        self._histograms = _histograms(engine.resolved.limits.max_model_len)
        self._inter_token = self._histograms["inter_token_latency_seconds"]
        self._step_tokens = self._histograms["iteration_tokens_total"]
        self._answers: Counter[tuple[str, ...]] = Counter()
        self._ended = dict.fromkeys(REASONS, 0)
        self._prompt_tokens = self._cached_tokens = 0
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> Iterator[Metric]:
        """Yields nothing, so that registration does not call `collect`."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All metrics but those of the process."""
        for name, histogram in self._histograms.items():
            yield self._families.histogram(name, histogram)
        for kind, name, text, values, *labels in (*self._engine_totals.rows(), *self._rows()):
            yield self._families.family(kind, name, text, values, *labels)

    def _rows(self) -> Iterator[Row]:
        found, cached = self._prompt_tokens, self._cached_tokens
        sources = {"local_compute": found - cached, "local_cache_hit": cached}
        yield _COUNTER, "prompt_tokens", "Prompt tokens of requests that began", found
        yield _COUNTER, "prompt_tokens_cached", "Those found in the prefix cache", cached
        text = "Prompt tokens, computed or found"
        yield _COUNTER, "prompt_tokens_by_source", text, sources, "source"
        yield _COUNTER, "request_success", "Requests that ended", self._ended, "finished_reason"
        answers = self._answers.copy()
        yield _COUNTER, "http_requests", "Answers of the server", answers, "method", "status"

    def count_answer(self, method: str, status: int) -> None:
        """Count an HTTP response, if it has a status; called on the event loop."""
        if status:
            method = method if method in _METHODS else "other"
            self._answers[method, f"{status // 100}xx"] += 1

    def tokens_added(self, submission: Submission, gap: float | None) -> None:
        """Observe the inter-token latency, or at the first tokens the TTFT and prompt tokens."""
        if gap is not None:
            self._inter_token.observe(gap)
            return
        first = submission.metrics.time_to_first_token
        if first is not None:
            self._histograms["time_to_first_token_seconds"].observe(first)
        self._prompt_tokens += len(submission.prompt_token_ids)
        self._cached_tokens += submission.samples[0].request.num_cached_tokens

    def request_ended(self, request_id: str, submission: Submission, reason: str) -> None:
        self._ended[reason] += 1
        num_prompt, samples = len(submission.prompt_token_ids), submission.samples
        lengths = [sample.num_taken for sample in samples]
        values: dict[str, float] = {
            "request_prompt_tokens": num_prompt,
            "request_generation_tokens": sum(lengths),
            "request_max_num_generation_tokens": max(lengths),
            "request_prefill_kv_computed_tokens": num_prompt - samples[0].request.num_cached_tokens,
            "request_params_max_tokens": samples[0].request.max_tokens,
            "request_params_n": len(samples),
            "request_num_preemptions": sum(sample.request.num_preemptions for sample in samples),
        }
        for name, value in (values | _times(submission, sum(lengths))).items():
            self._histograms[name].observe(value)

    def step_done(self, engine: Engine) -> None:
        self._step_tokens.observe(self._engine_totals.note_step())


def _times(submission: Submission, num_tokens: int) -> dict[str, float]:
    """Seconds of each phase that a request has reached, by histogram; empty if it failed."""
    metrics = submission.metrics
    arrival, first, end = metrics.arrival_time, metrics.first_token_time, metrics.finished_time
    if end is None:  # it has failed
        return {}
    times = {"e2e_request_latency_seconds": end - arrival}
    places = [sample.request.place_time for sample in submission.samples]
    placed = min((time for time in places if time is not None), default=None)
    if placed is not None:
        times["request_queue_time_seconds"] = placed - arrival
        times["request_inference_time_seconds"] = end - placed
        if first is not None:
            times["request_prefill_time_seconds"] = first - placed
    if first is not None:
        times["request_decode_time_seconds"] = end - first
        after_first = num_tokens / len(submission.samples) - 1
        if after_first > 0:
            times["request_time_per_output_token_seconds"] = (end - first) / after_first
    return times


class _EngineTotals:
    """Exports the engine's counts; safe on any thread, as they are plain numbers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens = self._drafts = self._draft_tokens = 0
        self._current_k = 0.0

    def note_step(self) -> int:
        """Number of tokens in the last step; also updates the draft tokens per draft."""
        metrics = self._engine.metrics
        before, seen = self._tokens, metrics.speculation
        self._tokens = metrics.num_prompt_tokens + metrics.num_output_tokens
        drafts = seen.num_drafts - self._drafts
        if drafts:
            self._current_k = (seen.num_draft_tokens - self._draft_tokens) / drafts
            self._drafts, self._draft_tokens = seen.num_drafts, seen.num_draft_tokens
        return self._tokens - before

    def rows(self) -> Iterator[Row]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._drafting()

    def _gauges(self) -> Iterator[Row]:
        scheduler, resolved = self._engine.scheduler, self._engine.resolved
        blocks, most = scheduler.block_manager, resolved.limits.num_speculative_tokens
        running, waiting = scheduler.num_running, scheduler.num_waiting
        yield _GAUGE, "num_requests_running", "Samples that have a place", running
        yield _GAUGE, "num_requests_waiting", "Samples that wait for a place", waiting
        text = "Samples that wait: all for a place, none for anything else"
        reasons = {"capacity": waiting, "deferred": 0}
        yield _GAUGE, "num_requests_waiting_by_reason", text, reasons, "reason"
        text = "Share of the KV cache in use; 1 is all of it"
        yield _GAUGE, "kv_cache_usage_perc", text, blocks.usage
        text = "Checkpoints of recurrent states that prefixes can be resumed from"
        yield _GAUGE, "state_checkpoints", text, blocks.num_checkpoints
        yield _GAUGE, "num_speculative_tokens", "K: most draft tokens", most
        text = "Draft tokens a draft, in the last step"
        yield _GAUGE, "spec_decode_current_k", text, self._current_k
        cache = {
            "block_size": blocks.block_size,
            "num_gpu_blocks": blocks.num_all_blocks,
            "kv_cache_size_tokens": blocks.num_all_blocks * blocks.block_size,
            "cache_dtype": resolved.cache_dtype_name,
        }
        text = "1; the labels tell the size of the KV cache, on any device"
        yield _GAUGE, "cache_config_info", text, {tuple(cache.values()): 1}, *cache

    def _counters(self) -> Iterator[Row]:
        scheduler, metrics = self._engine.scheduler, self._engine.metrics
        blocks, spec = scheduler.block_manager, metrics.speculation
        for name, text, count in (
            ("prefix_cache_queries", "Prompt tokens looked up", blocks.num_queried_tokens),
            ("prefix_cache_hits", "Prompt tokens found", blocks.num_hit_tokens),
            ("generation_tokens", "Output tokens", metrics.num_output_tokens),
            ("num_nonfinite_logits", "Samples whose logits were not finite", metrics.num_broken),
            ("num_preemptions", "Requests that gave their blocks back", scheduler.num_preemptions),
            ("engine_steps", "Steps of the engine", metrics.num_steps),
            *(
                (f"spec_decode_{name}", text, getattr(spec, name))
                for name, text in _DRAFTED.items()
            ),
        ):
            yield _COUNTER, name, text, count
        text = "Time spent on draft tokens that were refused"
        refused = spec.refused_drafting_seconds
        yield _COUNTER, "spec_decode_refused_drafting_seconds", text, refused
        accepted = [*spec.num_accepted_tokens_per_pos]
        accepted += [0] * (self._engine.resolved.limits.num_positions - len(accepted))
        text = "Accepted draft tokens by their position in the draft"
        by_position = dict(enumerate(accepted))
        yield _COUNTER, "spec_decode_num_accepted_tokens_per_pos", text, by_position, "position"
        # A drafter may predict the output of an adapter less well.
        adapters = {**metrics.adapters}
        for name, text in _DRAFTED.items():
            values = {key: getattr(it, name) for key, it in adapters.items()}
            text += " of the requests with an adapter"
            yield _COUNTER, f"adapter_{name}", text, values, "adapter"
        text = "Time of the steps: drafting, the target's pass, verification, the rest"
        yield _COUNTER, "step_time_seconds", text, metrics.seconds, "part"

    def _drafting(self) -> Iterator[Row]:
        """Draft lengths, estimated speed-up and step costs; with K auto, the acceptance rates."""
        spec, policy = self._engine.metrics.speculation, self._engine.scheduler.policy
        text = "Steps that gave a request tokens, by the draft tokens it had"
        chosen = dict(enumerate([*spec.num_steps_by_draft_tokens]))
        yield _COUNTER, "spec_decode_num_draft_tokens_chosen", text, chosen, "k"
        speedup = spec.estimated_speedup
        if speedup is not None:
            text = "Estimated speed-up over plain decoding"
            yield _GAUGE, "spec_decode_estimated_speedup", text, speedup
        text = "Predicted time of a decode step by the number of draft tokens of each request"
        costs = {(row.requests, row.drafts): row.seconds for row in self._engine.costs}
        yield _GAUGE, "step_cost_seconds", text, costs, "requests", "draft_tokens"
        if isinstance(policy, AdaptivePolicy):
            bins = policy.acceptance.reliability.bins
            tops = [f"{(place + 1) / len(bins):g}" for place in range(len(bins))]
            for name, text, values in (
                ("judged", "Draft tokens that were judged", [it.count for it in bins]),
                ("accepted", "Those of them that were accepted", [it.accepted for it in bins]),
                ("predicted", "Sum of their predicted chances", [it.predicted for it in bins]),
            ):
                text += ", by predicted chance up to `bin`"
                by_bin = dict(zip(tops, values, strict=True))
                yield _COUNTER, f"spec_decode_reliability_{name}", text, by_bin, "bin"
