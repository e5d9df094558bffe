"""The figures of a load, with the definitions and names of `vllm bench serve`.

Compare speculative servers by TPOT. ITL is the time between chunks, and a speculative server sends
several tokens per chunk; `itl_per_token` is the time between tokens, 0 within a chunk.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.bench.load import LoadRun
from slipstream.bench.options import (
    E2EL,
    ITL,
    ITL_PER_TOKEN,
    METRICS,
    TPOT,
    TTFT,
    SummaryOptions,
    read_goodput,
)
from slipstream.bench.record import Record
from slipstream.bench.speculation import NOT_REPORTED, SpeculationCounts


def percentile_name(percentile: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{percentile:g}"


def series(records: Sequence[Record]) -> dict[str, list[float]]:
    """All measured times by metric, in milliseconds; empty for an unknown metric."""
    times: dict[str, list[float]] = {metric: [] for metric in METRICS}
    token_gaps = [record.token_gaps() for record in records]
    for record, gaps in zip(records, token_gaps, strict=True):
        times[TTFT].append(record.ttft)
        times[E2EL].append(record.latency)
        times[ITL].extend(record.chunk_gaps())
        if record.tpot is not None:
            times[TPOT].append(record.tpot)
        if gaps is not None and None not in token_gaps:  # known for all requests or for none
            times[ITL_PER_TOKEN].extend(gaps)
    return {metric: [time * 1e3 for time in own] for metric, own in times.items()}


def spread(times: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """mean, median, std and percentiles; None where nothing was measured."""
    import numpy

    names = ["mean", "median", "std", *map(percentile_name, percentiles)]
    if not times:
        return dict.fromkeys(names)
    array = numpy.asarray(times)
    values = [array.mean(), numpy.median(array), array.std()]
    values += [numpy.percentile(array, percentile) for percentile in percentiles]
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def summarise(
    run: LoadRun, speculation: SpeculationCounts | None, options: SummaryOptions
) -> dict[str, Any]:
    completed = [record for record in run.records if not record.failed]
    failed = [record for record in run.records if record.failed]
    seconds = max(run.seconds, 1e-9)
    inputs = sum(record.num_prompt_tokens for record in completed)
    outputs = sum(record.num_tokens for record in completed)
    per_second, goals = timeline(run), read_goodput(options.goodput)
    summary: dict[str, Any] = {
        "duration": run.seconds,
        "completed": len(completed),
        "failed": len(failed),
        "not_finished": run.num_left,
        "errors": dict(Counter(str(record.error) for record in failed).most_common()),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "output_tokens_counted_by": sorted({record.counted_by for record in completed}),
        "request_throughput": len(completed) / seconds,
        "request_goodput": None if goals is None else _goodput(completed, goals, seconds),
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": max(per_second["output_tokens"], default=0.0),
        "max_concurrent_requests": run.most_at_once,
    }
    times = series(completed)
    for metric in options.metrics:
        for name, value in spread(times[metric], options.percentiles).items():
            summary[f"{name}_{metric}_ms"] = value
    queued = [record.queued * 1e3 for record in completed if record.due is not None]
    if queued:
        for name, value in spread(queued, options.percentiles).items():
            summary[f"{name}_client_queue_time_ms"] = value
    return summary | speculation_figures(speculation)


def speculation_figures(counts: SpeculationCounts | None) -> dict[str, Any]:
    """Acceptance figures; without counts, only that they are not reported."""
    if counts is None:
        return {"spec_decode_source": NOT_REPORTED}
    return {
        "spec_decode_source": counts.source,
        "spec_decode_acceptance_length": counts.acceptance_length,
        "spec_decode_acceptance_rate": counts.acceptance_rate * 100,
        "spec_decode_num_drafts": counts.num_drafts,
        "spec_decode_draft_tokens": counts.num_draft_tokens,
        "spec_decode_accepted_tokens": counts.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": counts.acceptance_per_position,
        "spec_decode_steps": counts.num_steps or None,
        "spec_decode_steps_without_drafts": counts.without_drafts,
        "spec_decode_steps_by_draft_tokens": counts.steps_by_draft_tokens,
        "spec_decode_estimated_speedup": counts.estimated_speedup,
        "spec_decode_refused_drafting_seconds": counts.seconds_refused,
        "spec_decode_note": counts.note,
    }


def timeline(run: LoadRun) -> dict[str, list[float]]:
    """Output tokens and the maximum of concurrent requests, in each second from the start."""
    length = int(max([run.seconds, *(it.ended - run.began for it in run.records)])) + 1
    tokens, requests = [0.0] * length, [0.0] * length
    changes: list[tuple[float, int]] = []
    for record in run.records:
        changes += [(record.sent - run.began, 1), (record.ended - run.began, -1)]
        if not record.failed:
            for time, share in record.shares():
                tokens[int(time - run.began)] += share
    under_way, second = 0, 0
    for time, change in sorted(changes):
        while second < int(time):
            second += 1
            requests[second] = under_way
        under_way += change
        requests[second] = max(requests[second], under_way)
    return {"output_tokens": tokens, "requests": requests}


def details(run: LoadRun) -> dict[str, Any]:
    """Arrays of every request's figures; times are in seconds."""
    records = run.records
    return {
        "ids": [record.id for record in records],
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_tokens for record in records],
        "start_times": [record.sent - run.began for record in records],
        "queue_times": [record.queued for record in records],
        "ttfts": [record.ttft if record.arrivals else None for record in records],
        "itls": [record.chunk_gaps() for record in records],
        "tokens_per_chunk": [record.tokens_per_chunk() for record in records],
        "latencies": [record.latency for record in records],
        "finish_reasons": [record.finish_reason for record in records],
        "errors": [record.error for record in records],
    }


def _goodput(completed: Sequence[Record], goals: Mapping[str, float], seconds: float) -> float:
    """Requests per second that met every goal."""
    measured = [
        {TTFT: record.ttft, TPOT: record.tpot or 0.0, E2EL: record.latency} for record in completed
    ]
    return (
        sum(all(it[name] * 1e3 <= goal for name, goal in goals.items()) for it in measured)
        / seconds
    )
