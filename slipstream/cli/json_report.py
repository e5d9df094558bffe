"""The document that `generate --json` prints."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

_COUNTS = tuple(
    """
    num_drafts num_draft_tokens num_accepted_tokens num_accepted_tokens_per_pos acceptance_length
    num_steps num_steps_by_draft_tokens estimated_speedup refused_drafting_seconds num_cached_tokens
    """.split()
)


def report(
    llm: "LLM", model: str, load_seconds: float, outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    """Outputs in the order of the prompts, and the engine that ran them."""
    from slipstream.kernels.registry import kernels_for

    resolved = llm.engine.resolved
    engine = {
        "model": model,
        "method": resolved.method,
        "num_speculative_tokens": resolved.limits.num_speculative_tokens,
        "max_model_len": resolved.limits.max_model_len,
        "device": str(resolved.device),
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "kernels": kernels_for(resolved.device).network.backend,
        "load_time_s": load_seconds,
        "time_shares": llm.metrics.time_shares,
    }
    return {"outputs": [_request(output) for output in outputs], "engine": engine}


def _request(output: RequestOutput) -> dict[str, Any]:
    document = {
        "prompt": output.prompt,
        **_sample(output.outputs[0]),
        "metrics": _metrics(output.metrics, output.num_tokens),
    }
    if output.prompt_logprobs is not None:
        document["prompt_logprobs"] = [
            None if candidates is None else _candidates(candidates)
            for candidates in output.prompt_logprobs
        ]
    if len(output.outputs) > 1:
        document["samples"] = [_sample(sample) for sample in output.outputs]
    return document


def _sample(sample: CompletionOutput) -> dict[str, Any]:
    document: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        document["cumulative_logprob"] = sample.cumulative_logprob
        document["logprobs"] = [_candidates(candidates) for candidates in sample.logprobs]
    return document


def _candidates(candidates: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token,
            "token": candidate.decoded_token,
            "logprob": candidate.logprob,
            "rank": candidate.rank,
        }
        for token, candidate in candidates.items()
    ]


def _metrics(metrics: RequestMetrics, num_tokens: int) -> dict[str, Any]:
    latency = metrics.latency
    return {
        **{name: getattr(metrics, name) for name in _COUNTS},
        "time_to_first_token_s": metrics.time_to_first_token,
        "latency_s": latency,
        "tokens_per_s": num_tokens / latency if latency else None,
    }
