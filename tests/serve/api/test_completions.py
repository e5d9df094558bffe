"""/v1/completions through the openai client: every field, streamed and not."""

from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest

from slipstream import LLM, SamplingParams
from slipstream.serve.protocol.chat import ChatChunk, ChatChunkChoice
from slipstream.serve.protocol.completions import CompletionChunk
from tests.serve.api.live import Live, call_api

PROMPT = "def main("
REPEATED = "x = 1\nx = 1\nx = 1\nx = 1\n"
PROMPTS = [PROMPT, "import numpy", "class Tree:\n    def __init__("]


def create(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_tokens": 12, **fields}
    return call_api(client.completions.create, prompt=prompt, **given)


def streamed(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> dict[int, Any]:
    """Text, joined logprobs, finish and stop reason of each choice by index; under -1 the usage."""
    whole: dict[int, Any] = defaultdict(
        lambda: {"text": "", "logprobs": defaultdict(list), "finish_reason": None, "tokens": []}
    )
    options = {"include_usage": True}
    for chunk in create(client, prompt, stream=True, stream_options=options, **fields):
        if chunk.usage is not None:
            whole[-1] = chunk.usage
        for piece in chunk.choices:
            own = whole[piece.index]
            assert own["finish_reason"] is None, "nothing comes after the end"
            own["text"] += piece.text
            own["finish_reason"] = piece.finish_reason
            own["stop_reason"] = piece.stop_reason
            own["tokens"] += (getattr(piece, "speculation", None) or {}).get("tokens", [])
            for name, values in (piece.logprobs.model_dump() if piece.logprobs else {}).items():
                own["logprobs"][name] += values
    return dict(whole)


def first_choice(
    client: openai.OpenAI, stream: bool, **fields: Any
) -> tuple[str, Any, list[dict[str, Any]], Any]:
    """Text, logprobs, tokens with their origins, and usage; streamed or not."""
    if stream:
        pieces = streamed(client, **fields)
        return pieces[0]["text"], pieces[0]["logprobs"], pieces[0]["tokens"], pieces[-1]
    answer = create(client, **fields)
    choice = answer.choices[0]
    logprobs = choice.logprobs and choice.logprobs.model_dump()
    tokens = (getattr(choice, "speculation", None) or {}).get("tokens", [])
    return choice.text, logprobs, tokens, answer.usage


def test_greedy_text_is_the_offline_text(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    answer = create(client, PROMPTS, max_tokens=24)
    assert [choice.text for choice in answer.choices] == [it.outputs[0].text for it in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    pieces = streamed(client, PROMPTS, max_tokens=24)
    assert [pieces[index]["text"] for index in range(3)] == [it.outputs[0].text for it in expected]


def test_sampled_text_follows_the_seed(client: openai.OpenAI, offline: LLM) -> None:
    sampling = {"temperature": 0.8, "seed": 7, "top_p": 0.9, "n": 2}
    params = SamplingParams(**sampling, top_k=20, min_p=0.01, max_tokens=24)  # type: ignore[arg-type]
    expected = [it.text for it in offline.generate([PROMPT], params)[0].outputs]
    answer = create(client, max_tokens=24, top_k=20, min_p=0.01, **sampling)
    assert [choice.text for choice in answer.choices] == expected
    assert expected[0] != expected[1]
    pieces = streamed(client, max_tokens=24, top_k=20, min_p=0.01, **sampling)
    assert [pieces[0]["text"], pieces[1]["text"]] == expected


def test_all_forms_of_prompts(client: openai.OpenAI, live: Live) -> None:
    ids = [live.engine.tokenizer.encode(it) for it in PROMPTS]  # type: ignore[union-attr]
    texts = [choice.text for choice in create(client, PROMPTS).choices]
    assert [choice.text for choice in create(client, ids).choices] == texts
    assert [choice.text for choice in create(client, ids[0]).choices] == texts[:1]
    assert [choice.text for choice in create(client, [ids[0], PROMPTS[1]]).choices] == texts[:2]


def test_choices_of_several_prompts_count_on(client: openai.OpenAI) -> None:
    answer = create(client, PROMPTS[:2], n=2, temperature=1, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = create(client, PROMPTS[1], n=2, temperature=1, seed=3)
    assert [choice.text for choice in answer.choices[2:]] == [it.text for it in alone.choices]
    assert answer.usage.completion_tokens == 4 * 12


def test_usage_counts_tokens(client: openai.OpenAI, live: Live) -> None:
    count = sum(len(live.engine.tokenizer.encode(it)) for it in PROMPTS)  # type: ignore[union-attr]
    usage = create(client, PROMPTS, n=2, temperature=1).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (count, 6 * 12)
    assert usage.total_tokens == count + 72
    last = streamed(client, PROMPTS, n=2, temperature=1)[-1]
    assert (last.prompt_tokens, last.completion_tokens) == (count, 72)


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = "x = 1\n" * 40
    create(client, prompt)
    usage = create(client, prompt).usage
    assert 16 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens


def test_usage_comes_only_where_it_is_asked_for(client: openai.OpenAI) -> None:
    plain = list(create(client, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    asked = list(create(client, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage is None for chunk in asked] == [True] * (len(asked) - 1) + [False]
    assert asked[-1].choices == []
    options = {"continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in create(client, stream=True, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 12


@pytest.mark.parametrize(
    ("path", "prompt", "kind"),
    [
        ("completions", {"prompt": PROMPT}, CompletionChunk),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, ChatChunk),
    ],
)
def test_streams_share_an_id_and_end_with_done(
    live: Live, path: str, prompt: dict[str, Any], kind: type[CompletionChunk] | type[ChatChunk]
) -> None:
    body = {**prompt, "max_tokens": 5, "stream": True, "logprobs": "chat" in path or 2}
    body |= {"return_speculation": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{live.url}/v1/{path}", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, nothing = answer.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    chunks = [kind.model_validate_json(it.removeprefix("data: ")) for it in events]
    assert len({chunk.id for chunk in chunks}) == 1
    first = chunks[0].choices[0]
    assert not isinstance(first, ChatChunkChoice) or first.delta.role == "assistant"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_lists_side_by_side(client: openai.OpenAI, offline: LLM, stream: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    expected = offline.generate([PROMPT], params)[0].outputs[0]
    text, logprobs, *_ = first_choice(client, stream, logprobs=3)
    assert "".join(logprobs["tokens"]) == text
    assert len(logprobs["tokens"]) == 12
    places = [
        text.find(token, at)
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    ]
    assert places == logprobs["text_offset"]
    chosen = [
        row[token].logprob
        for row, token in zip(expected.logprobs or (), expected.token_ids, strict=True)
    ]
    assert logprobs["token_logprobs"] == pytest.approx(chosen, abs=1e-4)
    for top, logprob in zip(logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True):
        assert len(top) == 3
        assert max(top.values()) == logprob  # greedy


def test_no_alternatives_is_the_token_alone(client: openai.OpenAI) -> None:
    logprobs = create(client, logprobs=0).choices[0].logprobs
    assert [list(top) for top in logprobs.top_logprobs] == [[token] for token in logprobs.tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    plain = create(client, PROMPTS).choices
    if stream:
        texts = [streamed(client, PROMPTS, echo=True)[index]["text"] for index in range(3)]
    else:
        texts = [choice.text for choice in create(client, PROMPTS, echo=True).choices]
    assert texts == [prompt + it.text for prompt, it in zip(PROMPTS, plain, strict=True)]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    plain = create(client, logprobs=1).choices[0]
    text, logprobs, *_ = first_choice(client, stream, logprobs=1, echo=True)
    assert "".join(logprobs["tokens"]) == text == PROMPT + plain.text
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["tokens"][3:] == plain.logprobs.tokens
    assert logprobs["text_offset"][3:] == [
        len(PROMPT) + offset for offset in plain.logprobs.text_offset
    ]
    assert logprobs["token_logprobs"][3:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)


def test_scoring_a_prompt_generates_nothing(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    expected = offline.generate([PROMPT], params)[0]
    answer = create(client, max_tokens=0, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert answer.usage.completion_tokens == 0
    rows = expected.prompt_logprobs or ()
    chosen = [
        None if row is None else row[token].logprob
        for row, token in zip(rows, expected.prompt_token_ids, strict=True)
    ]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(chosen[1:], abs=1e-4)
    one = streamed(client, max_tokens=0, echo=True, logprobs=2)[0]
    assert one["text"] == PROMPT
    assert one["logprobs"]["token_logprobs"] == choice.logprobs.token_logprobs


def test_nothing_at_all_may_be_generated(client: openai.OpenAI) -> None:
    answer = create(client, PROMPTS, max_tokens=0, n=2)
    assert [choice.text for choice in answer.choices] == [""] * 6
    assert create(client, max_tokens=0, echo=True).choices[0].text == PROMPT
    ids = answer.usage.prompt_tokens
    assert (ids > 0, answer.usage.completion_tokens) == (True, 0)


def test_prompt_logprobs(client: openai.OpenAI, live: Live) -> None:
    choice = create(client, prompt_logprobs=2).choices[0]
    ids = live.engine.tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    rows = choice.prompt_logprobs
    assert rows[0] is None
    for token, row in zip(ids[1:], rows[1:], strict=True):
        assert {it["rank"] for it in row.values()} >= {1, 2}
        assert row[str(token)]["logprob"] <= 0
        assert len(row) in (2, 3)


def test_stop_strings(client: openai.OpenAI) -> None:
    whole = create(client, max_tokens=24).choices[0].text
    stop = whole[20:24]
    for fields in ({"stop": stop}, {"stop": ["never ever", stop]}):
        choice = create(client, max_tokens=24, **fields).choices[0]
        assert choice.text == whole[: whole.index(stop)]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        one = streamed(client, max_tokens=24, **fields)[0]
        assert (one["text"], one["finish_reason"]) == (choice.text, "stop")
    kept = create(client, max_tokens=24, stop=stop, include_stop_str_in_output=True).choices[0]
    assert kept.text == whole[: whole.index(stop) + len(stop)]


def test_stop_tokens(client: openai.OpenAI, live: Live) -> None:
    tokens = create(client, logprobs=0).choices[0].logprobs.tokens
    ids = live.engine.tokenizer.encode("".join(tokens))  # type: ignore[union-attr]
    choice = create(client, stop_token_ids=[ids[4]]).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ids[4])
    late = create(client, stop_token_ids=[ids[4]], min_tokens=6)
    assert late.usage.completion_tokens >= 6


def test_end_tokens_can_be_ignored(client: openai.OpenAI, live: Live) -> None:
    eos = live.engine.resolved.eos_token_ids[0]
    forced = {"logit_bias": {str(eos): 100}, "max_tokens": 6}
    ended = create(client, **forced)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    ignored = create(client, ignore_eos=True, **forced)
    assert ignored.choices[0].finish_reason == "length"
    assert ignored.usage.completion_tokens == 6
    shown = create(client, ignore_eos=True, skip_special_tokens=False, **forced)
    name = live.engine.tokenizer.id_to_token(eos)  # type: ignore[union-attr]
    assert shown.choices[0].text == name * 6
    later = create(client, min_tokens=3, **forced)
    assert later.usage.completion_tokens == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.4},
        {"logit_bias": {"466": 30}},
        {"bad_words": ["x", "1"]},
        {"allowed_token_ids": [466, 10, 3225, 12, 13]},
    ],
)
def test_what_shapes_the_text_arrives(
    client: openai.OpenAI, offline: LLM, fields: dict[str, Any]
) -> None:
    own = dict(fields)
    if "logit_bias" in own:
        own["logit_bias"] = {466: 30}
    params = SamplingParams(temperature=0, max_tokens=16, **own)
    expected = offline.generate([REPEATED], params)[0].outputs[0].text
    assert create(client, REPEATED, max_tokens=16, **fields).choices[0].text == expected
    assert expected != create(client, REPEATED, max_tokens=16).choices[0].text


def test_how_much_to_draft(client: openai.OpenAI) -> None:
    texts = set()
    for most in range(5):
        answer = create(
            client,
            max_tokens=16,
            speculative={"num_speculative_tokens": most},
            return_speculation=True,
        )
        texts.add(answer.choices[0].text)
        usage = answer.usage.speculation
        assert len(usage["accepted_per_position"]) == most
        assert usage["draft_tokens"] <= most * usage["drafts"]
        assert sum(usage["accepted_per_position"]) == usage["accepted_tokens"]
    assert len(texts) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_where_tokens_came_from(client: openai.OpenAI, stream: bool) -> None:
    fields = {"return_speculation": True, "logprobs": 0, "max_tokens": 24}
    text, _, tokens, counts = first_choice(client, stream, **fields)
    usage = counts.speculation
    assert "".join(token["text"] for token in tokens) == text
    assert len(tokens) == 24
    accepted = [token for token in tokens if token["kind"] == "accepted"]
    assert 0 < len(accepted) <= usage["accepted_tokens"]
    assert {token["position"] for token in accepted} <= {0, 1, 2, 3}
    assert {token["kind"] for token in tokens} <= {"accepted", "bonus", "recovered", "plain"}
    assert all(token["logprob"] <= 0 for token in tokens)
    assert usage["steps"] < 24
    assert usage["acceptance_length"] == 1 + usage["accepted_tokens"] / usage["drafts"]
    assert usage["refused_drafting_seconds"] > 0
    chosen = usage["steps_by_draft_tokens"]
    assert sum(chosen) == usage["steps"]
    assert sum(count for number, count in enumerate(chosen) if number) == usage["drafts"]
    assert usage["decode_seconds"] == 0
    assert usage.get("estimated_speedup") is None  # K is fixed


def test_fields_that_change_nothing(client: openai.OpenAI) -> None:
    plain = create(client).choices[0].text
    fields = {"user": "me", "best_of": 1, "spaces_between_special_tokens": True}
    assert create(client, **fields).choices[0].text == plain
    assert create(client, add_special_tokens=False).choices[0].text == plain
    nulls = {"suffix": None, "seed": None, "stop": None, "logit_bias": None, "top_k": None}
    assert create(client, **nulls).choices[0].text == plain


def test_names_of_the_model(client: openai.OpenAI) -> None:
    assert create(client, model="other-name").model == "demo"
    with pytest.raises(openai.NotFoundError) as raised:
        create(client, model="gpt-4o")
    assert raised.value.code == "model_not_found"
    assert "demo" in raised.value.message
