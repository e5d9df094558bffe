"""`slipstream bench serve`: what it asks a server, what it reports, and what it refuses."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CommandLine, Ran
from tests.fake_openai_server import Script, answer, completion, delta, serving, usage

DONE = b"data: [DONE]\n\n"
OURS: dict[str, Any] = {
    "id": "demo",
    "speculative": {"model": "demo/draft", "num_speculative_tokens": 4},
}
COUNTERS = """{p}spec_decode_num_drafts_total {d}
{p}spec_decode_num_draft_tokens_total {n}
{p}spec_decode_num_accepted_tokens_total {a}
{p}spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {a}
"""


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two texts and a chat."""
    entries: list[dict[str, Any]] = [
        {"id": "a", "prompt": "import os\n"},
        {"id": "b", "prompt": "x = "},
        {"id": "c", "messages": [{"role": "user", "content": "Write a loop."}], "max_tokens": 9},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, entries)))
    return file


def told(body: Any) -> list[Any]:
    """An answer of six tokens in three chunks, two of four drafts accepted."""
    groups = [["accepted", "bonus"], ["plain"], ["accepted", "accepted", "recovered"]]
    wants = body.get("return_speculation")
    events = []
    for kinds in groups:
        tokens = [{"text": "x", "kind": kind, "position": None, "logprob": None} for kind in kinds]
        more = {"speculation": {"tokens": tokens}} if wants else {}
        event = (delta if "messages" in body else completion)("x" * len(kinds), **more)
        events.append(event)
    events[-1]["choices"][0]["finish_reason"] = "length"
    counts = {"drafts": 2, "draft_tokens": 8, "accepted_tokens": 3, "steps": 4}
    counts["accepted_per_position"] = [2, 1, 0, 0]  # type: ignore[assignment]
    return [*events, usage(7, 6, **({"speculation": counts} if wants else {})), DONE]


def bench(slipstream: CommandLine, url: str, prompts: Path, *arguments: str) -> Ran:
    return slipstream("bench", "serve", "--base-url", url, "--prompts", str(prompts), *arguments)


def test_a_server_of_ours_tells_its_speculation(
    slipstream: CommandLine, script: Script, url: str, prompts: Path, tmp_path: Path
) -> None:
    script.model, script.events = OURS, told
    figures, texts, plot = tmp_path / "s.json", tmp_path / "texts.json", tmp_path / "plot"
    ran = bench(
        *(slipstream, f"{url}/v1/", prompts, "--num-prompts", "5", "--max-concurrency", "2"),
        *("-k", "3", "--ignore-eos", "--top-p", "0.9", "-t", "0.5", "--seed", "4"),
        *("--output", str(figures), "--save-texts", str(texts), "--plot", str(plot)),
        *("--extra-body", '{"logit_bias": {"3": 1}}', "--header", "X-Team: speed"),
        *("--api-key", "secret", "--save-detailed", "--goodput", "e2el:60000"),
    )
    assert ran.code == 0, ran.err
    bodies = [body for _, body in script.asked]
    assert len(bodies) == 6  # one to warm up
    assert sum(path == "/v1/chat/completions" for path, _ in script.asked) == 1
    for body in bodies:
        assert body["speculative"] == {"num_speculative_tokens": 3}
        assert body["return_speculation"] is True
        assert body["ignore_eos"] is True
        assert body["temperature"] == 0.5
        assert (body["top_p"], body["seed"], body["logit_bias"]) == (0.9, 4, {"3": 1})
        assert body["max_tokens"] == (9 if "messages" in body else 128)
    for headers in script.headers:
        assert headers["Authorization"] == "Bearer secret"
        assert headers["X-Team"] == "speed"
    summary = json.loads(figures.read_text())
    assert (summary["completed"], summary["failed"]) == (5, 0)
    assert summary["model_id"] == "demo"
    assert summary["total_output_tokens"] == 30
    assert summary["request_goodput"] == pytest.approx(summary["request_throughput"])
    assert summary["spec_decode_acceptance_length"] == 2.5
    assert summary["spec_decode_num_drafts"] == 10
    assert summary["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5, 0.0, 0.0]
    assert summary["spec_decode_steps_without_drafts"] == 0.5
    assert summary["tokens_per_chunk"] == [[2, 1, 3]] * 5
    assert summary["mean_itl_per_token_ms"] is not None
    assert "secret" not in figures.read_text() + ran.out + ran.err
    for line in ("drafter: demo/draft, K = 3", "closed loop, 2 at once", "(3 different ones)"):
        assert line in ran.out
    assert "compare TPOT, not ITL" in ran.out.replace("\n", " ")
    entries = json.loads(texts.read_text())
    assert [entry["id"] for entry in entries] == ["a", "b", "c", "a#2", "b#2"]
    assert {entry["text"] for entry in entries} == {"x" * 6}
    assert entries[0]["prompt"] == "import os\n"
    assert plot.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    page = plot.with_suffix(".html").read_text()
    assert "<td>acceptance length (AL)</td><td>2.50</td>" in page
    named = set(re.findall(r"https?://[^/\"<]+", page))
    assert named == {url, "http://www.w3.org"}  # where it was measured, and what SVG is
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(h", page)


def test_a_peer_is_asked_for_nothing_of_ours_and_its_counters_are_read(
    slipstream: CommandLine, script: Script, url: str, prompts: Path, tmp_path: Path
) -> None:
    script.events = told
    script.pages = [COUNTERS.format(p="vllm:", d=10, n=40, a=20)]
    script.pages.append(COUNTERS.format(p="vllm:", d=14, n=56, a=23))
    figures = tmp_path / "s.json"
    line = (slipstream, url, prompts, "--num-warmups", "0", "--output", str(figures))
    ran = bench(*line)
    assert ran.code == 0, ran.err
    for _, body in script.asked:
        assert not {"speculative", "return_speculation", "ignore_eos", "seed"} & set(body)
    summary = json.loads(figures.read_text())
    assert summary["spec_decode_num_drafts"] == 4
    assert summary["spec_decode_acceptance_length"] == 1.75
    assert "vllm:spec_decode_num_drafts" in summary["spec_decode_source"]
    assert summary["spec_decode_steps_without_drafts"] is None
    assert summary["mean_itl_ms"] is not None
    assert summary["mean_itl_per_token_ms"] is None
    assert "does not report the number of tokens per chunk" in " ".join(ran.out.split())
    script.pages.clear()
    script.model = {**OURS, "speculative": {**OURS["speculative"], "adaptive": True}}
    script.pages[:] = [COUNTERS.format(p="slipstream:", d=4, n=8, a=3)] * 2  # none in the load
    script.events = lambda body: told({**body, "return_speculation": False})
    ran = bench(*line)
    assert "drafter: demo/draft, K = auto, up to 4" in ran.out
    note = json.loads(figures.read_text())["spec_decode_note"]
    assert note == "none: K is auto, and no draft was expected to save time"
    assert note in " ".join(ran.out.split())
    script.pages[:] = [COUNTERS.format(p="slipstream:", d=4, n=8, a=3)] * 2
    script.events = lambda body: [*told({**body, "return_speculation": False})[1:2], usage(7, 1)]
    ran = bench(*line)  # of one token nothing could be drafted
    assert json.loads(figures.read_text())["spec_decode_note"] is None
    assert note not in " ".join(ran.out.split())
    script.events = told
    script.pages.clear()
    script.model = {"id": "fake"}
    ran = bench(*line)
    assert json.loads(figures.read_text())["spec_decode_source"] == "not reported"
    assert "not reported" in ran.out
    ran = bench(*line, "-k", "2")
    assert ran.code == 2
    assert "does not accept a number of draft tokens with a request" in ran.err


def test_failures_are_counted_by_their_reasons(
    slipstream: CommandLine, script: Script, url: str, prompts: Path, tmp_path: Path
) -> None:
    def some(body: Any) -> Any:
        first = len(script.asked) % 5
        return {2: 429, 3: [completion("x")]}.get(first) or (
            told(body) if "messages" in body else answer("fine")
        )

    script.events, figures = some, tmp_path / "s.json"
    ran = bench(
        *(slipstream, url, prompts, "--num-prompts", "10", "--max-concurrency", "1"),
        *("--num-warmups", "1", "--output", str(figures)),
    )
    assert ran.code == 1
    summary = json.loads(figures.read_text())
    assert (summary["completed"], summary["failed"]) == (6, 4)
    assert summary["errors"] == {
        "HTTP 429: the queue is full": 2,
        "broken stream: it ended without a finish_reason and without [DONE]": 2,
    }
    assert "HTTP 429: the queue is full" in ran.out


def test_texts_are_compared(
    slipstream: CommandLine, script: Script, url: str, prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "expected.json"
    script.events = lambda body: told(body)
    file.write_text(json.dumps([{"id": name, "text": "x" * 6} for name in "abc"]))
    ran = bench(slipstream, url, prompts, "--compare-texts", str(file))
    assert ran.code == 0, ran.err
    assert "as expected  3" in ran.out
    file.write_text(json.dumps([{"id": name, "text": "x" * (5 + (name < "c"))} for name in "abc"]))
    ran = bench(slipstream, url, prompts, "--compare-texts", str(file))
    assert ran.code == 1
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["differing", "c"] in rows


def test_ctrl_c_keeps_what_was_measured(
    slipstream: CommandLine, script: Script, url: str, prompts: Path, tmp_path: Path
) -> None:
    def hang_at_last(body: Any) -> list[Any]:
        if len(script.asked) < 3:
            return answer("fine")
        signal.raise_signal(signal.SIGINT)
        return [completion("x"), None]

    script.events, figures = hang_at_last, tmp_path / "s.json"
    ran = bench(
        *(slipstream, url, prompts, "--max-concurrency", "1", "--num-warmups", "0"),
        *("--num-prompts", "5", "--output", str(figures), "--endpoint", "chat"),
    )
    assert ran.code == 130
    summary = json.loads(figures.read_text())
    assert (summary["completed"], summary["failed"], summary["not_finished"]) == (2, 0, 3)
    assert "3 requests not finished" in ran.err


def test_all_turns_of_a_question_are_asked(
    slipstream: CommandLine, script: Script, url: str, tmp_path: Path
) -> None:
    file, figures, texts = tmp_path / "q.jsonl", tmp_path / "s.json", tmp_path / "t.json"
    file.write_text(json.dumps({"question_id": 81, "turns": ["Write.", "Again."]}))
    script.events = told
    line = (slipstream, url, file, "--dataset", "mt-bench", "--num-warmups", "0")
    assert bench(*line, "--output", str(figures)).code == 0
    assert len(script.asked) == json.loads(figures.read_text())["completed"] == 1
    ran = bench(*line, "--turns", "all", "--output", str(figures), "--save-texts", str(texts))
    assert ran.code == 0, ran.err
    assert [message["content"] for message in script.asked[-1][1]["messages"]] == [
        "Write.", "x" * 6, "Again.",
    ]  # fmt: skip
    summary = json.loads(figures.read_text())
    assert (summary["turns"], summary["num_prompts"], summary["completed"]) == ("all", 1, 2)
    assert "1 of mt-bench with all turns, 2 requests" in ran.out
    assert [entry["id"] for entry in json.loads(texts.read_text())] == ["81", "81/2"]


def test_the_flags_of_vllm_bench_serve_are_understood(
    slipstream: CommandLine, script: Script, url: str, prompts: Path, tmp_path: Path
) -> None:
    script.events, results = told, tmp_path / "deep" / "results"
    port = url.rpartition(":")[2]
    line = ["bench", "serve", "--port", port, "--prompts", str(prompts), "--num-prompts", "2"]
    line += ["--save-result", "--result-dir", str(results)]
    ran = slipstream(*line, "--backend", "openai", "--host", "127.0.0.1")
    assert ran.code == 0, ran.err
    assert {path for path, _ in script.asked} == {"/v1/completions"}
    (found,) = results.iterdir()
    assert re.fullmatch(r"slipstream-infqps-fake-\d{8}-\d{6}\.json", found.name)
    script.asked.clear()
    chat = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
    ran = slipstream(*line, *chat, "--result-filename", "mine.json", "--save-detailed")
    assert ran.code == 0, ran.err
    assert {path for path, _ in script.asked} == {"/v1/chat/completions"}
    summary = json.loads((results / "mine.json").read_text())
    assert (summary["backend"], summary["endpoint"]) == ("openai-chat", "chat")
    assert len(summary["ids"]) == 2


def test_an_open_loop_is_told_with_its_wait(
    slipstream: CommandLine, script: Script, url: str, prompts: Path, tmp_path: Path
) -> None:
    figures, script.events = tmp_path / "s.json", told
    ran = bench(
        *(slipstream, url, prompts, "--request-rate", "500", "--burstiness", "0.5"),
        *("--max-concurrency", "2", "--output", str(figures)),
        *("--percentile-metrics", "tpot,e2el", "--metric-percentiles", "50,99.9"),
    )
    assert ran.code == 0, ran.err
    summary = json.loads(figures.read_text())
    assert (summary["request_rate"], summary["burstiness"]) == (500, 0.5)
    assert summary["mean_client_queue_time_ms"] >= 0
    assert "open loop, 500 requests/s, burstiness 0.5, at most 2 at once" in ran.out
    assert {"p50_tpot_ms", "p99.9_e2el_ms"} <= set(summary)
    assert "mean_ttft_ms" not in summary


def test_a_server_with_a_profiler_has_it_switched(
    slipstream: CommandLine, script: Script, url: str, prompts: Path
) -> None:
    script.events, script.has_profiler = told, True
    assert bench(slipstream, url, prompts, "--profile").code == 0
    assert script.profiler == ["/start_profile", "/stop_profile"]
    script.has_profiler = False
    ran = bench(slipstream, url, prompts, "--profile")
    assert ran.code == 2
    assert "start slipstream serve with --enable-profiling FOLDER" in ran.err


def test_chats_become_prompts_where_a_tokenizer_is_named(
    slipstream: CommandLine, script: Script, url: str, prompts: Path
) -> None:
    script.events = told
    line = (slipstream, url, prompts, "--endpoint", "completions", "--num-warmups", "0")
    assert bench(*line, "--tokenizer", "demo").code == 0
    assert {path for path, _ in script.asked} == {"/v1/completions"}
    ids = script.asked[2][1]["prompt"]
    assert all(isinstance(token, int) for token in ids)
    ran = bench(*line)
    assert ran.code == 2
    assert "or --tokenizer for its chat template" in ran.err


def test_random_prompts_take_the_tokenizer_of_a_model_that_is_here(
    slipstream: CommandLine, script: Script, url: str
) -> None:
    script.events, script.model = told, OURS
    line = ("--dataset", "random", "--random-input-len", "9", "--model", "demo")
    ran = slipstream("bench", "serve", "--base-url", url, *line, "--num-prompts", "2")
    assert ran.code == 0, ran.err
    assert [len(body["prompt"]) for _, body in script.asked[-2:]] == [9, 9]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--base-url", "localhost:8000"), "--base-url must begin with http://"),
        (("--endpoint", "embed"), "--endpoint must be one of auto, completions, chat"),
        (("--backend", "tgi"), "--backend must be one of openai, openai-chat, vllm, not tgi"),
        (("--backend", "vllm", "--endpoint", "chat"), "means --endpoint completions, not chat"),
        (("--base-url", "http://x", "--port", "3"), "leave --host and --port out"),
        (("--turns", "two"), "--turns must be one of first, all"),
        (("--turns", "all"), "is for questions of several turns"),
        (("--turns", "all", "--backend", "openai", "--tokenizer", "demo"), "the chat endpoint"),
        (("--result-dir", "x"), "--result-dir is for --save-result"),
        (("--save-result", "--output", "x.json"), "give one"),
        (("--save-result", "--result-dir", "/dev/null/x"), "cannot be made a folder"),
        (("--header", "x"), "--header must be such as 'name: value'"),
        (("--extra-body", '{"stream": false}'), "--extra-body may not have stream"),
        (("--extra-body", "3"), "--extra-body must be a JSON object"),
        (("--request-rate", "0"), "--request-rate must be above 0"),
        (("--ready-timeout", "nan"), "--ready-timeout must be a number of at least 0"),
        (("--burstiness", "-1", "--request-rate", "3"), "--burstiness must be a number above 0"),
        (("--request-timeout", "0"), "--request-timeout must be a number above 0"),
        (("--goodput", "itl:3"), "--goodput must be such as ttft:200"),
        (("--percentile-metrics", "ttfx"), "--percentile-metrics takes ttft, tpot"),
        (("--metric-percentiles", "101"), "must be numbers from 0 to 100"),
        (("--save-detailed",), "add --output FILE"),
        (("--compare-texts", "/nowhere"), "/nowhere is not a file of --save-texts"),
        (("--plot", "x.gif"), "--plot x.gif must end in one of"),
        (("--top-p", "3"), "top_p must be above 0 and at most 1"),
        (("--dataset", "random"), "name the model's directory with --tokenizer"),
        (("--dataset", "random", "--model", "mine"), "name the model's directory with --tokenizer"),
        (("--dataset", "demo", "--dataset-path", "x"), "is for other data sets than demo"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    slipstream: CommandLine, arguments: tuple[str, ...], says: str
) -> None:
    ran = slipstream("bench", "serve", *arguments)
    assert ran.code == 2
    assert says in ran.err


def test_a_server_that_is_not_as_expected_is_told_of(
    slipstream: CommandLine, script: Script, url: str, prompts: Path
) -> None:
    ran = slipstream("bench", "serve", "--base-url", "http://127.0.0.1:9", "--ready-timeout", "0.1")
    assert ran.code == 1
    assert "no server answers at http://127.0.0.1:9 (cannot connect: " in ran.err
    ran = bench(slipstream, url, prompts, "--model", "other")
    assert (ran.code, "does not offer other; it offers fake" in ran.err) == (2, True)
    script.events = lambda body: 500
    ran = bench(slipstream, url, prompts)
    assert ran.code == 1
    assert "the first request to" in ran.err
    assert "failed: HTTP 500: the queue is full" in ran.err
    script.model = {}
    ran = bench(slipstream, url, prompts)
    assert (ran.code, "lists no model" in ran.err) == (1, True)


def test_without_aiohttp_the_extra_is_named(
    slipstream: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = slipstream("bench", "serve")
    assert ran.code == 2
    assert "pip install 'slipstream[bench]'" in ran.err
