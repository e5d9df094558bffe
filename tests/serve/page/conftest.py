"""A browser without a window, and a server for it to look at."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.serve.page.fake_server import FakeServer, serving

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page

_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_PATIENCE_MS = 20_000  # a busy machine is slow, not wrong


@pytest.fixture(scope="package")
def one_server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


@pytest.fixture
def server(one_server: FakeServer) -> FakeServer:
    """The server, reset to its first state."""
    one_server.reset()
    return one_server


@dataclass
class Tab:
    """The browser's one tab, and what the page did wrong in it."""

    page: "Page"
    mistakes: list[str] = field(default_factory=list)

    def note(self, message: "ConsoleMessage") -> None:
        # A refused request is in the console too; those are wanted.
        if message.type in ("error", "warning") and "Failed to load" not in message.text:
            self.mistakes.append(message.text)


# Only in this package: while the browser is open, its event loop runs in the tests' thread.
@pytest.fixture(scope="package")
def tab() -> Iterator[Tab]:
    """One for all tests: a new one would read the page's files again."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs a browser: no chromium on PATH (on Debian, apt-get install chromium)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=_ARGUMENTS)
        tab = Tab(browser.new_page())
        tab.page.set_default_timeout(_PATIENCE_MS)
        tab.page.on("pageerror", lambda error: tab.mistakes.append(str(error)))
        tab.page.on("console", tab.note)
        yield tab
        browser.close()


def wait_until(page: "Page", condition: str) -> None:
    """Playwright's own `wait_for_function` needs eval, which the page's policy forbids."""
    for _ in range(_PATIENCE_MS // 20):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    pytest.fail(f"never came true: {condition}")


OpenPage = Callable[..., "Page"]


@pytest.fixture
def open_page(tab: Tab, server: FakeServer) -> Iterator[OpenPage]:
    """Opens the page: `width`, `height`, `scheme`; its own mistakes fail the test."""

    def call(
        width: int = 1280, height: int = 800, scheme: str = "light", ready: bool = True
    ) -> "Page":
        tab.page.set_viewport_size({"width": width, "height": height})
        tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        tab.page.goto(server.url)
        if ready:
            tab.page.wait_for_selector("#server[data-state=ready]")
        return tab.page

    tab.mistakes.clear()
    yield call
    assert tab.mistakes == []
