"""Reports as self-contained HTML pages in light or dark colours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from slipstream.bench.tables import ReportTable

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem; color: CanvasText; background: Canvas; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.about, p.note { opacity: .75; margin: .2rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; white-space: nowrap; }
th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
tbody tr { border-top: 1px solid color-mix(in srgb, CanvasText 18%, transparent); }
tr.best { font-weight: 700; }
svg { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True)
class PageChart:
    """A chart of a page, as SVG; `words` describe it for screen readers."""

    heading: str
    svg: str
    words: str


def write_page(
    file: Path,
    title: str,
    about: Mapping[str, str],
    parts: Sequence[ReportTable | PageChart],
) -> None:
    """Write a page; `about` names what was measured, and where."""
    lines = "".join(
        f'<p class="about">{escape(name)}: {escape(value)}</p>\n' for name, value in about.items()
    )
    body = "".join(map(_part, parts))
    file.write_text(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{lines}{body}</body>\n</html>\n",
        encoding="utf-8",
    )


def _part(part: ReportTable | PageChart) -> str:
    heading = f"<h2>{escape(part.heading)}</h2>\n"
    if isinstance(part, PageChart):
        label = escape(part.words, quote=True)
        return f'{heading}<div class="scroll" role="img" aria-label="{label}">{part.svg}</div>\n'
    note = f'<p class="note">{escape(part.note)}</p>\n' if part.note else ""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in part.columns)
    rows = "".join(_row(row, index in part.best) for index, row in enumerate(part.rows))
    return (
        f'{heading}{note}<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _row(cells: Sequence[str], is_best: bool) -> str:
    mark = ' class="best"' if is_best else ""
    return f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"
