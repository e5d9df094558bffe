"""Images in conversations: the answers of `LLM.chat`, and 400s that cost nobody anything."""

import base64
import gc
import io
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from PIL import Image

from slipstream import LLM, SamplingParams
from slipstream.core.config import EngineConfig
from slipstream.core.request import Request
from slipstream.engine.images import TowerReader
from slipstream.engine.prompts import EncodedPrompt
from slipstream.models.vision.tower import SpanEmbeddings
from slipstream.serve import conversation_images
from tests.image_checkpoints import images, write, write_tokenizer_of
from tests.image_corpus import corpus
from tests.serve.api.live import Live, serving

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_tokenizer_of(write(tmp_path_factory.mktemp("images")))
    images(2)[1].save(folder / "two.png")
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        num_kv_blocks=200,
        allowed_local_media_path=str(folder),
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )


@pytest.fixture(scope="module")
def live(config: EngineConfig) -> Iterator[Live]:
    with serving(config, names=("seeing",)) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def url_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def message(*parts: Any) -> list[Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def ask(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model="seeing", messages=messages, **GREEDY, **fields)


def test_answers_are_those_of_llm_chat(
    config: EngineConfig, live: Live, client: openai.OpenAI
) -> None:
    one, two = images(2)
    file = f"file://{config.model}/two.png"
    parts = message("w5 w6", {"url": url_of(one)}, "w7", {"url": file, "detail": "auto"}, "w8")
    answer = ask(client, parts)
    content = parts[0]["content"]
    pictured = [
        content[0],
        {"type": "image_pil", "image_pil": one},
        content[2],
        {"type": "image_pil", "image_pil": two},
        content[4],
    ]
    expected = LLM(config).chat([{"role": "user", "content": pictured}], SamplingParams(**GREEDY))
    assert answer.choices[0].message.content == expected[0].outputs[0].text
    assert answer.usage.prompt_tokens == len(expected[0].prompt_token_ids) > 60
    streamed = ask(client, parts, stream=True)
    text = "".join(it.choices[0].delta.content or "" for it in streamed if it.choices)
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize("detail", ["low", "high"])
def test_detail_has_no_effect(detail: str, client: openai.OpenAI) -> None:
    url = url_of(images(1)[0])
    plain, hinted = (
        ask(client, message({"url": url, **more}, "w5")) for more in ({}, {"detail": detail})
    )
    assert hinted.usage.prompt_tokens == plain.usage.prompt_tokens
    assert hinted.choices[0].message.content == plain.choices[0].message.content


def test_a_request_has_options_of_the_processor(
    config: EngineConfig, live: Live, client: openai.OpenAI
) -> None:
    """Those of `LLM.chat`; an image that was read otherwise is another one to all caches."""
    image = images(1, 21)[0]
    picture = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "w5"}]
    parts, llm = message({"url": url_of(image)}, "w5"), LLM(config)
    several: list[dict[str, Any]] = [
        {},
        {"min_pixels": 64, "max_pixels": 512},
        {"size": {"shortest_edge": 64, "longest_edge": 1024}},
        {"max_pixels": 512},
    ]
    for options in [*several, *several]:
        [expected] = llm.chat(
            [{"role": "user", "content": picture}],
            SamplingParams(**GREEDY),
            mm_processor_kwargs=options,
        )
        fields = {"extra_body": {"mm_processor_kwargs": options}}
        answer = ask(client, parts, **fields)
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        body = {"messages": parts, "mm_processor_kwargs": options}
        counted = httpx.post(f"{live.url}/tokenize", json=body, timeout=60).json()
        assert counted["tokens"] == list(expected.prompt_token_ids)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sighs": "x" * 9999}, "options of the image processor are size"),
        ({"max_pixels": 4097}, "up to 4097 pixels are more than the 4096 that this server reads"),
        ({"min_pixels": 10**12}, "must be from 1 to longest_edge"),
        (dict.fromkeys(map(str, range(17)), 1), "17 entries, more than 16"),
        (5, "object"),
    ],
)
def test_wrong_options_of_the_processor_are_a_clear_400(
    options: Any, said: str, client: openai.OpenAI
) -> None:
    for parts in (message({"url": url_of(images(1)[0])}, "w5"), message("w5")):
        with pytest.raises(openai.BadRequestError, match=said) as error:
            ask(client, parts, extra_body={"mm_processor_kwargs": options})
        assert error.value.param == "mm_processor_kwargs"
        assert len(str(error.value)) < 1000


def test_text_beside_images_is_as_ever(client: openai.OpenAI) -> None:
    texts = [{"role": "user", "content": "w5 w6"}], message("w5 w6")
    answers = [ask(client, messages).choices[0].message.content for messages in texts]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (message({"url": "data:image/png;base64,AAAA"}), r"messages\[0\].content\[0\]: .* broken"),
        (message({"url": "http://169.254.169.254/latest"}), "allowed-media-domains"),
        (message({"url": "file:///etc/passwd"}), "no such image"),
        (message({"url": "data:image/png;base64,AAAA", "detail": "fine"}), "detail"),
        (message("<image> w3"), "1 placeholders"),
        (message("w3", *[{"url": "data:"}] * 17), "at most 16"),
        ([{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}], "video_url"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "audio"),
        (
            [{"role": "assistant", "content": message({"url": "data:"})[0]["content"]}],
            "messages of the user",
        ),
    ],
)
def test_what_cannot_be_read_is_a_clear_400(
    messages: list[Any], said: str, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        ask(client, messages)


def test_an_image_of_an_absurd_shape_is_told_with_its_part(client: openai.OpenAI) -> None:
    thin = {"url": url_of(images(1)[0].resize((900, 2)))}
    told = r"messages\[0\].content\[1\]: an image of 900 x 2 pixels cannot be read"
    with pytest.raises(openai.BadRequestError, match=told) as error:
        ask(client, message("w3", thin, "w4"))
    assert error.value.param == "messages"


def test_truncation_that_could_cut_an_image_is_refused(client: openai.OpenAI) -> None:
    messages = message({"url": url_of(images(1)[0])}, "w5")
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        ask(client, messages, extra_body={"truncate_prompt_tokens": 20})


def test_models_that_read_text_alone_say_so(tmp_path: Path) -> None:
    llm = LLM("demo")
    part = {"type": "image_pil", "image_pil": images(1)[0]}
    with pytest.raises(ValueError, match="text only"):
        llm.chat([{"role": "user", "content": [part]}])


def test_other_requests_go_on_while_images_are_read(
    live: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads for images wait in the tower."""
    begun, goes_on = threading.Semaphore(0), threading.Event()
    place = TowerReader.place

    def slowly(self: TowerReader, token_ids: list[int], given: Any, options: Any) -> Any:
        if given:
            begun.release()
            assert goes_on.wait(60)
        return place(self, token_ids, given, options)

    monkeypatch.setattr(TowerReader, "place", slowly)
    messages = message({"url": url_of(images(1, 3)[0])}, "w5")
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(client, messages))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for _ in range(2):
        assert begun.acquire(timeout=60)
    assert ask(client, [{"role": "user", "content": "w5"}]).choices[0].message.content
    assert not answers
    goes_on.set()
    for thread in threads:
        thread.join()
    assert len({it.choices[0].message.content for it in answers}) == 1


def test_no_hostile_image_is_more_than_a_400(live: Live) -> None:
    """Each error names its content part; larger bodies are refused before."""
    reader = live.engine.images
    assert isinstance(reader, TowerReader)
    before, wrong = reader.num_encoded, {}
    with httpx.Client(base_url=live.url, timeout=60) as http:
        for case in corpus():
            if case.answer is not None:
                continue
            parts = message({"url": case.url}, "w5")
            answer = http.post("/v1/chat/completions", json={"messages": parts, **GREEDY})
            named = "messages[0].content[0]: " in answer.text
            if answer.status_code != 413 and (answer.status_code != 400 or not named):
                wrong[case.name] = answer.text[:200]
        assert wrong == {}
        assert http.get("/health").status_code == 200
    assert reader.num_encoded == before
    assert live.model.thread.num_open == 0


def test_images_of_a_prompt_share_their_pixels(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image alone would be within the limit."""
    image = images(1)[0]
    most = 2 * image.width * image.height - 1
    monkeypatch.setattr(conversation_images, "MOST_PIXELS_TOGETHER", most)
    assert ask(client, message({"url": url_of(image)}, "w5")).choices
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[1\]: .* pixels"):
        ask(client, message(*[{"url": url_of(image)}] * 2, "w5"))


def test_what_was_read_is_kept_in_bounded_memory(
    live: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has only the latest images that fit."""
    reader = live.engine.images
    assert isinstance(reader, TowerReader)
    first, *others = images(4, 11)
    monkeypatch.setattr(reader, "_cache_bytes", 1)
    for image in (first, *others, first):
        before = reader.num_encoded
        ask(client, message({"url": url_of(image)}, "w5"))
        assert reader.num_encoded == before + 1
        assert len(reader._kept) == 1
        assert reader._kept_bytes == next(iter(reader._kept.values())).nbytes


def test_images_that_are_no_longer_kept_leave_no_objects(
    live: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of live objects is constant over 30 and 30 more images."""
    monkeypatch.setattr(live.engine.images, "_cache_bytes", 1)
    kinds = (SpanEmbeddings, torch.Tensor, Image.Image, Request, EncodedPrompt)

    def alive_after(seed: int) -> Counter[type]:
        for image in images(30, seed):
            ask(client, message({"url": url_of(image)}, "w5"))
        gc.collect()
        return Counter(type(it) for it in gc.get_objects() if type(it) in kinds)

    assert alive_after(20) == alive_after(21)


def test_a_client_that_leaves_while_its_image_is_read_leaves_nothing(
    live: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, read = threading.Event(), threading.Event(), threading.Event()
    place = TowerReader.place

    def slowly(self: TowerReader, token_ids: list[int], given: Any, options: Any) -> Any:
        if not given:
            return place(self, token_ids, given, options)
        begun.set()
        assert goes_on.wait(60)
        try:
            return place(self, token_ids, given, options)
        finally:
            read.set()

    monkeypatch.setattr(TowerReader, "place", slowly)
    body = {"messages": message({"url": url_of(images(1, 12)[0])}, "w5"), **GREEDY}
    content = json.dumps(body).encode()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client_that_leaves:
        client_that_leaves.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        assert begun.wait(60)
    assert httpx.get(f"{live.url}/health").status_code == 200
    goes_on.set()
    assert read.wait(60)
    assert ask(client, body["messages"]).choices
    assert live.model.thread.num_open == 0
