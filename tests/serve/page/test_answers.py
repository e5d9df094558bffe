"""A streamed answer: tokens told apart, looked into, counted."""

import pytest

from tests.serve.page.conftest import OpenPage, wait_until
from tests.serve.page.fake_server import RECORDINGS, FakeServer, K

COMPLETION = RECORDINGS["completion"]
TEXT = "".join(token[0] for token in COMPLETION["tokens"])


def kinds(tokens: list[list[object]]) -> dict[str, int]:
    every = [str(token[1]) for token in tokens]
    return {kind: every.count(kind) for kind in set(every)}


def test_tokens_are_told_apart_as_they_stream(open_page: OpenPage, server: FakeServer) -> None:
    page = open_page()
    page.fill("#prompt", "#endless")
    page.click("#run")
    page.wait_for_selector(".text[aria-busy] .tok.recovered")
    page.keyboard.press("Escape")
    page.wait_for_selector(".text:not([aria-busy])")
    page.fill("#prompt", "finite")
    page.click("#run")
    page.wait_for_selector(".replays")
    for kind, number in kinds(COMPLETION["tokens"]).items():
        assert page.locator(f".text .tok.{kind}").count() == number
    looks = {
        kind: page.locator(f".text .tok.{kind} .ink")
        .nth(2)
        .evaluate("e => [getComputedStyle(e).color, getComputedStyle(e).backgroundImage]")
        for kind in ("accepted", "bonus", "recovered")
    }
    colours, underlines = zip(*looks.values(), strict=True)
    assert len(set(colours)) == 3
    # Without colour: one line, two lines, dots.
    shapes = [[*map(underline.count, ("linear-gradient", "repeating"))] for underline in underlines]
    assert shapes == [[1, 0], [2, 0], [1, 1]]
    plain = page.locator(".text .tok.plain .ink").first
    assert plain.evaluate("e => getComputedStyle(e).backgroundImage") == "none"


def test_the_text_is_the_models_own(open_page: OpenPage, server: FakeServer) -> None:
    page = open_page()
    page.click("#run")
    page.wait_for_selector(".replays")
    text = COMPLETION["prompt"] + TEXT
    assert page.locator(".text").text_content() == text
    assert page.locator(".text > div").count() > 1  # paragraphs, which a copy does not show
    copied = page.evaluate(
        """() => {
            getSelection().selectAllChildren(document.querySelector(".text"));
            return getSelection().toString();
        }"""
    )
    assert copied == text


def test_what_is_asked_for_is_what_the_form_says(open_page: OpenPage, server: FakeServer) -> None:
    page = open_page()
    page.locator("#num_speculative_tokens").fill("2")
    page.locator("#temperature").fill("0.7")
    page.fill("#seed", "11")
    page.fill("#stop", "END\n\n###")
    page.fill("#prompt", "a prompt")
    page.click("#run")
    page.wait_for_selector(".replays")
    (body,) = server.bodies
    assert body == {
        "model": "demo",
        "prompt": "a prompt",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 1,
        "max_tokens": 160,
        "seed": 11,
        "stop": ["END", "###"],
        "logprobs": 3,
        "return_speculation": True,
        "speculative": {"num_speculative_tokens": 2},
    }


@pytest.mark.parametrize(("adaptive", "told"), [(False, "K = 4"), (True, "K ≤ 4")])
def test_one_line_says_how_many_tokens_are_drafted(
    open_page: OpenPage, server: FakeServer, adaptive: bool, told: str
) -> None:
    server.adaptive = adaptive
    page = open_page()
    page.wait_for_function(f"document.querySelector('#brief').textContent.endsWith('{told}')")


def test_every_setting_is_sent(open_page: OpenPage, server: FakeServer) -> None:
    page = open_page()
    page.locator(".more").evaluate("box => { box.open = true }")
    page.check("input[value=chat]", force=True)
    page.select_option("#drafter", "off")
    given = {
        "min_p": 0.1,
        "top_p": 0.9,
        "top_k": 20,
        "min_tokens": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
    }
    for name, value in given.items():
        page.locator(f"#{name}").fill(str(value))
    page.fill("#max_tokens", "50")
    page.fill("#system", "Be short.")
    page.check("#ignore_eos")
    page.uncheck("#logprobs")
    page.fill("#prompt", "a question")
    page.click("#run")
    page.wait_for_selector(".replays")
    (body,) = server.bodies
    assert {name: body[name] for name in given} == given
    assert body["max_completion_tokens"] == 50
    assert body["ignore_eos"] is True
    assert body["speculative"] == {"num_speculative_tokens": 0}
    assert "logprobs" not in body
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a question"},
    ]


def test_pointing_at_a_token_says_how_it_came_about(open_page: OpenPage) -> None:
    page = open_page()
    page.click("#run")
    page.wait_for_selector(".replays")
    index = next(i for i, token in enumerate(COMPLETION["tokens"]) if token[1] == "recovered")
    page.locator(".text .tok").nth(index).hover()
    card = page.locator("#card")
    card.wait_for()
    text = card.text_content() or ""
    position = COMPLETION["tokens"][index][2] + 1
    assert "Recovered token" in text
    assert f"draft position {position}," in text
    assert "62%" in text  # exp(-0.4774)
    assert "other" in text
    assert page.locator(".tok.mate").count() == position  # one pass gave them
    page.wait_for_selector("#steps-chart .marked", state="attached")
    page.mouse.move(2, 2)
    card.wait_for(state="hidden")
    assert page.locator(".tok.mate").count() == 0


def test_tokens_can_be_walked_with_the_keyboard(open_page: OpenPage) -> None:
    page = open_page(height=500)
    page.click("#run")
    page.wait_for_selector(".replays")
    page.locator(".text").focus()
    card = page.locator("#card")
    page.keyboard.press("End")
    assert "Recovered token" in (card.text_content() or "")
    page.keyboard.press("Home")
    assert "Plain token" in (card.text_content() or "")
    page.keyboard.press("ArrowRight")
    assert "Accepted draft token" in (card.text_content() or "")
    assert "Draft position 1:" in (card.text_content() or "")
    assert card.is_visible()  # though the text had to scroll
    focused = page.locator(".tok:focus")
    assert focused.text_content() == COMPLETION["tokens"][1][0]
    assert focused.get_attribute("aria-describedby") == "card"
    page.keyboard.press("Escape")
    assert card.is_hidden()


def test_a_server_that_chooses_k_tells_what_it_gains(
    open_page: OpenPage, server: FakeServer
) -> None:
    server.speedup = 1.87
    drafts = sum(token[1] in ("bonus", "recovered") for token in COMPLETION["tokens"])
    page = open_page()
    page.click("#run")
    page.wait_for_selector(".replays")
    note = "estimated 1.87\u00d7 plain"
    wait_until(page, f"document.getElementById('rate-note').textContent === '{note}'")
    chosen = f", K {drafts * K / (drafts + 1):.1f}"
    assert (page.locator("#accepted-note").text_content() or "").endswith(chosen)
    assert "250 ms of drafting was for refused tokens" in (page.text_content(".pane-state") or "")


def test_figures_are_those_of_the_answer(open_page: OpenPage) -> None:
    tokens = COMPLETION["tokens"]
    accepted = [token for token in tokens if token[1] == "accepted"]
    drafts = sum(token[1] in ("bonus", "recovered") for token in tokens)
    page = open_page()
    page.click("#run")
    page.wait_for_selector(".replays")
    length = f"{1 + len(accepted) / drafts:.2f}"
    wait_until(page, f"document.getElementById('al').textContent === '{length}'")
    note = f"{len(tokens)} tokens, {drafts + 1} passes"  # the length may be the last one's before
    wait_until(page, f"document.getElementById('al-note').textContent === '{note}'")
    assert page.locator("#accepted-note").text_content() == f"{len(accepted)} of {drafts * K}"
    shares = [sum(token[2] == p for token in accepted) / drafts for p in range(K)]
    said = ", ".join(f"position {p + 1}: {share:.0%}" for p, share in enumerate(shares))
    label = page.locator("#acceptance-chart").get_attribute("aria-label")
    assert label == f"Acceptance by position: {said}"
    assert float(page.locator("#rate").text_content() or "") > 0
    assert page.locator("#steps-chart .cell").count() > drafts // 2
    assert page.locator("#rate-chart .curve").count() == 1
    announced = page.locator("#announcer").text_content() or ""
    assert announced.startswith("Finished.")
    assert f"{len(tokens)} tokens" in announced


def test_one_pass_is_a_pass(open_page: OpenPage) -> None:
    page = open_page()
    page.fill("#max_tokens", "1")
    page.click("#run")
    page.wait_for_selector(".replays")
    wait_until(page, "document.getElementById('steps-chart').textContent.endsWith('1 pass')")


def test_the_page_opens_in_chat_where_the_model_has_a_template(
    open_page: OpenPage, server: FakeServer
) -> None:
    assert open_page().locator("input[name=mode]:checked").input_value() == "completion"
    server.has_template = True
    page = open_page()
    assert page.locator("input[name=mode]:checked").input_value() == "chat"
    assert page.locator("#prompt-label").text_content() == "Message"
    assert "Write a Python function" in page.locator("#prompt").input_value()
    page.click("#run")
    page.wait_for_selector(".replays")
    assert "messages" in server.bodies[0]


def test_a_prompt_that_was_begun_is_left_alone(open_page: OpenPage, server: FakeServer) -> None:
    server.key, server.has_template = "sesame", True
    page = open_page(ready=False)
    page.wait_for_selector("#key-dialog[open]")
    page.evaluate("document.getElementById('prompt').value = 'half a wor'")
    page.fill("#key", "sesame")
    page.press("#key", "Enter")
    page.wait_for_selector("#server[data-state=ready]")
    assert page.locator("#prompt").input_value() == "half a wor"
    assert page.locator("input[name=mode]:checked").input_value() == "completion"


def test_a_chat_goes_on(open_page: OpenPage, server: FakeServer) -> None:
    page = open_page()
    page.check("input[value=chat]", force=True)
    page.fill("#prompt", "first")
    page.press("#prompt", "Shift+Enter")  # a new line
    page.press("#prompt", "Enter")
    page.wait_for_selector(".turn:nth-of-type(1) .replays")
    assert page.input_value("#prompt") == ""
    page.fill("#prompt", "second")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".turn:nth-of-type(2) .replays")
    answer = "".join(token[0] for token in RECORDINGS["chat"]["tokens"])
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "first\n"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "second"},
    ]
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    assert page.locator("#welcome").is_visible()
    wait_until(page, "document.getElementById('accepted-note').textContent === ''")


@pytest.mark.parametrize("motion", ["Play again", "Slow motion"])
def test_an_answer_plays_again(open_page: OpenPage, motion: str) -> None:
    page = open_page()
    page.click("#run")
    page.wait_for_selector(".replays")
    page.locator(".tok").last.evaluate("token => { window.before = token }")
    page.click(f"text={motion}")
    if motion == "Slow motion":
        page.wait_for_selector(".text[aria-busy]")
        assert page.locator(".tok").count() < len(COMPLETION["tokens"])
        page.keyboard.press("Escape")  # the rest comes at once
    page.wait_for_selector(".replays button:not(:disabled)")
    assert page.evaluate("window.before.isConnected") is False  # all of it was written again
    assert page.locator(".text").text_content() == COMPLETION["prompt"] + TEXT
    assert len(TEXT) > 100
