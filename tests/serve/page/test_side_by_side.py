"""One prompt with and without speculation, side by side."""

import re

from tests.serve.page.conftest import OpenPage, wait_until
from tests.serve.page.fake_server import RECORDINGS, FakeServer, K

TEXT = "".join(token[0] for token in RECORDINGS["completion"]["tokens"])


def test_greedy_texts_are_identical_and_the_gain_is_said(
    open_page: OpenPage, server: FakeServer
) -> None:
    page = open_page()
    page.check("input[value=both]", force=True)
    page.click("#run")
    page.wait_for_selector(".verdict")
    # One after the other, plain decoding first.
    assert [body["speculative"]["num_speculative_tokens"] for body in server.bodies] == [0, K]
    without, with_speculation = page.locator(".pane .text").all_text_contents()
    assert without == with_speculation == TEXT
    verdict = page.locator(".verdict").text_content() or ""
    assert f"Identical. All {len(TEXT)} characters are the same." in verdict
    factor = re.search(r"([\d.]+)\u00d7 (faster|slower)", verdict)
    assert factor is not None
    assert float(factor[1]) >= 1
    assert page.locator("#rate-chart .curve").count() == 2
    assert "without" in (page.locator("#rate-note").text_content() or "")
    assert "Identical" in (page.locator("#announcer").text_content() or "")
    assert page.locator(".pane").nth(0).locator(".tok:not(.plain)").count() == 0
    assert page.locator(".pane").nth(1).locator(".tok.accepted").count() > 0


def test_the_first_difference_is_shown(open_page: OpenPage) -> None:
    page = open_page()
    page.check("input[value=both]", force=True)
    page.fill("#prompt", "#other")
    page.click("#run")
    page.wait_for_selector(".verdict")
    place = next(i for i, (a, b) in enumerate(zip(TEXT, TEXT.upper(), strict=True)) if a != b)
    verdict = page.locator(".verdict").text_content() or ""
    assert f"Different from character {place + 1} on." in verdict
    marks = page.locator(".verdict mark").all_text_contents()
    shown = TEXT[place : place + 24].replace("\n", "↵").replace(" ", "·")
    assert marks == [shown.upper(), shown]
    assert page.locator(".snippet-token").all_text_contents() == [
        " ·SELF had 62.4%",
        " ·self had 62.4%",
    ]


def test_sampled_texts_may_differ_and_the_page_says_why(open_page: OpenPage) -> None:
    page = open_page()
    page.locator("#temperature").fill("1")
    page.check("input[value=both]", force=True)
    page.fill("#prompt", "#other")
    page.click("#run")
    page.wait_for_selector(".verdict")
    assert "two draws from one distribution" in (page.locator(".verdict").text_content() or "")


def test_both_answers_race_again(open_page: OpenPage) -> None:
    page = open_page()
    page.check("input[value=both]", force=True)
    page.click("#run")
    page.wait_for_selector(".verdict")
    page.locator(".pane .tok:last-child").evaluate_all("tokens => { window.before = tokens }")
    page.click("text=Race again")
    wait_until(page, "window.before.every(token => !token.isConnected)")
    page.wait_for_selector(".replays button:not(:disabled)")
    assert page.locator(".pane .text").all_text_contents() == [TEXT, TEXT]
    assert page.locator(".verdict").count() == 1


def test_a_server_without_a_drafter_has_nothing_to_compare(
    open_page: OpenPage, server: FakeServer
) -> None:
    server.has_drafter = False
    page = open_page()
    assert page.locator("input[value=both]").is_disabled()
    assert page.locator("#drafter").is_disabled()
    assert page.locator("#num_speculative_tokens").is_disabled()
    assert "without a drafter" in (page.locator("#speculation-hint").text_content() or "")
    page.click("#run")
    page.wait_for_selector(".replays")
    assert server.bodies[0]["speculative"] == {"num_speculative_tokens": 0}
    assert page.locator("#al").text_content() == "1.00"
