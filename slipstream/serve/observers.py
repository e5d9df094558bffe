"""The observer interface of the engine's thread, and the activity log."""

import logging
import math
from collections.abc import Callable, Mapping
from time import monotonic

from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.samples import Submission
from slipstream.serve.options import LogOptions

logger = logging.getLogger("slipstream.serve")

_LONGEST_PARAMS = 1000  # characters
_INTERVAL = 10.0  # seconds between two lines about the engine while it is busy


class Observer:
    """Receives events of the engine's thread, on that thread; its methods must be fast.

    A method that is not overridden does nothing.
    """

    def request_added(self, request_id: str, submission: Submission) -> None:
        """The engine has accepted a request."""

    def tokens_added(self, submission: Submission, gap: float | None) -> None:
        """A step gave a request tokens, `gap` seconds after the previous (None: the first)."""

    def request_ended(self, request_id: str, submission: Submission, reason: str) -> None:
        """A request ended; `reason` is "stop", "length", "abort", "error" or "timeout"."""

    def step_done(self, engine: Engine) -> None:
        """A step ended."""


class ActivityLog(Observer):
    """Logs a line for every request that ends, and at intervals a line about the engine."""

    def __init__(
        self, options: LogOptions | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._options, self._clock = options or LogOptions(), clock
        self._prompt_tokens = 0
        self._last_step = -math.inf
        self._start_time = -math.inf
        self._start: dict[str, int] = {}

    def request_added(self, request_id: str, submission: Submission) -> None:
        if not self._options.enable_log_requests:
            return
        facts: dict[str, object] = {
            "request_id": request_id,
            "prompt_tokens": len(submission.prompt_token_ids),
            "params": _given_params(submission.params)[:_LONGEST_PARAMS],
        }
        line = "begun: %(prompt_tokens)d prompt tokens; %(params)s"
        if logger.isEnabledFor(logging.DEBUG):
            facts["prompt"] = self._cut(submission.prompt)
            line += "; prompt %(prompt)r"
        logger.info(line, facts, extra=facts)

    def tokens_added(self, submission: Submission, gap: float | None) -> None:
        if gap is None:
            self._prompt_tokens += len(submission.prompt_token_ids)

    def request_ended(self, request_id: str, submission: Submission, reason: str) -> None:
        metrics = submission.metrics
        facts: dict[str, object] = {
            "request_id": request_id,
            "finish_reason": reason,
            "prompt_tokens": len(submission.prompt_token_ids),
            "output_tokens": sum(sample.num_taken for sample in submission.samples),
            "cached_tokens": metrics.num_cached_tokens,
            "time_to_first_token": metrics.time_to_first_token,
            "latency": metrics.latency,
            "drafts": metrics.num_drafts,
            "acceptance_length": round(metrics.acceptance_length, 4),
        }
        line = "ended by %(finish_reason)s: %(prompt_tokens)d prompt tokens, %(output_tokens)d "
        line += "output tokens, AL %(acceptance_length).2f"
        if self._options.log_prompts:
            facts["prompt"] = self._cut(submission.prompt)
            line += ", prompt %(prompt)r"
        if self._options.log_prompts or self._options.enable_log_outputs:
            detokenizers = [sample.detokenizer for sample in submission.samples]
            facts["outputs"] = [None if it is None else self._cut(it.text) for it in detokenizers]
            line += ", outputs %(outputs)r"
        logger.info(line, facts, extra=facts)

    def _cut(self, text: str | None) -> str | None:
        return text if text is None else text[: self._options.max_log_len]

    def step_done(self, engine: Engine) -> None:
        """Log the engine's throughput since the last line, once per interval."""
        if self._options.disable_log_stats:
            return
        now = self._clock()
        idle, self._last_step = now - self._last_step, now
        seconds = now - self._start_time
        if idle <= _INTERVAL and seconds < _INTERVAL:
            return
        totals = self._totals(engine)
        if idle <= _INTERVAL:
            done = {name: total - self._start[name] for name, total in totals.items()}
            _log_engine(engine, done, seconds)
        self._start_time, self._start = now, totals

    def _totals(self, engine: Engine) -> dict[str, int]:
        blocks, spec = engine.scheduler.block_manager, engine.metrics.speculation
        return {
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": engine.metrics.num_output_tokens,
            "drafts": spec.num_drafts,
            "draft_tokens": spec.num_draft_tokens,
            "accepted_tokens": spec.num_accepted_tokens,
            "queried_tokens": blocks.num_queried_tokens,
            "hit_tokens": blocks.num_hit_tokens,
        }


def _given_params(params: SamplingParams) -> str:
    """The sampling parameters that differ from the defaults, as text."""
    defaults = vars(SamplingParams())
    return ", ".join(f"{name} {it!r}" for name, it in vars(params).items() if it != defaults[name])


def _log_engine(engine: Engine, done: Mapping[str, int], seconds: float) -> None:
    scheduler, blocks, drafts = engine.scheduler, engine.scheduler.block_manager, done["drafts"]
    facts: dict[str, float] = {
        "prompt_tokens_per_second": round(done["prompt_tokens"] / seconds, 1),
        "output_tokens_per_second": round(done["output_tokens"] / seconds, 1),
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "kv_cache_usage": round(blocks.usage, 4),
        "prefix_hit_rate": _share(done["hit_tokens"], done["queried_tokens"]),
        "acceptance_length": round(1 + done["accepted_tokens"] / max(drafts, 1), 3),
        "acceptance_rate": _share(done["accepted_tokens"], done["draft_tokens"]),
        "draft_tokens_per_draft": round(done["draft_tokens"] / max(drafts, 1), 2),
    }
    line = "%(output_tokens_per_second).1f output tokens/s, %(prompt_tokens_per_second).1f prompt "
    line += "tokens/s; %(running)d running, %(waiting)d waiting; KV cache %(kv_cache_usage).1f%%, "
    line += "prefix hits %(prefix_hit_rate).1f%%"
    if drafts:
        line += "; AL %(acceptance_length).2f of K %(draft_tokens_per_draft).1f, "
        line += "%(acceptance_rate).1f%% of draft tokens accepted"
    shares = ("kv_cache_usage", "prefix_hit_rate", "acceptance_rate")
    shown = {name: 100 * it if name in shares else it for name, it in facts.items()}
    logger.info(line, shown, extra=facts)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
