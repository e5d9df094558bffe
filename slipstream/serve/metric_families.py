"""Prometheus metric families: names, common labels, and histograms."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

Kind = type[CounterMetricFamily | GaugeMetricFamily]
Values = float | Mapping[Any, float]

PREFIX = "slipstream:"
VLLM_PREFIX = "vllm:"

# Metrics with the same meaning as vLLM's of that name (vllm/v1/metrics/loggers.py).
_AS_IN_VLLM = frozenset(
    """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason cache_config_info
    kv_cache_usage_perc prefix_cache_queries prefix_cache_hits prompt_tokens
    prompt_tokens_by_source prompt_tokens_cached generation_tokens num_preemptions request_success
    iteration_tokens_total inter_token_latency_seconds time_to_first_token_seconds
    e2e_request_latency_seconds request_time_per_output_token_seconds request_queue_time_seconds
    request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds
    request_prompt_tokens request_generation_tokens request_max_num_generation_tokens
    request_prefill_kv_computed_tokens request_num_preemptions request_params_n
    request_params_max_tokens spec_decode_num_drafts spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos
    """.split()
)
_NAMED_OTHERWISE = {
    "num_nonfinite_logits": VLLM_PREFIX + "corrupted_requests",
    "http_requests": "http_requests",  # from vLLM's FastAPI instrumentation
}


class Histogram:
    """A histogram that counts values per bucket.

    Only one thread may call `observe`: a lock would cost more than the two additions.
    """

    def __init__(self, text: str, bounds: Sequence[float]) -> None:
        self.text, self.bounds = text, bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as (bound, count), with the bounds in Prometheus's format."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return [*zip(names, accumulate([*self._counts]), strict=True)]


@dataclass(frozen=True)
class Families:
    """Creates the metric families of one model.

    Args:
        model_name: value of the label `model_name` of all metrics.
        as_vllm: give metrics that vLLM has, too, vLLM's names, and all metrics its label `engine`,
            so that dashboards for vLLM work.
    """

    model_name: str
    as_vllm: bool = False

    def family(self, kind: Kind, name: str, text: str, values: Values, *labels: str) -> Metric:
        """Create a counter or gauge: one number, or one for each value of its further labels."""
        family = kind(self._name(name), text, labels=[*self._labels, *labels])
        for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
            own = key if isinstance(key, tuple) else (key,)
            family.add_metric([*self._labels.values(), *map(str, own)], value)
        return family

    def histogram(self, name: str, histogram: Histogram) -> Metric:
        """Create a histogram family with the current counts."""
        family = HistogramMetricFamily(self._name(name), histogram.text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], histogram.buckets(), histogram.total)
        return family

    @property
    def _labels(self) -> dict[str, str]:
        own = {"model_name": self.model_name}
        return own | {"engine": "0"} if self.as_vllm else own

    def _name(self, name: str) -> str:
        if self.as_vllm and name in _NAMED_OTHERWISE:
            return _NAMED_OTHERWISE[name]
        return (VLLM_PREFIX if self.as_vllm and name in _AS_IN_VLLM else PREFIX) + name
