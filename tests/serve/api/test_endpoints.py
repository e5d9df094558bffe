"""The endpoints that do not generate."""

from time import sleep
from typing import Any

import httpx
import openai
import pytest

from slipstream import __version__
from tests.serve.api.live import Live

MESSAGES = [{"role": "user", "content": "Hi"}]
SILENT = [{"role": "user", "content": ""}]


def post(live: Live, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{live.url}{path}", json=body)
    return answer.json() if answer.status_code == 200 else answer.json()["error"]["message"]


def test_models_say_what_drafts(client: openai.OpenAI) -> None:
    first, second = client.models.list().data
    assert (first.id, second.id) == ("demo", "other-name")
    assert first.object == "model"
    extra: Any = first
    assert extra.max_model_len == 2048
    assert extra.has_chat_template is True
    drafter = {"method": "draft_model", "model": "demo/draft", "num_speculative_tokens": 4}
    assert extra.speculative == {**drafter, "adaptive": False}
    assert client.models.retrieve("other-name").id == "other-name"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_health_and_version(live: Live) -> None:
    assert httpx.get(f"{live.url}/health").json() == {"status": "ok"}
    for path in ("/health", "/metrics", "/openapi.json"):  # as load balancers ask
        head = httpx.head(f"{live.url}{path}")
        assert (head.status_code, head.content) == (200, b"")
    assert httpx.get(f"{live.url}/ping").json() == {"status": "ok"}
    assert httpx.post(f"{live.url}/ping").json() == {"status": "ok"}
    assert httpx.get(f"{live.url}/version").json() == {"version": __version__}


def test_load_counts_the_generating_requests(live: Live, client: openai.OpenAI) -> None:
    def load() -> int:
        return int(httpx.get(f"{live.url}/load").json()["server_load"])

    assert load() == 0
    streams = [
        client.completions.create(
            model="demo", prompt=["a", "b"], max_tokens=1500, stream=True, timeout=60
        )
        for _ in range(2)
    ]
    for stream in streams:
        next(iter(stream))
    assert load() == 2
    for stream in streams:
        stream.close()
    for _ in range(200):
        if not load():
            break
        sleep(0.02)
    assert load() == 0


def test_the_prefix_cache_is_emptied_beside_running_requests(
    live: Live, client: openai.OpenAI
) -> None:
    def answer() -> tuple[str, int]:
        prompt = "def add_numbers(first, second):\n" * 8
        done = client.completions.create(model="demo", prompt=prompt, max_tokens=8, temperature=0)
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        return done.choices[0].text, done.usage.prompt_tokens_details.cached_tokens or 0

    text, _ = answer()
    assert answer()[1] > 0
    running = client.completions.create(model="demo", prompt="x", max_tokens=400, stream=True)
    next(iter(running))
    assert post(live, "/reset_prefix_cache") == {"success": True}
    assert answer() == (text, 0)
    assert answer()[1] > 0
    assert sum(1 for _ in running) > 10
    live.engine.scheduler.check_invariants()


def test_texts_become_tokens_and_texts_again(live: Live) -> None:
    tokenizer = live.engine.tokenizer
    assert tokenizer is not None
    answer = post(live, "/tokenize", prompt="def größe():", return_token_strs=True)
    assert answer["tokens"] == tokenizer.encode("def größe():")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert answer["token_strs"][0] == tokenizer.id_to_token(answer["tokens"][0])
    back = post(live, "/detokenize", tokens=answer["tokens"])
    assert back == {"prompt": "def größe():"}
    assert "token_strs" not in post(live, "/tokenize", prompt="x", model="demo")


def test_the_tokenizer_is_described(live: Live) -> None:
    tokenizer = live.engine.tokenizer
    assert tokenizer is not None
    assert httpx.get(f"{live.url}/tokenizer_info").json() == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "unk_token": None,
        "pad_token": "<|endoftext|>",
        "chat_template": tokenizer.settings["chat_template"],
    }


def test_messages_become_tokens(live: Live) -> None:
    opened = post(live, "/tokenize", messages=MESSAGES)
    text = post(live, "/detokenize", tokens=opened["tokens"])["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    plain = post(live, "/tokenize", messages=MESSAGES, add_generation_prompt=False)
    text = post(live, "/detokenize", tokens=plain["tokens"])["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n"
    cut = post(live, "/tokenize", messages=MESSAGES, continue_final_message=True)
    text = post(live, "/detokenize", tokens=cut["tokens"])["prompt"]
    assert text == "<|im_start|>user\nHi"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {}, "give prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "give prompt or messages"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "goes with messages"),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, "there is no model"),
        ("/tokenize", {"prompt": ["x"]}, "prompt must be a text"),
        (
            "/tokenize",
            {"messages": SILENT, "continue_final_message": True},
            "could be continued",
        ),
        ("/detokenize", {"tokens": [10**8]}, "token ids go from 0"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens is missing"),
    ],
)
def test_wrong_bodies(live: Live, path: str, body: dict[str, Any], named: str) -> None:
    assert named in post(live, path, **body)
