"""With vLLM's names the metrics are those of vLLM, of which `vllm_metrics.json` lists all.

The list was made from version 0.33: vllm/v1/metrics/loggers.py, buckets.py and
vllm/v1/spec_decode/metrics.py. `cache_config_info` has there all that is configured, and no
`model_name`; the list has what is told here.
"""

import asyncio
import json
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream import LLM
from slipstream.serve.metrics import REASONS, ServerMetrics
from slipstream.serve.options import ServerOptions
from slipstream.serve.run import guarded

LISTED = json.loads(Path(__file__).with_name("vllm_metrics.json").read_text())
ABSENT = {
    "num_requests_kv_fetch_by_stage": "no cache is fetched from elsewhere",
    "external_prefix_cache_queries": "no cache is fetched from elsewhere",
    "external_prefix_cache_hits": "no cache is fetched from elsewhere",
    "prompt_tokens_cached_by_source": "the cache has one tier",
    "mm_cache_queries": "prompts are texts",
    "mm_cache_hits": "prompts are texts",
    "engine_sleep_state": "the engine does not sleep",
    "watermark_requests": "outputs have no watermark",
    "admission_rejections": "counts refusals by limits that are not those of this server",
    "lora_requests_info": "adapters are counted one by one: adapter_num_draft_tokens and so on",
    "kv_block_lifetime_seconds": "blocks are not sampled; vLLM has it behind a flag",
    "kv_block_idle_before_evict_seconds": "blocks are not sampled; vLLM has it behind a flag",
    "kv_block_reuse_gap_seconds": "blocks are not sampled; vLLM has it behind a flag",
}
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def families(tiny_target: str) -> dict[str, Metric]:
    llm = LLM(
        tiny_target,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        skip_tokenizer_init=True,
        num_kv_blocks=32,
        max_model_len=MAX_MODEL_LEN,
    )
    text = ServerMetrics(llm.engine, "tiny", as_vllm=True).render().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_metric_of_vllm_is_there_or_has_no_meaning_here(families: dict[str, Metric]) -> None:
    there = {name for name in families if name.startswith("vllm:")}
    assert there.isdisjoint(f"vllm:{name}" for name in ABSENT)
    assert there | {f"vllm:{name}" for name in ABSENT} == LISTED.keys()


def test_kinds_labels_and_buckets_are_those_of_vllm(families: dict[str, Metric]) -> None:
    for name in families.keys() & LISTED.keys():
        family, listed = families[name], LISTED[name]
        assert family.type == listed["kind"]
        assert family.samples
        for sample in family.samples:
            assert {*sample.labels} - {"le"} == {"model_name", *listed["labels"]}
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
        if family.type == "histogram":
            bounds = {float(it.labels["le"]) for it in family.samples if "le" in it.labels}
            wanted = listed["buckets"]
            if isinstance(wanted, str):
                wanted = [1, 2, 5, 10, 20, 50, 100, 200]
                assert bounds == {*wanted, float("inf")}
            assert bounds >= {*wanted}


def test_answers_are_counted_by_their_class(tiny_target: str) -> None:
    llm = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=8)
    metrics = ServerMetrics(llm.engine, "tiny", as_vllm=True)
    app, _ = guarded(answer, ServerOptions(), metrics.count_answer)
    for method, path in (
        *(("GET", "/v1/models"), ("POST", "/503"), ("POST", "/404"), ("BREW", "/404")),
        *(("GET", "/health"), ("GET", "/metrics"), ("POST", "/418")),
    ):
        asyncio.run(call(app, method, path))
    page = text_string_to_metric_families(metrics.render().decode())
    (family,) = (it for it in page if it.name == "http_requests")
    counted = {(it.labels["method"], it.labels["status"]): it.value for it in family.samples}
    assert counted == {
        ("GET", "2xx"): 1,
        ("POST", "5xx"): 1,
        ("POST", "4xx"): 2,
        ("other", "4xx"): 1,
    }


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the status that the path names, else 200."""
    status = scope["path"][1:]
    start = {"type": "http.response.start", "status": int(status) if status.isdigit() else 200}
    await send({**start, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def call(app: ASGIApp, method: str, path: str) -> None:
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": [], "client": None}

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        pass

    await app(scope, receive, send)


def test_what_only_this_engine_measures_keeps_its_name(families: dict[str, Metric]) -> None:
    assert "slipstream:step_time_seconds" in families
    assert "slipstream:request_success" not in families
    reasons = [it.labels["finished_reason"] for it in families["vllm:request_success"].samples]
    assert reasons == [*REASONS]
