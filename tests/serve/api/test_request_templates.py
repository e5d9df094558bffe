"""Chat templates that requests bring, where the server trusts its clients with that."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Semaphore
from typing import Any

import pytest

from slipstream.models import chat_environment
from slipstream.serve.options import AnswerOptions
from tests.serve.api.live import Live, serving
from tests.serve.api.test_request_fields import CHAT, HTTP, PLAIN, ask

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def trusting() -> Iterator[Live]:
    with serving(answers=AnswerOptions(trust_request_chat_template=True)) as live:
        yield live


def test_the_template_writes_the_prompt(trusting: Live) -> None:
    fields = {"chat_template": TEMPLATE, "return_prompt_text": True}
    assert ask(trusting, CHAT, **fields)["prompt_text"] == "<user>Write add(a, b)."
    plain = ask(trusting, CHAT, return_prompt_text=True)["prompt_text"]
    assert plain != "<user>Write add(a, b)."
    body = {"messages": PLAIN[CHAT]["messages"], "chat_template": TEMPLATE}
    tokens = HTTP.post(f"{trusting.url}/tokenize", json=body).json()["tokens"]
    assert trusting.model.tokenizer.decode(tokens) == "<user>Write add(a, b)."


def test_documents_are_for_the_template(trusting: Live) -> None:
    template = "{% for d in documents %}[{{ d.title }}]{% endfor %}" + TEMPLATE
    fields: dict[str, Any] = {"chat_template": template, "documents": [{"title": "T"}]}
    answer = ask(trusting, CHAT, **fields, return_prompt_text=True)
    assert answer["prompt_text"].startswith("[T]<user>")


def test_other_conversations_do_not_wait_for_them(
    trusting: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = Semaphore(0), Event()

    def wait(_: str) -> str:
        begun.release()
        return str(go_on.wait(60))

    monkeypatch.setattr(chat_environment, "_strftime_now", wait)
    chat = {**PLAIN[CHAT], "chat_template": TEMPLATE + "{{ strftime_now('') }}"}
    tokenize = {"messages": chat["messages"], "chat_template": chat["chat_template"]}
    with ThreadPoolExecutor(4) as pool:
        try:
            for path, body in ((CHAT, chat), ("/tokenize", tokenize)) * 2:
                pool.submit(HTTP.post, f"{trusting.url}{path}", json=body)
            for _ in range(2):  # as many as are rendered at a time
                assert begun.acquire(timeout=30)
            assert ask(trusting, CHAT)["choices"]
        finally:
            go_on.set()


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{% for", "chat_template is not valid"),
        ("{{ messages | nothing_known }}", "chat_template is not valid"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "refuses"),
        ("{{ '(' * 3 }}" + "(" * 10, ""),
        ("{{ " + "(" * 5000 + " }}", "chat_template is not valid"),
        ("nothing", "would be ignored"),
    ],
)
def test_a_bad_template_is_the_fault_of_its_request(
    trusting: Live, template: str, named: str
) -> None:
    body = {**PLAIN[CHAT], "chat_template": template}
    answer = HTTP.post(f"{trusting.url}{CHAT}", json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert "/root" not in answer.text


def test_other_servers_take_none(live: Live) -> None:
    for more in ({"chat_template": TEMPLATE}, {"documents": [{"title": "T"}]}):
        answer = HTTP.post(f"{live.url}{CHAT}", json={**PLAIN[CHAT], **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(more)))
