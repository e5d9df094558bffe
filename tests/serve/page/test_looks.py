"""Screenshots in light and dark, wide and narrow; and checks that need eyes otherwise."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.serve.page.conftest import OpenPage, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHECKS = (Path(__file__).parent / "accessibility.js").read_text()
LOOKS = [
    pytest.param(1280, 800, "light", id="light-1280"),
    pytest.param(390, 844, "dark", id="dark-390"),
    pytest.param(1280, 800, "dark", id="dark-1280", marks=pytest.mark.full),
    pytest.param(390, 844, "light", id="light-390", marks=pytest.mark.full),
]


def faults(page: "Page") -> list[str]:
    """Missing names, weak contrast, small targets and the like, in words."""
    return page.evaluate(CHECKS)


def overflow(page: "Page") -> int:
    """Pixels by which the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def colours(picture: bytes) -> dict[tuple[int, ...], int]:
    from PIL import Image

    pixels = np.asarray(Image.open(BytesIO(picture)).convert("RGB")).reshape(-1, 3)
    values, counts = np.unique(pixels, axis=0, return_counts=True)
    return {tuple(map(int, value)): int(n) for value, n in zip(values, counts, strict=True)}


def colour_of(page: "Page", name: str) -> tuple[int, ...]:
    value = page.evaluate(
        "name => getComputedStyle(document.documentElement).getPropertyValue(name)", name
    )
    return tuple(bytes.fromhex(value.strip().removeprefix("#")))


@pytest.mark.parametrize(("width", "height", "scheme"), LOOKS)
def test_the_page_at_rest_and_with_answers(
    open_page: OpenPage, tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    page = open_page(width, height, scheme)
    page.emulate_media(reduced_motion="reduce")
    assert (overflow(page), faults(page)) == (0, [])
    page.check("input[value=both]", force=True)
    page.click("#run")
    page.wait_for_selector(".verdict")
    page.locator(".tok.recovered").last.hover()
    page.wait_for_selector("#card")
    picture = page.screenshot(path=tmp_path / "answers.png")
    assert (overflow(page), faults(page)) == (0, [])

    found = colours(picture)
    paper = colour_of(page, "--paper")
    assert (sum(paper) > 600) == (scheme == "light")
    background = colour_of(page, "--card")
    assert max(found, key=lambda colour: found[colour]) in (paper, background)
    for kind in ("accepted", "recovered", "bonus"):
        assert found.get(colour_of(page, f"--{kind}"), 0) > 20, kind
    page.emulate_media(reduced_motion="no-preference")


@pytest.mark.parametrize(("width", "height", "scheme"), LOOKS)
def test_trouble_is_readable(open_page: OpenPage, width: int, height: int, scheme: str) -> None:
    page = open_page(width, height, scheme)
    page.fill("#prompt", "#wrong " + "long" * 100)
    page.click("#run")
    page.wait_for_selector("#notice")
    assert (overflow(page), faults(page)) == (0, [])
    page.fill("#prompt", "#other")
    page.check("input[value=both]", force=True)
    page.click("#run")
    page.wait_for_selector(".differs")
    assert (overflow(page), faults(page)) == (0, [])
    page.locator("#settings-box, .more").evaluate_all("all => all.map(box => box.open = true)")
    page.check("input[value=chat]", force=True)
    assert (overflow(page), faults(page)) == (0, [])
    page.evaluate("document.getElementById('key-dialog').showModal()")
    assert (overflow(page), faults(page)) == (0, [])


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_nothing_jumps_while_a_text_streams(open_page: OpenPage, width: int, height: int) -> None:
    page = open_page(width, height)
    page.evaluate(
        """() => {
            window.shifts = [];
            new PerformanceObserver((list) => {
                for (const entry of list.getEntries()) {
                    const moved = entry.sources.map(({node}) => node?.id || node?.className)
                        .filter((name) => name !== "caret");  // that is what it is there for
                    if (moved.length) window.shifts.push([entry.value, ...moved]);
                }
            }).observe({type: "layout-shift"});
        }"""
    )
    tops = "['composer', 'rate', 'run'].map(id => document.getElementById(id).offsetTop)"
    before = page.evaluate(tops)
    page.fill("#prompt", "#endless")
    page.press("#prompt", "Control+Enter")
    wait_until(page, "document.querySelectorAll('.tok').length > 400")
    during = page.evaluate(tops)
    page.keyboard.press("Escape")
    page.wait_for_selector(".replays")
    assert before == during == page.evaluate(tops)
    assert page.evaluate("window.shifts.filter(([value]) => value > 0.05)") == []


def test_tab_goes_through_everything_in_reading_order(open_page: OpenPage) -> None:
    page = open_page()
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(".replays")
    page.locator(".skip").focus()
    reached: list[list[str]] = []
    for _ in range(40):
        focus = page.evaluate(
            """() => {
                const one = document.activeElement;
                const shown = one.matches(".segmented input") ? one.nextElementSibling : one;
                const {outlineStyle, outlineWidth} = getComputedStyle(shown);
                const seen = outlineStyle !== "none" && parseFloat(outlineWidth) >= 1;
                return [one.id || one.name || one.className || one.tagName, seen];
            }"""
        )
        if reached and focus[0] in ("BODY", reached[0][0]):
            break
        reached.append(focus)
        page.keyboard.press("Tab")
    names = [name for name, _ in reached]
    assert [name for name, seen in reached if not seen] == []
    order = ["skip", "mode", "view", "text", "small", "prompt", "run", "example", "clear"]
    settings = ["drafter", "num_speculative_tokens", "temperature", "top_k", "max_tokens", "stop"]
    places = [names.index(name) for name in order + settings]
    assert places == sorted(places)
