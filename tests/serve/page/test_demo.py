"""The page on the server that a user starts."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.serve.page.conftest import Tab, wait_until

KEY = "a-secret"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """`slipstream serve`, without a model and with a key."""
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "serve",
        "--port",
        "0",
        "--api-key",
        KEY,
        "-k",
        "4",
    ]
    command += ["--dtype", "float32"]  # in which nothing ties within rounding
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert server.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"a page to try it at (http://\S+) ", said)):
            said += (line := server.stderr.readline())
            assert line, said
        yield found[1]
        server.send_signal(signal.SIGTERM)
        said += server.stderr.read()
        assert server.wait(30) == 0, said
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def test_the_demo_says_the_same_with_and_without_speculation(tab: Tab, url: str) -> None:
    tab.mistakes.clear()
    page = tab.page
    page.goto(url)
    page.wait_for_selector("#key-dialog[open]")  # the page needs no key, the models do
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    page.wait_for_selector("#server[data-state=ready]")
    assert page.locator("#drafter").inner_text().startswith("draft model · demo/draft")
    page.fill("#max_tokens", "48")
    page.check("input[value=both]", force=True)
    for mode in ("completion", "chat"):
        page.check(f"input[value={mode}]", force=True)
        page.click("#run")
        page.wait_for_selector(".verdict")
        without, with_speculation = page.locator(".pane .text").all_text_contents()
        assert without == with_speculation != ""
        assert "Identical." in (page.locator(".verdict").text_content() or "")
        plain, drafted = page.locator(".pane").all()
        assert plain.locator(".tok:not(.plain)").count() == 0
        for kind in ("accepted", "bonus", "recovered"):
            assert drafted.locator(f".tok.{kind}").count() > 0, kind
    drafted.locator(".tok.accepted").first.hover()
    card = page.locator("#card").text_content() or ""
    assert re.search(r"Draft position [1-4]:.*Probability\d", card)
    wait_until(page, "document.getElementById('al').textContent > 1.5")
    assert tab.mistakes == []
