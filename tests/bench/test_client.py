"""The client against a server that does what a script says, and to what goes wrong on the way."""

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

import pytest

from slipstream.bench.client import Client
from slipstream.bench.datasets import BenchPrompt
from slipstream.bench.load import LoadRun, run_load
from slipstream.bench.options import Server
from slipstream.bench.protocol import BrokenStreamError, EventParser, RequestForm, read_event
from slipstream.bench.record import CHUNKS, TOKENIZER, USAGE, Record
from slipstream.core.errors import UsageError
from tests.bench.test_datasets import Letters
from tests.fake_openai_server import Script, answer, completion, delta, serving, usage

TEXT = BenchPrompt(id="t", text="def f():")
CHAT = BenchPrompt(id="c", messages=({"role": "user", "content": "Hi"},), max_tokens=9)
TOKENS = BenchPrompt(id="i", token_ids=(3, 4, 5))
DONE = b"data: [DONE]\n\n"


def ask(script: Script, *prompts: BenchPrompt, form: RequestForm | None = None, **more: Any) -> Any:
    """The records of these prompts, one after another."""

    async def all_of_them(url: str) -> list[Record]:
        server = Server(base_url=url, request_timeout=more.get("timeout", 10.0))
        async with Client(server) as client:
            return [
                await client.complete(it, form or RequestForm(model="m"), more.get("encoder"))
                for it in prompts
            ]

    with serving(script) as url:
        return asyncio.run(all_of_them(url))


def test_texts_and_chats_are_asked_at_their_endpoints() -> None:
    def both(body: Any) -> list[Any]:
        if "messages" not in body:
            return answer("abcd")
        ends = delta("", finish_reason="stop")
        return [delta(""), delta("x"), delta("yz"), ends, usage(4, 3), DONE]

    script = Script(events=both)
    form = RequestForm(model="m", max_tokens=5, fields={"temperature": 0.0, "top_k": 3})
    text, chat, tokens = ask(script, TEXT, CHAT, TOKENS, form=form)
    assert (text.text, text.num_tokens, text.num_prompt_tokens) == ("abcd", 4, 3)
    assert (chat.text, chat.num_tokens, chat.finish_reason) == ("xyz", 3, "stop")
    assert len(chat.arrivals) == 2  # the role alone is no token
    assert {it.counted_by for it in (text, chat, tokens)} == {USAGE}
    paths, bodies = zip(*script.asked, strict=True)
    assert paths == ("/v1/completions", "/v1/chat/completions", "/v1/completions")
    first = {
        "model": "m",
        "prompt": "def f():",
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "top_k": 3,
    }
    assert bodies[0] == first
    assert bodies[1]["messages"] == [{"role": "user", "content": "Hi"}]
    assert bodies[1]["max_tokens"] == 9  # its own
    assert bodies[2]["prompt"] == [3, 4, 5]


def test_one_endpoint_may_be_asked_for_all() -> None:
    chat = RequestForm(model="m", endpoint="chat")
    assert chat.path(TEXT) == "/v1/chat/completions"
    assert b'"messages": [{"role": "user", "content": "def f():"}]' in chat.body(TEXT)
    with pytest.raises(UsageError, match="the prompt i is token ids"):
        chat.body(TOKENS)
    with pytest.raises(UsageError, match="the prompt c is a chat"):
        RequestForm(model="m", endpoint="completions").body(CHAT)


def test_tokens_of_chunks_are_known_where_the_server_tells() -> None:
    tokens = [{"text": "a", "kind": "accepted", "position": 0, "logprob": None}] * 3
    held = completion("", speculation={"tokens": tokens[:1]})  # half of a character
    events = [completion("aaa", speculation={"tokens": tokens}), held, usage(1, 4), DONE]
    (told,) = ask(Script(events=lambda body: events), TEXT)
    assert told.tokens_per_chunk() == [3, 1]
    ids = [completion("ab", token_ids=[1, 2]), usage(1, 2), DONE]
    (told,) = ask(Script(events=lambda body: ids), TEXT)
    assert told.tokens_per_chunk() == [2]


def test_where_the_server_counts_nothing_a_tokenizer_or_the_chunks_count() -> None:
    script = Script(events=lambda body: [completion("abc"), completion("de"), DONE])
    (by_tokenizer,) = ask(script, TEXT, encoder=Letters())
    assert (by_tokenizer.num_tokens, by_tokenizer.counted_by) == (5, TOKENIZER)
    assert by_tokenizer.num_prompt_tokens == len("def f():")
    (by_chunks,) = ask(script, TEXT)
    assert (by_chunks.num_tokens, by_chunks.counted_by) == (2, CHUNKS)
    assert by_chunks.num_prompt_tokens == 0


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (429, "HTTP 429: the queue is full"),
        ([DONE], "no tokens"),
        ([completion("", finish_reason="stop"), usage(3, 0), DONE], "no tokens"),
        ([completion("x")], "broken stream: it ended without a finish_reason and without [DONE]"),
        (
            [completion("x"), b"data: {oops\n\n"],
            "broken stream: an event of the stream is not JSON",
        ),
        (
            [completion("x"), b"data: [1]\n\n"],
            "broken stream: an event of the stream is not an obj",
        ),
        ([completion("x"), b"data: \xff\n\n"], "broken stream: 'utf-8' codec"),
        ([{"choices": [{}]}], 'broken stream: a choice of the stream has neither "text" nor "del'),
        ([{"choices": [3]}], "broken stream: a choice of the stream is not an object"),
        ([{"choices": [{"text": 3}]}], "broken stream: a text of the stream is not a text"),
        ([{"id": "x"}], 'broken stream: an event of the stream has no "choices"'),
        (
            [completion("x"), {"error": {"message": "out of\nblocks", "code": 500}}],
            "error in the stream: out of blocks",
        ),
    ],
)
def test_what_goes_wrong_is_named(events: Any, says: str) -> None:
    (failed,) = ask(Script(events=lambda body: events), TEXT)
    assert failed.failed
    assert str(failed.error).startswith(says)


def test_a_server_that_is_silent_broken_or_not_there_fails_requests_only() -> None:
    events = [completion("x"), None]
    (late,) = ask(Script(events=lambda body: events), TEXT, timeout=0.2)
    assert late.error == "no end within 0.2 s"
    assert late.text == "x"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def ask_nobody() -> Record:
        async with Client(Server(base_url=f"http://127.0.0.1:{port}")) as client:
            return await client.complete(TEXT, RequestForm(model="m"))

    nobody = asyncio.run(ask_nobody())
    assert str(nobody.error).startswith("cannot connect: ")


def test_a_connection_that_breaks_off_is_a_failure() -> None:
    async def answer_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\ndata: ")
        await writer.drain()
        writer.close()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def told(handler: Any) -> str | None:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Client(Server(base_url=f"http://127.0.0.1:{port}")) as client:
            return (await client.complete(TEXT, RequestForm(model="m"))).error

    assert asyncio.run(told(answer_half)) == "the connection broke off within the answer"
    assert asyncio.run(told(hang_up)) == "the server closed the connection"


def fed(*pieces: bytes) -> list[str]:
    stream = EventParser()
    return [event for piece in pieces for event in stream.feed(piece)]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("line", [b"\n", b"\r\n", b"\r"])
def test_events_may_be_cut_anywhere(size: int, line: bytes) -> None:
    parts = [b": ping", b"", b"data: a\xc3\xa4", b"", b"event: x", b"data:b", b"data: c", b"", b""]
    data = line.join(parts) + (b"data" if line == b"\r" else b"")
    pieces: Iterable[bytes] = (data[at : at + size] for at in range(0, len(data), size))
    assert fed(*pieces) == ["aä", "b\nc"]


def test_an_event_without_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.bench.protocol._MOST_BYTES", 10)
    with pytest.raises(ValueError, match="is too long"):
        fed(b"data: aaaaaaaaaa")


def test_thoughts_and_tool_calls_are_output() -> None:
    for key in ("reasoning_content", "reasoning", "tool_calls"):
        chunk = read_event(f'{{"choices": [{{"delta": {{"{key}": ["x"]}}}}]}}')
        assert chunk.has_output
        assert chunk.text == ""
    assert not read_event('{"choices": [{"delta": {"role": "assistant"}}]}').has_output
    with pytest.raises(BrokenStreamError):
        read_event("3")


def load(count: int, **options: Any) -> tuple[LoadRun, list[int]]:
    """A load whose answers take one turn of the loop; how many were under way when each began."""
    under_way: list[int] = []
    now = 0

    async def one(prompt: BenchPrompt, due: float | None) -> Record:
        nonlocal now
        now += 1
        under_way.append(now)
        for _ in range(3):
            await asyncio.sleep(0)
        now -= 1
        return Record(id=prompt.id, sent=0.0, due=due)

    prompts = [BenchPrompt(id=str(number), text="x") for number in range(count)]
    return asyncio.run(run_load(one, prompts, **options)), under_way


def test_a_closed_loop_keeps_its_places_full() -> None:
    run, under_way = load(20, most_at_once=4)
    assert [record.id for record in run.records] == [str(number) for number in range(20)]
    assert max(under_way) == run.most_at_once == 4
    assert run.num_left == 0
    assert max(load(20)[1]) == 20


@pytest.mark.parametrize("failing", [False, True])
def test_a_turn_is_sent_behind_the_answer_to_the_one_before(failing: bool) -> None:
    asked: list[BenchPrompt] = []

    async def one(prompt: BenchPrompt, due: float | None) -> Record:
        asked.append(prompt)
        await asyncio.sleep(0)
        wrong = "HTTP 500" if failing and prompt.turn == 2 else None
        return Record(id=prompt.id, sent=0.0, text=f"to {prompt.id}", error=wrong)

    said = ({"role": "user", "content": "One."},)
    long = BenchPrompt(id="81", messages=said, later_turns=("Two.", "Three."))
    run = asyncio.run(run_load(one, [long, BenchPrompt(id="82", messages=said)], due=[0, 0]))
    assert [record.id for record in run.records] == ["81", "81/2", "81/3", "82"]
    assert [record.failed for record in run.records] == [False, failing, failing, False]
    assert run.num_left == 0
    assert run.most_at_once == 2
    assert [it.id for it in asked if it.turn > 1] == ["81/2"] + ["81/3"] * (not failing)
    roles = [message["role"] for message in run.later["81/2"].messages or ()]
    assert roles == ["user", "assistant", "user"]
    contents = [message["content"] for message in run.later["81/3"].messages or ()]
    assert contents == ["One.", "to 81", "Two.", "to 81/2", "Three."]


def test_an_open_loop_sends_when_requests_are_due() -> None:
    run, _ = load(3, due=[0.0, 0.01, 0.02], most_at_once=2)
    assert [round(it.due - run.began, 6) for it in run.records if it.due is not None] == [
        0.0, 0.01, 0.02,
    ]  # fmt: skip


def test_what_was_done_is_kept_when_the_user_has_enough() -> None:
    done: list[str] = []

    async def first_only(prompt: BenchPrompt, due: float | None) -> Record:
        if prompt.id != "0":
            await asyncio.sleep(3600)
        return Record(id=prompt.id, sent=0.0)

    prompts = [BenchPrompt(id=str(number), text="x") for number in range(5)]
    run = asyncio.run(
        run_load(
            first_only,
            prompts,
            most_at_once=2,
            stopped=lambda: bool(done),
            advance=lambda record: done.append(record.id),
        )
    )
    assert [record.id for record in run.records] == ["0"]
    assert run.num_left == 4
