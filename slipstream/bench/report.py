"""Results as files: JSON, texts, pictures and pages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Template

from slipstream import __version__
from slipstream.bench.datasets import BenchPrompt
from slipstream.bench.options import E2EL, ITL, TPOT, TTFT, SummaryOptions
from slipstream.bench.pictures import PAGES, as_svg, load_figure, save, sweep_figure
from slipstream.bench.summary import details, series, summarise, timeline
from slipstream.bench.sweep import CellResult, Failure
from slipstream.bench.tables import (
    METRIC_NAMES,
    ReportTable,
    drafting_tables,
    failures_table,
    load_tables,
    sweep_table,
    texts_table,
)
from slipstream.core.errors import UsageError

if TYPE_CHECKING:
    from slipstream.bench.serve import ServePlan, ServeResult


@dataclass(frozen=True)
class PageChart:
    """A chart of a page, as SVG; `words` describe it for screen readers."""

    heading: str
    svg: str
    words: str


def write_page(
    file: Path, title: str, about: Mapping[str, str], parts: Sequence[ReportTable | PageChart]
) -> None:
    """Write a page; `about` names what was measured, and where."""
    template = Template(
        (Path(__file__).parent / "page.html.jinja").read_text("utf-8"), autoescape=True
    )
    text = template.render(title=title, about=about, parts=parts)
    file.write_text(text + "\n", encoding="utf-8")


def write_json(document: Mapping[str, Any], file: Path) -> None:
    """Write JSON with one figure per line."""
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def text_entry(prompt: BenchPrompt, text: str) -> dict[str, Any]:
    return {"id": prompt.id, "prompt": prompt.shown(), "text": text}


def write_texts(entries: Iterable[Mapping[str, Any]], file: Path) -> None:
    file.write_text(
        json.dumps(list(entries), indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
        errors="surrogatepass",
    )


def read_texts(file: Path) -> dict[str, str]:
    """Read the texts of a file of `write_texts`, by id; UsageError if it is no such file."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8", errors="surrogatepass"))
        return {str(entry["id"]): str(entry["text"]) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{file} is not a file of --save-texts ({error}); write one with that flag"
        ) from None


def sweep_document(
    points: Sequence[CellResult], failures: Sequence[Failure], about: Mapping[str, Any]
) -> dict[str, Any]:
    """A sweep as JSON; `about` names what was measured, and where."""
    return {
        **about,
        "points": [asdict(point) for point in points],
        "failures": [asdict(failure) for failure in failures],
    }


def draw_sweep(
    points: Sequence[CellResult],
    failures: Sequence[Failure],
    title: str,
    about: Mapping[str, str],
    files: Sequence[Path],
) -> None:
    for file in files:
        if file.suffix not in PAGES:
            save(lambda: sweep_figure(points, title), file)
            continue
        parts: list[ReportTable | PageChart] = [
            sweep_table(points),
            PageChart(
                "Against K",
                as_svg(lambda: sweep_figure(points, None)),
                "Acceptance length, TPOT, speed-up and median iteration against K",
            ),
            *drafting_tables(points),
        ]
        if failures:
            parts.append(failures_table(failures))
        write_page(file, title, about, parts)


class LoadReport:
    """The results of a load on a server, and the files that they are written to.

    Args:
        about: what was measured, in words, by name.
        expected: texts by id to compare the answers with; None compares nothing.
    """

    def __init__(
        self,
        plan: "ServePlan",
        result: "ServeResult",
        about: Mapping[str, str],
        options: SummaryOptions,
        expected: Mapping[str, str] | None,
    ) -> None:
        run = result.run
        self._plan, self._result = plan, result
        self._done = [record for record in run.records if not record.failed]
        self.title = f"{result.model.name} at {plan.server.url}"
        self.about = {**about, "measured": f"{_now()} by slipstream {__version__}"}
        self._figures = summarise(run, result.speculation, options)
        self.tables = load_tables(self._figures, result.speculation, options)
        if expected is not None:
            wrong = [it.id for it in self._done if expected.get(it.id) != it.text]
            self._figures |= {"texts_compared": len(self._done), "texts_differing": wrong}
            self.tables.append(texts_table(len(self._done), wrong))

    @property
    def is_wrong(self) -> bool:
        """Whether a request failed or a text differs from the expected one."""
        return bool(self._figures["failed"] or self._figures.get("texts_differing"))

    def write(self, file: Path, settings: Mapping[str, Any], detailed: bool) -> None:
        """Write figures and settings as JSON, in detail with those of every request."""
        head = {
            "date": _now(),
            "slipstream": __version__,
            "base_url": self._plan.server.url,
            "model_id": self._result.model.name,
            "server_speculative": self._result.model.speculative,
            **settings,
            "num_prompts": len(self._plan.prompts),
        }
        more = details(self._result.run) if detailed else {}
        write_json(head | self._figures | more, file)

    def write_texts(self, file: Path) -> None:
        prompts = {prompt.id: prompt for prompt in self._plan.prompts} | self._result.run.later
        write_texts([text_entry(prompts[it.id], it.text) for it in self._done], file)

    def draw(self, files: Sequence[Path]) -> None:
        measured, per_second = series(self._done), timeline(self._result.run)
        times = {METRIC_NAMES[metric]: measured[metric] for metric in (TTFT, TPOT, ITL, E2EL)}
        speculation = self._result.speculation
        shares = () if speculation is None else speculation.acceptance_per_position
        for file in files:
            if file.suffix not in PAGES:
                save(lambda: load_figure(times, per_second, shares, self.title), file)
                continue
            chart = PageChart(
                "Over time",
                as_svg(lambda: load_figure(times, per_second, shares, None)),
                "Distributions of times, tokens and requests per second, acceptance by position",
            )
            write_page(file, self.title, self.about, [*self.tables, chart])


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
