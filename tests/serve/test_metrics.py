"""What Prometheus and the log are told."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import redirect_stderr
from itertools import count
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from slipstream import LLM, SamplingParams
from slipstream.engine.prompts import PromptEncoder
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.limits import ServeLimits
from slipstream.serve.logs import JsonFormatter, PlainFormatter, RequestIds, set_up_logs
from slipstream.serve.metrics import REASONS, ServerMetrics
from slipstream.serve.observers import ActivityLog, Observer
from slipstream.serve.options import LogOptions

PROMPTS = ["def main(", "class Engine:", "import os\n"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TOKENS = 12 * len(PROMPTS)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "demo",
        speculative_config={"model": "demo/draft", "num_speculative_tokens": 3},
        max_num_seqs=4,
        num_kv_blocks=600,
        threads=1,
    )


def logs_to(stream: io.StringIO, options: LogOptions) -> None:
    """Set up the logs with a stream in the place of standard error."""
    with redirect_stderr(stream):
        set_up_logs(options)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    before = {
        name: (logging.getLogger(name).handlers[:], logging.getLogger(name).propagate)
        for name in NAMES
    }
    logs_to(stream, LogOptions(log_json=True))
    yield stream
    for name, (handlers, propagate) in before.items():
        own = logging.getLogger(name)
        own.handlers[:], own.propagate = handlers, propagate
        own.setLevel(logging.NOTSET)


NAMES = ("slipstream", "uvicorn")


def test_a_log_line_is_json_whatever_its_numbers(log: io.StringIO) -> None:
    extra = {"seconds": float("nan"), "rate": float("inf"), "share": 0.5}
    logging.getLogger("slipstream.serve").info("done", extra=extra)
    line = json.loads(log.getvalue(), parse_constant=pytest.fail)
    assert (line["seconds"], line["rate"], line["share"]) == ("nan", "inf", 0.5)


def run(llm: LLM, observer: Observer) -> None:
    """The prompts, and one request that is left early."""
    encoder = PromptEncoder(llm.engine.tokenizer, llm.engine.resolved.vocab_size)

    async def test() -> None:
        thread = EngineThread(llm.engine, ServeLimits(), [observer])
        thread.start()
        encoded = [encoder.encode(prompt, PARAMS) for prompt in PROMPTS]
        for stream in await thread.submit("some-id", encoded, PARAMS):
            async for _ in stream:
                pass
        endless = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
        [stream] = await thread.submit("left", encoded[:1], endless)
        await stream.aclose()
        await thread.drain()
        await thread.stop()

    asyncio.run(test())


def samples(metrics: ServerMetrics) -> dict[str, float]:
    """Values by name and by the labels besides the model's name."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            assert sample.labels.get("model_name", "a name") == "a name"
            found[sample.name + (json.dumps(labels) if labels else "")] = sample.value
    return found


def test_gaps_between_tokens_are_counted_up_to_each_bound(llm: LLM) -> None:
    metrics, submission = ServerMetrics(llm.engine, "a name"), None
    for gap in (0.0001, 0.005, 0.0051, 99.0):
        metrics.tokens_added(submission, gap)  # type: ignore[arg-type]
    found = samples(metrics)
    name = "slipstream:inter_token_latency_seconds"
    counts = {
        float(json.loads(key.removeprefix(name + "_bucket"))["le"]): count
        for key, count in found.items()
        if key.startswith(name + "_bucket")
    }
    assert (counts[0.001], counts[0.005], counts[0.0075], counts[5.0]) == (1, 2, 3, 3)
    assert counts[float("inf")] == found[name + "_count"] == 4
    assert found[name + "_sum"] == pytest.approx(99.0102)


def test_counts_are_those_of_the_engine(llm: LLM) -> None:
    metrics = ServerMetrics(llm.engine, "a name")
    before = samples(metrics)
    run(llm, metrics)
    now = samples(metrics)
    spec = llm.engine.metrics.speculation
    prompt_tokens = sum(len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS)

    def gained(name: str) -> float:
        return now["slipstream:" + name] - before["slipstream:" + name]

    assert gained("prompt_tokens_total") >= prompt_tokens
    assert gained("generation_tokens_total") >= TOKENS
    assert gained('request_success_total{"finished_reason": "length"}') == len(PROMPTS)
    assert gained('request_success_total{"finished_reason": "abort"}') == 1
    for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds"):
        assert gained(name + "_count") >= len(PROMPTS)
    assert gained("inter_token_latency_seconds_count") >= len(PROMPTS)
    assert gained("e2e_request_latency_seconds_count") == len(PROMPTS) + 1
    assert gained("request_generation_tokens_sum") >= TOKENS
    assert now["slipstream:spec_decode_num_drafts_total"] == spec.num_drafts > 0
    assert now["slipstream:spec_decode_num_draft_tokens_total"] == spec.num_draft_tokens
    assert now["slipstream:spec_decode_num_accepted_tokens_total"] == spec.num_accepted_tokens
    positions = [
        now[f'slipstream:spec_decode_num_accepted_tokens_per_pos_total{{"position": "{place}"}}']
        for place in range(3)
    ]
    assert sum(positions) == spec.num_accepted_tokens
    assert positions == sorted(positions, reverse=True)
    assert 0 < now["slipstream:spec_decode_current_k"] <= 3
    assert now["slipstream:num_speculative_tokens"] == 3
    assert now["slipstream:prefix_cache_queries_total"] >= prompt_tokens
    assert now["slipstream:prefix_cache_hits_total"] <= now["slipstream:prefix_cache_queries_total"]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert now["slipstream:" + name] == 0
    for part in ("draft", "target", "verify", "rest"):
        assert gained(f'step_time_seconds_total{{"part": "{part}"}}') > 0
    assert now["process_resident_memory_bytes"] > 0


def test_the_phases_of_a_request_add_up(llm: LLM) -> None:
    metrics = ServerMetrics(llm.engine, "a name")
    steps = llm.engine.metrics.num_steps
    run(llm, metrics)
    found = {name.removeprefix("slipstream:"): it for name, it in samples(metrics).items()}
    queue, prefill, decode, inference, whole = (
        found[f"{name}_seconds_sum"]
        for name in (
            *(f"request_{phase}_time" for phase in ("queue", "prefill", "decode", "inference")),
            "e2e_request_latency",
        )
    )
    assert found["request_decode_time_seconds_count"] >= len(PROMPTS)
    assert min(queue, prefill, decode) > 0
    assert inference >= prefill + decode - 1e-9  # one that was left early may have no first token
    assert queue + inference == pytest.approx(whole, rel=0.01)
    assert found["request_params_n_sum"] == found["request_params_n_count"] == len(PROMPTS) + 1
    most = found["request_params_max_tokens_sum"]
    assert TOKENS < most <= TOKENS + 4000
    assert found["request_num_preemptions_sum"] == 0
    assert found["iteration_tokens_total_count"] == llm.engine.metrics.num_steps - steps
    computed = found["request_prefill_kv_computed_tokens_sum"]
    assert 0 < computed <= found["request_prompt_tokens_sum"]
    sources = [
        found[f'prompt_tokens_by_source_total{{"source": "{source}"}}']
        for source in ("local_compute", "local_cache_hit")
    ]
    assert sum(sources) == found["prompt_tokens_total"]
    assert sources[1] == found["prompt_tokens_cached_total"]


def test_the_tokens_of_steps_are_prompts_and_outputs(tiny_target: str) -> None:
    llm = LLM(
        tiny_target,
        skip_tokenizer_init=True,
        num_kv_blocks=8,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [*range(40)]}], params)
    assert llm.engine.metrics.num_prompt_tokens == 40
    assert llm.engine.metrics.num_output_tokens == 3


def test_every_way_to_end_has_a_series_from_the_start(llm: LLM) -> None:
    found = samples(ServerMetrics(llm.engine, "a name"))
    for reason in REASONS:
        assert found[f'slipstream:request_success_total{{"finished_reason": "{reason}"}}'] == 0


def test_the_log_has_a_line_for_each_request_and_one_now_and_then(
    llm: LLM, log: io.StringIO
) -> None:
    ticks = count(step=9)  # seconds that seem to pass with every step
    run(llm, ActivityLog(clock=lambda: float(next(ticks))))
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    ended = [line for line in lines if "finish_reason" in line]
    assert [line["request_id"] for line in ended] == ["some-id"] * 3 + ["left"]
    assert [line["finish_reason"] for line in ended] == ["length"] * 3 + ["abort"]
    assert {line["output_tokens"] for line in ended[:3]} == {12}
    assert ended[0]["time_to_first_token"] > 0
    assert all(line["acceptance_length"] >= 1 for line in ended)
    busy = [line for line in lines if "running" in line]
    assert busy
    assert any(line["acceptance_length"] > 1 for line in busy)
    assert "output tokens/s" in busy[0]["message"]


@pytest.mark.parametrize("shown", [True, False])
def test_text_is_in_the_log_only_when_asked_for(llm: LLM, log: io.StringIO, shown: bool) -> None:
    run(llm, ActivityLog(LogOptions(log_prompts=shown)))
    assert (PROMPTS[0] in log.getvalue()) == shown


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "levelname": "INFO", "name": "slipstream.serve"})
    vars(made).update(extra)
    return made


def test_nothing_logged_can_make_another_line() -> None:
    hostile = record("a\nb\x1b[31m\r\u2028c", request_id="id\nx")
    line = PlainFormatter().format(hostile)
    assert line.endswith(r" a\nb\x1b[31m\r\u2028c [id\nx]")
    assert len(line.splitlines()) == 1
    parsed = json.loads(JsonFormatter().format(hostile))
    assert parsed["message"] == "a\nb\x1b[31m\r\u2028c"
    assert len(JsonFormatter().format(hostile).splitlines()) == 1


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "hostile",
    [
        {"path": "/x\n2026-01-01 INFO forged\r\x1b[2J\x85\u2029"},  # as %0a is decoded
        {"method": "GET\nforged"},
        {"client": ("::1%\nforged", 1)},
        {"headers": [(b"x-request-id", b"a\nforged"), (b"user-agent", b"b\rforged")]},
        {"query_string": b"q=\nforged"},
    ],
)
def test_a_request_is_one_line_of_the_log(
    log: io.StringIO, as_json: bool, hostile: dict[str, object]
) -> None:
    logs_to(log, LogOptions(log_json=as_json))
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": None} | hostile

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def send(message: Message) -> None:
        assert message["status"] == 404

    async def receive() -> Message:
        raise AssertionError

    asyncio.run(RequestIds(answer)(scope, receive, send))
    (line,) = log.getvalue().splitlines()
    assert line.isprintable()
    told = {"path", "method", "client"} if as_json else {"path", "method"}
    assert ("forged" in line) == bool(told & {*hostile})


def test_a_traceback_is_indented_behind_its_line(log: io.StringIO) -> None:
    logs_to(log, LogOptions())
    try:
        raise RuntimeError("broken\nforged")
    except RuntimeError:
        logging.getLogger("slipstream.serve").exception("it\nfailed")
    first, *rest = log.getvalue().splitlines()
    assert first.endswith(r"it\nfailed")
    assert len(rest) > 2
    assert all(line.startswith("    ") for line in rest)


def test_exceptions_are_in_the_log(log: io.StringIO) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("slipstream.serve").exception("it %s", "failed")
    line = json.loads(log.getvalue())
    assert (line["message"], line["level"]) == ("it failed", "error")
    assert "RuntimeError: broken" in line["exception"]


def test_what_chooses_k_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    llm = LLM(
        "demo",
        speculative_config={"method": "ngram", "num_speculative_tokens": "auto"},
        max_num_seqs=2,
        num_kv_blocks=300,
        threads=1,
    )
    metrics = ServerMetrics(llm.engine, "a name")
    prefix = "slipstream:spec_decode_"
    assert prefix + "estimated_speedup" not in samples(metrics)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    assert all((it.metrics.estimated_speedup or 0) > 0 for it in outputs)
    found = samples(metrics)
    assert found[prefix + "estimated_speedup"] == pytest.approx(
        llm.engine.metrics.speculation.estimated_speedup
    )
    chosen = {
        int(json.loads(name.partition("total")[2])["k"]): count
        for name, count in found.items()
        if name.startswith(prefix + "num_draft_tokens_chosen_total")
    }
    assert sum(chosen.values()) == sum(it.metrics.num_steps for it in outputs)
    drafted = sum(k * count for k, count in chosen.items())
    assert drafted == found[prefix + "num_draft_tokens_total"] > 0
    costs = [it for name, it in found.items() if name.startswith("slipstream:step_cost_seconds")]
    assert len(costs) == len(llm.engine.costs) > 2
    assert min(costs) > 0
    bins = {
        kind: [it for name, it in found.items() if f"reliability_{kind}_total" in name]
        for kind in ("judged", "accepted", "predicted")
    }
    assert [len(values) for values in bins.values()] == [16, 16, 16]
    for judged, accepted, predicted in zip(*bins.values(), strict=True):
        assert 0 <= accepted <= judged >= predicted >= 0
