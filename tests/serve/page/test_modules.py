"""The page's modules by themselves, in the browser that will run them."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.page.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Page


def run(page: "Page", module: str, code: str, argument: Any = None) -> Any:
    """The value of `code`, a function of a module of the page and an argument."""
    return page.evaluate(
        f"""async argument => {{
            const main = document.querySelector("script").src;
            const module = await import(new URL("{module}", main));
            return ({code})(module, argument);
        }}""",
        argument,
    )


@pytest.fixture
def page(open_page: OpenPage) -> "Page":
    return open_page()


def test_events_arrive_whatever_pieces_their_bytes_come_in(page: "Page") -> None:
    stream = (
        'data: {"a": "é😀"}\n\n: comment\r\n\r\nevent: x\r\ndata: 1\r\ndata:2\r\n\r\ndata: rest'
    )
    collect = """async ({events}, [text, size]) => {
        const bytes = new TextEncoder().encode(text);
        const body = new ReadableStream({start(controller) {
            for (let i = 0; i < bytes.length; i += size) {
                controller.enqueue(bytes.slice(i, i + size));
            }
            controller.close();
        }});
        const found = [];
        for await (const data of events(body)) found.push(data);
        return found;
    }"""
    for size in (1, 2, 3, 7, 1000):
        assert run(page, "sse.js", collect, [stream, size]) == ['{"a": "é😀"}', "1\n2"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("", "", None),
        ("same", "same", None),
        ("same", "sane", [3, "sa", "me", "ne"]),
        ("abc", "abcd", [4, "abc", "", "d"]),
        ("", "x", [1, "", "", "x"]),
        ("a😀b", "a😁b", [2, "a", "😀b", "😁b"]),  # the same first half
        ("😀😀x", "😀😀y", [3, "😀😀", "x", "y"]),
    ],
)
def test_where_texts_part(page: "Page", one: str, other: str, expected: object) -> None:
    found = run(
        page,
        "compare.js",
        """({firstDifference}, [one, other]) => {
            const found = firstDifference(one, other);
            return found && [found.character, found.before, found.one, found.other];
        }""",
        [one, other],
    )
    assert found == expected


def test_tokens_belong_to_the_step_that_gave_them(page: "Page") -> None:
    # Two steps in one chunk, a step over two chunks, a draft that the limit cut.
    chunks = [
        [("a", "plain", None)],
        [("b", "accepted", 0), ("c", "recovered", 1), ("d", "recovered", 0)],
        [("e", "accepted", 0)],
        [("f", "accepted", 1), ("g", "bonus", 2), ("h", "accepted", 0)],
        [("i", "accepted", 0), ("j", "plain", None)],
    ]
    steps, counts = run(
        page,
        "recording.js",
        """async ({Recording}, chunks) => {
            const main = document.querySelector("script").src;
            const {Tally} = await import(main.replace("main", "tally"));
            const recording = new Recording(2);
            const tally = new Tally();
            for (const chunk of chunks) {
                const tokens = chunk.map(([text, kind, position]) => ({text, kind, position}));
                const text = tokens.map((token) => token.text).join("");
                tally.push(recording.take({choices: [{text, speculation: {tokens}}]}));
            }
            return [
                recording.tokens.map(({text, step}) => [text, step]),
                [tally.steps.length, tally.numDrafts, tally.numAccepted, tally.acceptance(2)],
            ];
        }""",
        chunks,
    )
    assert dict(steps) == dict(zip("abcdefghij", [0, 1, 1, 2, 3, 3, 3, 4, 5, 6], strict=True))
    assert counts == [7, 5, 5, [4 / 5, 1 / 5]]


def test_passes_without_a_draft_are_told_apart(page: "Page") -> None:
    note = run(
        page,
        "meters.js",
        """async ({Meters}) => {
            const main = document.querySelector("script").src;
            const {Tally} = await import(main.replace("main", "tally"));
            const tally = new Tally();
            const kinds = ["plain", "plain", "plain", "accepted", "bonus"];
            tally.push(kinds.map((kind, time) => ({kind, time, step: Math.min(time, 3)})));
            const meters = new Meters(document.querySelector(".meters"));
            meters.watch([{tally, numDraftTokens: 1, numGuesses: 1, speedup: 1}]);
            await new Promise((done) => setTimeout(done, 300));
            return ["al", "al-note"].map((id) => document.getElementById(id).textContent);
        }""",
    )
    assert note == ["2.00", "5 tokens, 4 passes, 1 with a draft"]


def test_a_stop_string_takes_its_tokens_away(page: "Page") -> None:
    shown = run(
        page,
        "tokens.js",
        """async ({TokenText}) => {
            const element = document.createElement("div");
            const view = new TokenText(element);
            view.begin();
            const token = (text) => ({text, kind: "accepted", step: 0});
            view.push([token("one"), token(" two"), token(" three")]);
            view.end("one t");
            return [element.textContent, element.querySelectorAll(".tok").length];
        }""",
    )
    assert shown == ["one t", 2]


def test_a_models_text_is_text(page: "Page") -> None:
    """No markup, no control characters, no turned direction."""
    shown = run(
        page,
        "tokens.js",
        r"""({TokenText}) => {
            const element = document.createElement("div");
            const view = new TokenText(element);
            view.begin();
            const text = "<img src=x onerror=alert(1)>\u0007\u202e&amp;";
            view.push([{text, kind: "plain", step: 0}]);
            view.end();
            return [element.querySelectorAll("img").length, element.textContent];
        }""",
    )
    assert shown == [0, "<img src=x onerror=alert(1)>\u2407\ufffd&amp;"]


def test_a_server_that_tells_nothing_of_speculation(page: "Page") -> None:
    """Another engine behind the page sends no token kinds, and gets no field it may refuse."""
    text, kinds = run(
        page,
        "recording.js",
        """({Recording}) => {
            const recording = new Recording(0);
            recording.take({choices: [{delta: {role: "assistant", content: ""}}]});
            recording.take({choices: [{delta: {content: "a b"}}]});
            return [recording.text, recording.tokens.map(({kind}) => kind)];
        }""",
    )
    assert (text, kinds) == ("a b", ["plain"])
    body = run(
        page,
        "request.js",
        """({bodyOf}) => bodyOf(
            {mode: "chat", stop: [], seed: null, top_k: 5, presence_penalty: 0,
             frequency_penalty: 0}, [], null)""",
    )
    assert not {"speculative", "return_speculation", "top_k"} & body.keys()


def test_reasoning_is_no_part_of_the_text(page: "Page") -> None:
    """Tokens of the content have logprobs; without told tokens both names of the field are read."""
    text, tokens, cut, plain = run(
        page,
        "recording.js",
        """({Recording}) => {
            const recording = new Recording(0);
            const parts = [["analysis", "markup"], ["Hm", "reasoning"], ["a", "content"]];
            const tokens = [...parts, ["bc", "content"]]
                .map(([text, part]) => ({text, part, kind: "plain"}));
            const content = [{top_logprobs: [{token: "x", logprob: -1}]}, {top_logprobs: []}];
            recording.take({choices: [{delta: {reasoning: "Hm", content: "ab"},
                speculation: {tokens}, logprobs: {content}}]});
            const other = new Recording(0);
            other.take({choices: [{delta: {reasoning_content: "Hm", content: ""}}]});
            other.take({choices: [{delta: {content: "a"}}]});
            return [
                recording.text,
                recording.tokens.map((it) => [it.text, it.part, it.alternatives.length]),
                recording.textIsCut,
                other.tokens.map(({text, part}) => [text, part]),
            ];
        }""",
    )
    assert text == "ab"
    assert tokens == [
        ["", "markup", 0],
        ["Hm", "reasoning", 0],
        ["a", "content", 1],
        ["bc", "content", 0],
    ]
    assert cut
    assert plain == [["Hm", "reasoning"], ["a", "content"]]


def test_reasoning_is_folded(page: "Page") -> None:
    shown = run(
        page,
        "tokens.js",
        """({TokenText}) => {
            const element = document.createElement("div");
            document.body.append(element);
            const view = new TokenText(element);
            const said = [];
            for (const _ of [1, 2]) {
                view.begin();
                const token = ([text, part]) => ({text, part, kind: "accepted", step: 0});
                view.push([["", "markup"], ["one", "reasoning"], ["", "markup"],
                    ["two", "reasoning"], ["", "markup"], ["three", "content"],
                    [" four", "content"]].map(token));
                view.end("three f");
                const fold = element.querySelector("details");
                const outside = [...element.children].filter((child) => child !== fold);
                element.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
                said.push([
                    element.querySelectorAll("details").length,
                    fold.open,
                    fold.textContent,
                    outside.map((child) => child.textContent).join(""),
                    element.querySelectorAll(".tok").length,
                    document.activeElement.textContent,
                ]);
            }
            element.remove();
            return said;
        }""",
    )
    assert shown == [[1, False, "Reasoningonetwo", "three f", 4, "three"]] * 2
