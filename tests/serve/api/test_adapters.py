"""Adapters over HTTP: chosen as models, loaded and unloaded, and refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

import slipstream
from slipstream import LLM, LoRARequest, SamplingParams, UsageError
from slipstream.core.config import EngineConfig
from slipstream.serve.adapters import NamedPath, load_modules, parse_modules
from slipstream.serve.metrics import ServerMetrics
from slipstream.serve.options import AnswerOptions
from tests.adapters import write_adapter
from tests.serve.api.live import DEMO, Live, serving

TARGET = Path(slipstream.__file__).parent / "demo" / "target"
CONFIG: EngineConfig = replace(DEMO, enable_lora=True, max_loras=2)
ASKED: dict[str, Any] = {"prompt": "def main(", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(it), TARGET, seed=it, size=0.2) for it in range(3)]


@pytest.fixture(scope="module")
def adapted(folders: list[str]) -> Iterator[Live]:
    with serving(CONFIG, answers=AnswerOptions(trust_request_lora=True)) as live:
        load_modules(live.engine, ("demo",), [NamedPath("style", folders[0])])
        yield live


@pytest.fixture(scope="module")
def asked(adapted: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def texts(folders: list[str]) -> list[str]:
    """The texts of the adapters, then of the model, from an offline engine."""
    llm = LLM(CONFIG)
    asking = [LoRARequest(f"a{it}", it + 1, path) for it, path in enumerate(folders)]
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate(["def main("] * 4, params, [*asking, None])
    found = [it.outputs[0].text for it in outputs]
    assert len({*found}) == 4
    return found


def post(live: Live, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{live.url}{path}", json=body, timeout=60)


def load(live: Live, name: str, path: str, **more: Any) -> httpx.Response:
    return post(live, "/v1/load_lora_adapter", lora_name=name, lora_path=path, **more)


def unload(live: Live, name: str) -> httpx.Response:
    return post(live, "/v1/unload_lora_adapter", lora_name=name)


def test_an_adapter_is_a_model_of_its_name(
    adapted: Live, asked: openai.OpenAI, texts: list[str], folders: list[str]
) -> None:
    assert load(adapted, "other", folders[1]).json() == {
        "id": "other", "object": "adapter", "loaded": True,
    }  # fmt: skip
    cards = {it.id: it.model_dump()["parent"] for it in asked.models.list()}
    assert cards == {"demo": None, "style": "demo", "other": "demo"}
    assert asked.models.retrieve("other").id == "other"
    for name, text in (("style", texts[0]), ("other", texts[1]), ("demo", texts[3])):
        found = asked.completions.create(model=name, **ASKED)
        assert (found.model, found.choices[0].text) == (name, text)
    chunks = [*asked.completions.create(model="style", **ASKED, stream=True)]
    assert {it.model for it in chunks} == {"style"}
    assert "".join(it.choices[0].text for it in chunks if it.choices) == texts[0]
    assert unload(adapted, "other").status_code == 200
    assert unload(adapted, "other").status_code == 404
    with pytest.raises(
        openai.NotFoundError, match=r"there is no model 'other' here; .* demo, style"
    ):
        asked.completions.create(model="other", **ASKED)


def test_a_drafter_gets_an_adapter_of_its_own(
    adapted: Live, asked: openai.OpenAI, texts: list[str], folders: list[str], tmp_path: Path
) -> None:
    draft = write_adapter(tmp_path, TARGET.parent / "draft", size=0.9)
    assert load(adapted, "pair", folders[1], draft_lora_path=draft).status_code == 200
    assert asked.completions.create(model="pair", **ASKED).choices[0].text == texts[1]
    assert adapted.engine.adapters.named("pair").adapts_drafts
    assert unload(adapted, "pair").status_code == 200
    for wrong, told in ((folders[1], "this model"), ("nowhere", "has no adapter_config.json")):
        refused = load(adapted, "pair", folders[1], draft_lora_path=wrong)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert told in message
        assert "the drafter's adapter" in message


def test_every_protocol_takes_adapters(adapted: Live, asked: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": "Hi"}]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 32}
    answers = {}
    for name in ("demo", "style"):
        chat = asked.chat.completions.create(model=name, messages=said, **fields)
        response = asked.responses.create(
            model=name, input="Hi", temperature=0, max_output_tokens=32
        )
        message = post(adapted, "/v1/messages", model=name, messages=said, **fields).json()
        assert [chat.model, response.model, message["model"]] == [name] * 3
        content = chat.choices[0].message.content
        assert [response.output_text, message["content"][0]["text"]] == [content] * 2
        answers[name] = content
    assert answers["demo"] != answers["style"]


def test_more_adapters_than_slots_are_served_at_once(
    adapted: Live, asked: openai.OpenAI, texts: list[str], folders: list[str]
) -> None:
    for name, path in zip("bc", folders[1:], strict=True):
        assert load(adapted, name, path).status_code == 200
    streams = [
        asked.completions.create(model=name, **ASKED, stream=True)
        for name in ("style", "b", "c", "demo") * 2
    ]
    found = ["".join(it.choices[0].text for it in stream if it.choices) for stream in streams]
    assert found == texts * 2
    for name in "bc":
        assert unload(adapted, name).status_code == 200


def test_acceptance_is_told_for_each_adapter(adapted: Live, asked: openai.OpenAI) -> None:
    asked.completions.create(model="style", **ASKED)
    text = ServerMetrics(adapted.engine, "demo").render().decode()
    families = {it.name: it for it in text_string_to_metric_families(text)}
    counted = {
        name: {it.labels["adapter"]: it.value for it in families[f"slipstream:{name}"].samples}
        for name in ("adapter_num_draft_tokens", "adapter_num_accepted_tokens")
    }
    drafted, accepted = (it["style"] for it in counted.values())
    assert drafted > accepted >= 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"r": 300}, '"r" must be from 1 to 256'),
        ({"r": 32}, "start with --max-lora-rank 32"),
        ({"use_dora": True}, '"use_dora" is not supported'),
        ({"r": 5}, "but this model and adapter_config.json ask for"),
        ("nan", "holds NaN, infinity"),
        ("missing", "has no adapter_config.json"),
        ("cut", "adapter_model.safetensors"),
    ],
    ids=str,
)
def test_a_bad_adapter_is_refused_and_costs_nobody_anything(
    change: Any, told: str, adapted: Live, asked: openai.OpenAI, texts: list[str], tmp_path: Path
) -> None:
    given = change if isinstance(change, dict) else {}
    write_adapter(tmp_path, TARGET, targets=("o_proj",), **given)
    file = tmp_path / "adapter_model.safetensors"
    if change == "nan":
        stored = load_file(file)
        next(iter(stored.values()))[0, 0] = float("nan")
        save_file(stored, file)
    elif change == "missing":
        (tmp_path / "adapter_config.json").unlink()
    elif change == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    refused = load(adapted, "bad", str(tmp_path))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "lora_path")
    assert told in error["message"]
    assert asked.completions.create(model="style", **ASKED).choices[0].text == texts[0]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"lora_name": "style"}, "there is a model 'style' already"),
        ({"lora_name": "demo"}, "there is a model 'demo' already"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_path": 3}, "lora_path"),
        ({"load_inplace": True}, "unknown field load_inplace"),
        ({"lora_path": "~nobody-of-this-name/x"}, "has no adapter_config.json"),
        pytest.param({"lora_path": "a" * 4000}, "File name too long; give", id="long path"),
        ({"lora_path": "a\0b"}, "has no adapter_config.json"),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused(
    body: dict[str, Any], told: str, adapted: Live, folders: list[str]
) -> None:
    whole = {"lora_name": "new", "lora_path": folders[1], **body}
    refused = post(adapted, "/v1/load_lora_adapter", **whole)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert told in message
    assert len(message) < 400


def test_nothing_is_loaded_where_requests_are_not_trusted(live: Live, folders: list[str]) -> None:
    for refused in (load(live, "a", folders[0]), unload(live, "a")):
        assert refused.status_code == 400
        assert "--trust-request-lora" in refused.json()["error"]["message"]


def test_modules_are_given_by_name_or_in_json() -> None:
    given = [
        *("a=/x/y=z", '{"name": "b", "path": "p", "base_model_name": "demo"}'),
        '{"name": "c", "path": "p", "draft_path": "d"}',
    ]
    expected = [NamedPath("a", "/x/y=z"), NamedPath("b", "p"), NamedPath("c", "p", "d")]
    assert parse_modules(given) == expected
    for text in (
        *("a", "a=", "=b", "{", '{"name": "a"}', '{"name": 1, "path": "p"}'),
        '{"name": "a", "path": "p", "draft_path": 3}',
        '{"name": "a", "path": "p", "draft_path": ""}',
        '{"name": "a", "path": "p", "draught_path": "d"}',
    ):
        with pytest.raises(UsageError, match="--lora-modules"):
            parse_modules([text])
