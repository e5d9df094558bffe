"""Images in /v1/responses and /v1/messages: answers of chats, and 400s that name the part."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.engine.images import TowerReader
from slipstream.engine.media import MediaReader
from slipstream.serve.model_service import has_images
from slipstream.serve.protocol.chat import ChatRequest
from slipstream.serve.protocol.messages import MessagesRequest
from slipstream.serve.protocol.responses import ResponsesRequest
from tests.image_checkpoints import images, write, write_tokenizer_of
from tests.serve.api.live import Live, messages_of, serving
from tests.serve.api.test_images import GREEDY, message, url_of

TEXT: Any = {"type": "input_text", "text": "w5"}
BROKEN = "data:image/png;base64,AAAA"
CHAT = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": BROKEN}}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_tokenizer_of(write(tmp_path_factory.mktemp("images")))
    config = EngineConfig(model=str(folder), dtype="float32", num_kv_blocks=200, max_model_len=256)
    with serving(config, names=("seeing",)) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def block(url: str) -> dict[str, Any]:
    """An image of the Messages protocol."""
    head, data = url.split(",", 1)
    source = {"type": "base64", "media_type": head[5:].split(";")[0], "data": data}
    return {"type": "image", "source": source}


def post(live: Live, path: str, **body: Any) -> tuple[int, Any]:
    answer = httpx.post(f"{live.url}{path}", json=body, timeout=60)
    return answer.status_code, answer.json()


def shown(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **fields}


def respond(client: openai.OpenAI, given: Any, **fields: Any) -> Any:
    return client.responses.create(
        model="seeing", input=given, temperature=0, max_output_tokens=16, **fields
    )


@pytest.mark.parametrize(
    ("kind", "field", "body"),
    [
        (
            ChatRequest,
            "messages",
            {"role": "user", "content": CHAT},
        ),
        (ResponsesRequest, "input", {"role": "user", "content": [TEXT, shown(BROKEN)]}),
        (
            ResponsesRequest,
            "input",
            {"type": "function_call_output", "call_id": "c", "output": [shown(BROKEN)]},
        ),
        (MessagesRequest, "messages", {"role": "user", "content": [block(BROKEN)]}),
        (
            MessagesRequest,
            "messages",
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [block(BROKEN)]}
                ],
            },
        ),
    ],
)
def test_images_of_all_protocols_are_found(kind: Any, field: str, body: dict[str, Any]) -> None:
    given = {field: [{"role": "user", "content": "a"}, body], "max_tokens": 1}
    if kind is ResponsesRequest:
        del given["max_tokens"]
    messages = getattr(kind.model_validate(given), field)
    assert has_images(messages)
    assert not has_images(messages[:1])


def test_all_protocols_say_what_a_chat_says(live: Live, client: openai.OpenAI) -> None:
    one, two = map(url_of, images(2))
    asked = message("w5 w6", {"url": one}, "w7", {"url": two}, "w8")
    expected = client.chat.completions.create(model="seeing", messages=asked, **GREEDY)
    num_tokens = expected.usage.prompt_tokens
    parts = [
        shown(one, detail="auto"),
        {**TEXT, "text": "w7"},
        shown(two, detail="low"),
        {**TEXT, "text": "w8"},
    ]
    whole = respond(client, [{"role": "user", "content": [{**TEXT, "text": "w5 w6"}, *parts]}])
    assert whole.output_text == expected.choices[0].message.content
    assert whole.usage.input_tokens == num_tokens
    said: Any = [
        {"role": "user", "content": [{"type": "text", "text": "w5 w6"}, block(one)]},
        {"role": "user", "content": [{"type": "text", "text": "w7"}, block(two)]},
        {"role": "user", "content": "w8"},
    ]
    with messages_of(live) as messages:
        answer = messages.create(
            model="seeing", max_tokens=16, messages=said, extra_body={"temperature": 0}
        )
        encoded = live.engine.images
        assert isinstance(encoded, TowerReader)
        before = encoded.num_encoded
        counted = messages.count_tokens(model="seeing", messages=said)
    assert [getattr(it, "text", None) for it in answer.content] == [
        expected.choices[0].message.content
    ]
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == num_tokens
    assert counted.input_tokens == num_tokens
    _, tokenized = post(live, "/tokenize", messages=asked)
    assert tokenized["count"] == len(tokenized["tokens"]) == num_tokens
    assert encoded.num_encoded == before, "nothing is read to count"
    fewer: Any = {"mm_processor_kwargs": {"min_pixels": 64, "max_pixels": 512}}
    few = client.chat.completions.create(model="seeing", messages=asked, **GREEDY, extra_body=fewer)
    content = [{**TEXT, "text": "w5 w6"}, *parts]
    responded = respond(client, [{"role": "user", "content": content}], extra_body=fewer)
    assert responded.output_text == few.choices[0].message.content
    assert responded.usage.input_tokens == few.usage.prompt_tokens < num_tokens


def test_counting_reads_no_image_and_knows_no_limit_of_length(live: Live) -> None:
    """The image is new, and the tower is not run."""
    reader = live.engine.images
    assert isinstance(reader, TowerReader)
    before = reader.num_encoded
    content = [block(url_of(it)) for it in images(4, 7) * 4] + [{"type": "text", "text": "w5"}]
    messages = [{"role": "user", "content": content}]
    status, counted = post(live, "/v1/messages/count_tokens", messages=messages)
    assert status == 200
    assert counted["input_tokens"] > 256
    status, refused = post(live, "/v1/messages", messages=messages, max_tokens=4)
    assert status == 400
    assert f"{counted['input_tokens']} tokens with those of its images" in str(refused)
    assert reader.num_encoded == before


def test_a_stored_conversation_keeps_its_images(client: openai.OpenAI) -> None:
    first, second = (url_of(it) for it in images(2, 3))
    begun = respond(client, [{"role": "user", "content": [shown(first), TEXT]}])
    more = {"role": "user", "content": [shown(second), {**TEXT, "text": "w9"}]}
    asked = [
        *message({"url": first}, "w5"),
        {"role": "assistant", "content": begun.output_text},
        *message({"url": second}, "w9"),
    ]
    expected = client.chat.completions.create(model="seeing", messages=asked, **GREEDY)
    answer = respond(client, [more], previous_response_id=begun.id)
    assert answer.output_text == expected.choices[0].message.content
    assert answer.usage.input_tokens == expected.usage.prompt_tokens
    text = respond(client, "w9", previous_response_id=begun.id)
    assert text.usage.input_tokens > begun.usage.input_tokens


def test_truncation_leaves_turns_with_images_out(client: openai.OpenAI) -> None:
    turn = {"role": "user", "content": [shown(url_of(images(1, 5)[0].resize((64, 64)))), TEXT]}
    alone = respond(client, [turn])
    many = [turn, {"role": "assistant", "content": "w4"}] * 8 + [turn]
    with pytest.raises(openai.BadRequestError, match="tokens with those") as error:
        respond(client, many)
    assert error.value.code == "context_length_exceeded"
    shorter = respond(client, many, truncation="auto")
    assert alone.usage.input_tokens < shorter.usage.input_tokens < 256


def test_tools_return_images(live: Live, client: openai.OpenAI) -> None:
    """The chat template does not support tools, so the server writes them into messages."""
    url = url_of(images(1)[0])
    function = {"name": "look", "arguments": "{}"}
    chat: list[Any] = [
        {"role": "user", "content": "w5"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": message({"url": url}, "w6")[0]["content"]},
    ]
    expected = client.chat.completions.create(model="seeing", messages=chat, **GREEDY)
    output = [shown(url), {**TEXT, "text": "w6"}]
    items = [
        {"role": "user", "content": "w5"},
        {"type": "function_call", "call_id": "a", **function},
        {"type": "function_call_output", "call_id": "a", "output": output},
    ]
    answer = respond(client, items)
    assert answer.output_text == expected.choices[0].message.content
    assert answer.usage.input_tokens == expected.usage.prompt_tokens > 20
    result = {"type": "tool_result", "tool_use_id": "a"}
    messages = [
        {"role": "user", "content": "w5"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [{**result, "content": [block(url), {"type": "text", "text": "w6"}]}],
        },
    ]
    _, counted = post(live, "/v1/messages/count_tokens", messages=messages)
    assert counted["input_tokens"] == answer.usage.input_tokens


USER_PLACES: Any = [
    (shown(BROKEN), r"input\[0\]\.content\[1\]: an image cannot be read"),
    (shown("http://127.0.0.1/a.png"), r"input\[0\]\.content\[1\]: .*allowed-media-domains"),
    (shown(BROKEN, detail="fine"), r"input\[0\]\.content\[1\]\.detail"),
    (shown(BROKEN, file_id="file-1"), r"input\[0\]\.content\[1\]\.file_id .*keeps no files"),
    ({"type": "input_image", "file_id": "file-1"}, r"file_id .*keeps no files"),
    ({"type": "input_image"}, r"input\[0\]\.content\[1\]\.image_url is missing"),
    (shown({"url": BROKEN}), r"input\[0\]\.content\[1\]\.image_url"),  # type: ignore[arg-type]
    ({"type": "image_url", "image_url": {"url": BROKEN}}, "input_image in /v1/responses"),
    ({"type": "input_file", "file_id": "a"}, "input_file is not supported"),
]


@pytest.mark.parametrize(("part", "said"), USER_PLACES)
def test_responses_name_what_is_wrong(client: openai.OpenAI, part: Any, said: str) -> None:
    """Instructions come before the items, which keep their numbers from the body."""
    with pytest.raises(openai.BadRequestError, match=said) as error:
        respond(client, [{"role": "user", "content": [TEXT, part]}], instructions="w4")
    assert error.value.param == "input"


def test_what_else_responses_refuse(client: openai.OpenAI) -> None:
    for given, said in (
        ([{"role": "assistant", "content": [shown(BROKEN)]}], "writes no images"),
        ([{"role": "user", "content": [shown(BROKEN)] * 17}], "at most 16"),
        ([{"role": "user", "content": [shown(BROKEN), {"type": "input_text"}]}], "text is missing"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            respond(client, given)


BLOCKS: Any = [
    (block(BROKEN), "messages[1].content[1]: an image cannot be read"),
    ({"type": "image", "source": {"type": "url", "url": "file:///a"}}, "files of the server"),
    ({"type": "image", "source": {"type": "url"}}, "messages[1].content[1].source.url is missing"),
    ({"type": "image", "source": {"type": "file", "file_id": "a"}}, "keeps no files"),
    ({"type": "image", "source": {}}, "messages[1].content[1].source.type must be one of"),
    ({"type": "image"}, "messages[1].content[1].source is missing"),
    (
        {"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": ""}},
        "messages[1].content[1].source.media_type",
    ),
    (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "!"}},
        "messages[1].content[1]: a data URL of an image is not base64",
    ),
    (
        {"type": "tool_result", "tool_use_id": "a", "content": [block(BROKEN)]},
        "content[1].content[0]:",
    ),
    ({"type": "document", "source": {}}, "document is not supported"),
]


@pytest.mark.parametrize(("given", "said"), BLOCKS)
def test_messages_name_what_is_wrong(live: Live, given: Any, said: str) -> None:
    """Messages of one role are one turn; their numbers stay those of the body."""
    text = {"type": "text", "text": "w5"}
    messages = [{"role": "user", "content": "w4"}, {"role": "user", "content": [text, given]}]
    for path, fields in (("/v1/messages", {"max_tokens": 1}), ("/v1/messages/count_tokens", {})):
        status, told = post(live, path, messages=messages, **fields)
        assert (status, told["type"]) == (400, "error")
        assert said in told["error"]["message"]


def test_the_assistant_and_the_system_show_nothing_in_messages(live: Live) -> None:
    said = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": [block(BROKEN)]}]
    status, told = post(live, "/v1/messages", messages=said, max_tokens=1)
    assert status == 400
    assert "image is not supported: images go into messages of the user" in told["error"]["message"]
    status, told = post(
        live, "/v1/messages", messages=said[:1], max_tokens=1, system=[block(BROKEN)]
    )
    assert status == 400
    assert "system[0]" in told["error"]["message"]


def test_an_image_of_an_earlier_turn_that_is_gone_is_told(
    live: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL is fetched again in every turn."""
    begun = respond(client, [{"role": "user", "content": [shown(url_of(images(1)[0])), TEXT]}])

    def missing(self: MediaReader, url: str, most_pixels: int) -> Any:
        raise UsageError("an image cannot be fetched: it is gone")

    monkeypatch.setattr(MediaReader, "open", missing)
    with pytest.raises(openai.BadRequestError, match=r"an image of previous_response_id: .* gone"):
        respond(client, "w5", previous_response_id=begun.id)
    assert live.model.thread.num_open == 0
