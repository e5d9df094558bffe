"""The bundled models on text that none of them saw: accepted often, and changing nothing."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream import LLM, RequestOutput, SamplingParams

DEMO = Path(slipstream.__file__).parent / "demo"
HELD_OUT = DEMO / "prompts" / "held_out.jsonl"
# A little less than the 8 prompts below reach; over all 80 it is 3.7, 3.2, 2.9, 3.1 and 2.8.
ACCEPTANCE_LENGTHS = {
    "demo/draft": 3.0,
    "demo/eagle3": 2.5,
    "demo/mtp": 2.3,
    "demo/p-eagle": 2.4,
    "demo/pard": 2.2,
    "ngram": 1.0,
}
GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=0)
NEAR_TIE = 0.125  # of two logits in bf16, whose rounding at this size is of that order


def prompts(number: int) -> list[str]:
    entries = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    texts = [entry["prompt"] for entry in entries if "prompt" in entry]
    return texts[:: len(texts) // number][:number]


def make(drafter: str | None, dtype: str) -> LLM:
    config: dict[str, Any] | None = None
    if drafter is not None:
        config = {"model": drafter, "num_speculative_tokens": 4}
    return LLM("demo", speculative_config=config, dtype=dtype, max_num_seqs=8)


def acceptance_length(llm: LLM) -> float:
    return llm.metrics.speculation.acceptance_length


@pytest.fixture(scope="module")
def plain() -> dict[str, list[RequestOutput]]:
    return {
        dtype: make(None, dtype).generate(prompts(8), GREEDY) for dtype in ("float32", "bfloat16")
    }


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(it, marks=pytest.mark.full) if it in ("demo/p-eagle", "demo/pard") else it
        for it in ACCEPTANCE_LENGTHS
    ],
)
def test_greedy_text_is_the_plain_text(drafter: str, plain: dict[str, list[RequestOutput]]) -> None:
    llm = make(drafter, "float32")
    outputs = llm.generate(prompts(8), GREEDY)
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in plain["float32"]]
    assert acceptance_length(llm) >= ACCEPTANCE_LENGTHS[drafter]


def test_what_ships_is_what_the_manifest_says() -> None:
    hashes = json.loads((DEMO / "manifest.json").read_text())["files"]
    files = {file.relative_to(DEMO).as_posix(): file for file in DEMO.glob("*/*.*")}
    files = {name: file for name, file in files.items() if "__pycache__" not in name}
    assert set(files) == set(hashes)
    for name, file in files.items():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == hashes[name], name
    size = sum(file.stat().st_size for file in files.values())
    assert size <= 40 << 20


def test_in_bf16_outputs_part_only_where_two_tokens_tie(
    plain: dict[str, list[RequestOutput]], record_property: Callable[[str, object], None]
) -> None:
    outputs = make("demo/draft", "bfloat16").generate(prompts(8), GREEDY)
    pairs = zip(plain["bfloat16"], outputs, strict=True)
    gaps = [gap for pair in pairs if (gap := parting(*pair)) is not None]
    record_property("outputs that part at a near-tie", len(gaps))
    assert all(abs(gap) < NEAR_TIE for gap in gaps), gaps


def parting(plain: RequestOutput, drafted: RequestOutput) -> float | None:
    """The difference of the two tokens' logprobs where two outputs part; None if they do not."""
    expected, ours = plain.outputs[0], drafted.outputs[0]
    assert expected.logprobs is not None
    assert ours.logprobs is not None
    for place, (a, b) in enumerate(zip(expected.token_ids, ours.token_ids, strict=False)):
        if a != b:
            return expected.logprobs[place][a].logprob - ours.logprobs[place][b].logprob
    return None


def test_the_target_as_its_own_draft_is_accepted() -> None:
    llm = make("demo", "float32")
    llm.generate(prompts(6), replace(GREEDY, max_tokens=76))
    assert acceptance_length(llm) >= 4.95


def test_a_conversation_is_answered() -> None:
    entries = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    messages = next(entry["messages"] for entry in entries if "messages" in entry)
    llm = make("demo/draft", "bfloat16")
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=200))[0]
    assert output.outputs[0].text.startswith("def ")
    assert "<|im_end|>" not in output.outputs[0].text
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\n")


def test_a_stop_string_cuts_the_text_and_the_tokens() -> None:
    llm = make("demo/draft", "float32")
    whole = llm.generate("import os\n", GREEDY)[0].outputs[0]
    stop = whole.text[20:26]
    params = SamplingParams(temperature=0, max_tokens=40, stop=[stop])
    output = llm.generate("import os\n", params)[0].outputs[0]
    assert output.text == whole.text[: whole.text.index(stop)]
    assert output.finish_reason == "stop"
    assert output.stop_reason == stop
    assert list(output.token_ids) == list(whole.token_ids[: len(output.token_ids)])
    assert len(output.token_ids) < len(whole.token_ids)
    assert len(output.from_draft) == len(output.token_ids)


def test_streaming_grows_the_text_and_leaving_aborts() -> None:
    llm = make("demo/draft", "bfloat16")
    seen = ""
    for count, output in enumerate(llm.stream("import os\n", GREEDY)):
        assert output.outputs[0].text.startswith(seen)
        seen = output.outputs[0].text
        if count == 3:
            break
    assert seen
    assert not llm.engine.has_unfinished


def test_bad_words_are_never_completed() -> None:
    llm = make("demo/draft", "float32")
    free = llm.generate("import os\n", GREEDY)[0].outputs[0].text
    word = "import torch"
    assert word in free
    params = SamplingParams(temperature=0, max_tokens=40, bad_words=[word])
    assert word not in llm.generate("import os\n", params)[0].outputs[0].text
