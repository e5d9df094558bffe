"""Links of README.md, CONTRIBUTING.md and docs/ lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(text: str) -> str:
    """The page without its blocks of code, in which `#` is no heading."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Names that a heading gets: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", name.lower()).strip()) for name in headings}


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            dead.append(target)
            continue
        headings = anchors(text if file == page else file.read_text()) if anchor else {anchor}
        if anchor not in headings:
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page, page.read_text())


def test_dead_links_are_found() -> None:
    text = "# A b\n[1](#a-b) [2](#c) [3](none.md)\n```\n# C\n```\n"
    assert dead_links(ROOT / "README.md", text) == ["#c", "none.md"]


def test_navigation_of_the_site_has_every_page() -> None:
    shown = re.findall(r"^ +- .+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
