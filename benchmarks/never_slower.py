"""Whether "auto" is ever slower than plain decoding or than a fixed number of draft tokens.

    python -m benchmarks.never_slower --device cuda --json auto.json --plot auto.png
    python -m benchmarks.never_slower --device cpu --only demo/draft demo/ngram
    SLIPSTREAM_CPU_KERNELS=avx512 python -m benchmarks.never_slower --device cpu

Every drafter has one engine, whose policy is exchanged: all numbers of draft tokens and "auto" are
measured in the same minutes with the same requests, in turns, each round another one first. A
window decodes as many requests at once as the concurrency says until they have gained --output
tokens each, on average, and only that is timed: prompts are read before it, and no request ends
within it. Below --least tokens a round has several windows, which count as one.

    tokens/s    median of --repeat rounds
    of best     speed of "auto" over that of the best other setting (by its median): median over
                the rounds, within which they are compared
    of plain    the same over plain decoding
    of fixed    the same over the best number above 0
    K           draft tokens that "auto" verified per request and step

Traffic: "text" is greedy and judged for real, after the demo's held-out prompts or a twin's random
ones. Elsewhere verdicts are drawn with a chance per place: "high" 0.85, "low" 0.1, "mixed" 0.9 for
every other request and 0 for the rest; tokens are then those to be expected from the drafts that
were verified, so that the luck of the draw does not count. Before each of its rounds "auto" decodes
--warm-up tokens a request of other prompts of that traffic, as a server has that is running.
Prompts are in the prefix cache.

Bars: "auto" is nowhere more than 3 percent (GPU) or 5 percent (CPU) below the best, and with mixed
traffic at least 5 percent above the best fixed number. The exit code is 1 where one is missed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.decode_timing import release
from benchmarks.decode_windows import Window, run_window
from benchmarks.policy_engines import (
    AUTO,
    MOST,
    PAIRS,
    PLAIN,
    TEXT,
    TRAFFIC,
    Pair,
    Requests,
    SomeDraft,
    open_engine,
    policies,
    sizes,
)
from benchmarks.policy_pictures import never_slower_figure
from slipstream import LLM
from slipstream.bench.pictures import require_plots, save
from slipstream.core.step_form import PARTS
from slipstream.kernels.registry import kernels_for
from slipstream.models.loading import dtype_named
from slipstream.runner import graphs

LEAST_OF_BEST = {"cuda": 0.97, "cpu": 0.95}
LEAST_OF_FIXED = 1.05  # with mixed traffic


@dataclass(frozen=True, kw_only=True)
class Method:
    """How an engine is measured.

    Attributes:
        settings: numbers of draft tokens, and "auto".
        prompt: tokens of each prompt.
        output, warm_up: tokens that a request gains in a window, on average.
        least: tokens of a round, where verdicts are not drawn.
    """

    settings: tuple[str, ...]
    traffic: tuple[str, ...]
    concurrency: tuple[int, ...]
    prompt: int
    output: int
    warm_up: int
    least: int
    repeat: int

    @property
    def most(self) -> int:
        """Output tokens of a request at most: if it alone had all its drafts accepted."""
        return (MOST + 1) * (max(self.output, self.warm_up) + 2)


@dataclass(frozen=True)
class Cell:
    """A kind of traffic at a concurrency: by setting the windows of all rounds."""

    drafter: str
    traffic: str
    concurrency: int
    windows: Mapping[str, Sequence[Window]]

    def speed(self, setting: str) -> float:
        """Tokens per second."""
        return statistics.median(window.speed for window in self.windows[setting])

    def ratio(self, least: int, most: int = MOST) -> float | None:
        """The speed of "auto" over that of the best number in a range; None without either."""
        others = [it for it in self.windows if it != AUTO and least <= int(it) <= most]
        if AUTO not in self.windows or not others:
            return None
        pairs = zip(self.windows[AUTO], self.windows[max(others, key=self.speed)], strict=True)
        return statistics.median(ours.speed / theirs.speed for ours, theirs in pairs)

    def misses(self, device: str) -> list[str]:
        """The bars that it misses."""
        of_best, of_fixed = self.ratio(0), self.ratio(1)
        found = []
        if of_best is not None and of_best < LEAST_OF_BEST[device]:
            found.append(f"of best {of_best:.3f} < {LEAST_OF_BEST[device]}")
        if self.traffic == "mixed" and of_fixed is not None and of_fixed < LEAST_OF_FIXED:
            found.append(f"of fixed {of_fixed:.3f} < {LEAST_OF_FIXED}")
        return found

    def document(self) -> dict[str, Any]:
        """The results as JSON data."""
        return {
            "drafter": self.drafter,
            "traffic": self.traffic,
            "concurrency": self.concurrency,
            "tokens_per_s": {name: self.speed(name) for name in self.windows},
            "of_best": self.ratio(0),
            "of_plain": self.ratio(0, 0),
            "of_fixed": self.ratio(1),
            **{
                name: {
                    setting: statistics.median(getattr(window, name) for window in windows)
                    for setting, windows in self.windows.items()
                }
                for name in ("step_ms", "mean_choice")
            },
            "rounds": {name: [it.speed for it in rows] for name, rows in self.windows.items()},
        }


class Measuring:
    """One engine, measured with every kind of traffic."""

    def __init__(self, name: str, pair: Pair, llm: LLM, method: Method) -> None:
        self._name, self._pair, self._llm, self._method = name, pair, llm, method
        self._policies = policies(llm, method.settings)
        self._requests = Requests(pair, method.prompt, max(*method.concurrency, 8))

    def cell(self, traffic: str, concurrency: int) -> Cell:
        """Measure all settings in turn."""
        names, method = list(self._policies), self._method
        windows: dict[str, list[Window]] = {name: [] for name in names}
        for name in names:  # what is done once is done then
            self._round(name, traffic, concurrency, 0, method.warm_up)
        if AUTO in names and self._llm.engine.resolved.captures:
            self._capture(traffic, concurrency)
        for number in range(method.repeat):
            first = number % len(names)
            for name in [*names[first:], *names[:first]]:
                if name == AUTO:
                    self._round(name, traffic, concurrency, number, method.warm_up, True)
                round_of_it = self._round(name, traffic, concurrency, number, method.output)
                windows[name].append(round_of_it)
        return Cell(self._name, traffic, concurrency, windows)

    def _capture(self, traffic: str, concurrency: int) -> None:
        """Run the steps that "auto" may choose: a server captures them once it has often wanted
        them."""
        often, graphs.WANTED_BEFORE_CAPTURE = graphs.WANTED_BEFORE_CAPTURE, 1
        for width in self._policies[AUTO].widths[1:]:
            for part in range(1, PARTS):
                asked = self._requests.take(traffic, 0, concurrency, True)
                some = SomeDraft(width, part / PARTS)
                run_window(self._llm, some, asked, 1, self._method.most)
        graphs.WANTED_BEFORE_CAPTURE = often

    def _round(
        self,
        setting: str,
        traffic: str,
        concurrency: int,
        number: int,
        tokens: int,
        warms_up: bool = False,
    ) -> Window:
        """Windows until there are enough tokens, and as many requests of each kind."""
        total = Window()
        least = 0 if self._pair.is_drawn or warms_up else self._method.least
        kinds = len(TRAFFIC[traffic]) if traffic in TRAFFIC else 1
        count = max(-(-least // (concurrency * tokens)), -(-kinds // concurrency))
        for place in range(count):
            first = (number * count + place) * concurrency
            asked = self._requests.take(traffic, first, concurrency, warms_up)
            policy = self._policies[setting]
            total += run_window(self._llm, policy, asked, tokens, self._method.most)
        return total


def measure(
    name: str, pair: Pair, method: Method, device: str, options: Mapping[str, Any]
) -> Iterator[Cell]:
    """The cells of a pair, which are printed as they come."""
    count: int | str = max((int(it) for it in method.settings if it != AUTO), default=MOST)
    if AUTO in method.settings:
        count = AUTO
    with tempfile.TemporaryDirectory() as folder:
        began = perf_counter()
        llm = open_engine(
            pair,
            Path(folder),
            count,
            device=device,
            max_num_seqs=max(method.concurrency),
            max_model_len=method.prompt + method.most + 2 * MOST,
            **options,
        )
        measuring = Measuring(name, pair, llm, method)
        print(f"\n{name}: ready in {perf_counter() - began:.1f} s\n", flush=True)
        headings = _headings(method.settings)
        print(_line(headings), _line(["---"] * len(headings)), sep="\n")
        for traffic in pair.traffic:
            if traffic not in method.traffic:
                continue
            for concurrency in method.concurrency:
                cell = measuring.cell(traffic, concurrency)
                print(_line(_row(cell, method.settings, device)), flush=True)
                yield cell


def _headings(settings: Sequence[str]) -> list[str]:
    names = ["plain" if name == PLAIN else name for name in settings]
    return ["traffic", "requests", *names, "of best", "of plain", "of fixed", "K", "bar"]


def _row(cell: Cell, settings: Sequence[str], device: str) -> list[str]:
    ratios = [cell.ratio(0), cell.ratio(0, 0), cell.ratio(1)]
    choices = [window.mean_choice for window in cell.windows.get(AUTO, ())]
    return [
        cell.traffic,
        str(cell.concurrency),
        *(f"{cell.speed(name):.0f}" if name in cell.windows else "" for name in settings),
        *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
        f"{statistics.median(choices):.2f}" if choices else "",
        "; ".join(cell.misses(device)) or "met",
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    on_gpu = given.device == "cuda"
    method = Method(
        settings=tuple(given.settings.split(",")),
        traffic=tuple(given.traffic.split(",")),
        concurrency=given.concurrency or ((1, 8, 32, 128) if on_gpu else (1, 4, 16)),
        prompt=given.prompt,
        output=given.output,
        warm_up=given.warm_up,
        least=given.least,
        repeat=given.repeat,
    )
    if given.plot is not None:
        if PLAIN not in method.settings:
            parser.error("--plot shows speeds over plain decoding: add 0 to --settings")
        require_plots()
    kernels = kernels_for(torch.device(given.device), dtype_named(given.dtype)).network.backend
    print(f"kernels: {kernels}")
    cells: list[Cell] = []
    document: dict[str, Any] = {"method": asdict(method), "kernels": kernels, "cells": []}
    with suppress(KeyboardInterrupt):  # what is there by then is shown
        for name, pair in PAIRS[given.device].items():
            if given.only and name not in given.only:
                continue
            for cell in measure(name, pair, method, given.device, {"dtype": given.dtype}):
                cells.append(cell)
                document["cells"].append(cell.document())
                if given.json is not None:
                    given.json.write_text(json.dumps(document, indent=1))
            release()
    missed = [
        f"{cell.drafter}, {cell.traffic}, {cell.concurrency}: {miss}"
        for cell in cells
        for miss in cell.misses(given.device)
    ]
    print(f"\n{len(cells)} cells, {len(missed)} bars missed", *missed, sep="\n  ")
    if given.plot is not None:
        save(lambda: never_slower_figure(document), given.plot)
    return int(bool(missed))


def _parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = dict.fromkeys(name for pairs in PAIRS.values() for name in pairs)
    cli.add_argument("--device", choices=PAIRS, default="cpu")
    cli.add_argument("--only", nargs="*", choices=names, help="drafters [all]")
    cli.add_argument(
        "--settings",
        default="0,1,2,4,7,auto",
        help="without auto a GPU pads all steps to the largest number",
    )
    cli.add_argument("--traffic", default=",".join((TEXT, *TRAFFIC)))
    cli.add_argument("--concurrency", type=sizes, help="[1,8,32,128 or, on a CPU, 1,4,16]")
    cli.add_argument("--prompt", type=int, default=128)
    cli.add_argument("--output", type=int, default=48)
    cli.add_argument("--warm-up", type=int, default=32)
    cli.add_argument("--least", type=int, default=192)
    cli.add_argument("--repeat", type=int, default=5)
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--json", type=Path, help="file for all figures")
    cli.add_argument("--plot", type=Path, help="PNG, SVG or PDF")
    return cli


if __name__ == "__main__":
    sys.exit(main())
