"""docs/serving.md and the dashboard say what there is, all of it and nothing else."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream import LLM
from slipstream.core.config import EngineConfig
from slipstream.core.flags import flag_of
from slipstream.serve.limits import ServeLimits
from slipstream.serve.metric_families import PREFIX
from slipstream.serve.metrics import ServerMetrics
from slipstream.serve.options import AnswerOptions, LogOptions, ServerOptions

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text()
# Metrics that only engines with an adaptive policy have.
ADAPTIVE = {
    "spec_decode_estimated_speedup",
    *(f"spec_decode_reliability_{what}_total" for what in ("judged", "accepted", "predicted")),
}
DASHBOARD = json.loads((ROOT / "examples" / "grafana.json").read_text())


@pytest.fixture(scope="module")
def series(tiny_target: str) -> set[str]:
    """Names of metrics without the prefix, of histograms the name that they were given."""
    llm = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=8)
    text = ServerMetrics(llm.engine, "tiny").render().decode()
    names = set()
    for family in text_string_to_metric_families(text):
        # The library adds to each when it was made.
        if family.name.startswith(PREFIX) and not family.name.endswith("_created"):
            counts = family.type == "counter"
            names.add(family.name.removeprefix(PREFIX) + ("_total" if counts else ""))
    return names


def test_the_page_has_every_flag() -> None:
    groups = (ServerOptions, AnswerOptions, ServeLimits, LogOptions)
    flags = {
        it.name: found
        for group in groups
        for it in fields(group)
        if (found := flag_of(it)) is not None
    }
    shown = {name for name, found in flags.items() if not found.hidden}
    told = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)`", PAGE)}
    assert shown <= told  # the others are for movers: docs/from_vllm.md
    engine = {it.name for it in fields(EngineConfig)}
    assert told - set(flags) - engine <= {"max_queue", "cors_origin", "help"}


def test_the_page_has_every_metric(series: set[str]) -> None:
    table = PAGE.partition("| metric |")[2].partition("\n\n")[0]
    told = {
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`([a-z_0-9]+)`", row.split("|")[1])
    }
    assert told == series | ADAPTIVE


def test_the_dashboard_shows_what_there_is(series: set[str]) -> None:
    asked = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            asked |= set(re.findall(PREFIX + r"([a-z_0-9]+)", target["expr"]))
    histograms = {name.removesuffix("_bucket") for name in asked}
    assert histograms <= series | ADAPTIVE
    same_elsewhere = {"spec_decode_current_k", "num_requests_waiting_by_reason"}
    of_few_models = {"state_checkpoints"}
    assert histograms >= series - same_elsewhere - of_few_models - {"cache_config_info"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
