"""Speculation after long contexts, with a draft that attends to all of it or to a window.

    python -m benchmarks.long_contexts [--draft-windows 1024,0] [--json FILE]

One engine for each window (0: none) of a twin and its first layers, both with positions for the
longest context. Every context is read once; then plain decoding, --num-speculative-tokens and
"auto" take turns after it, which find it in the prefix cache. Only decoding is timed, --output
tokens a request; "auto" has decoded --warm-up tokens after shorter contexts before. Contexts of
fewer tokens are beginnings of the longest.

Whole requests are timed from the prompt to the last token, with other prompts in each round: plain
ones (num_speculative_tokens 0) and "auto" ones.

    ms a token    of each request: time of the window / tokens of a request; median of --repeat
    of plain      tokens/s over plain decoding, median over rounds
    AL            tokens of a request and step

The text of a twin means nothing, and what its draft guesses after a window neither: verdicts are
drawn, --chance for each place, and tokens are those to be expected (of whole requests those that
came). What a window does to acceptance has to be measured on real text. With --chance 0 drafts are
judged for real.

Bars: speculation is 1.3 times plain at batch 1 and never below plain at batch 8; whole requests
are 1.2 times plain. The exit code is 1 where one is missed with a window.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.cpu_bars import Bar
from benchmarks.decode_timing import release
from benchmarks.decode_windows import Asked, Window, run_window
from benchmarks.geometries import geometry_named, write_config
from benchmarks.policy_engines import AUTO, MOST, MOST_DRAWN, PLAIN, drawn, policies, sizes
from slipstream import LLM, SamplingParams
from slipstream.engine.prompts import TokensPrompt

OTHER_END = 16  # tokens that contexts for warming up are shorter
BARS = {1: 1.3, 8: 1.0}  # of plain, by batch
WHOLE_BAR = 1.2


@dataclass(frozen=True)
class Place:
    """A number of contexts of one length."""

    context: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        ms: a token, of each request; of whole requests the whole time.
    """

    draft_window: int
    context: int
    batch: int
    setting: str
    ms: float
    al: float
    of_plain: float
    whole: bool = False


class Contexts:
    """Random texts."""

    def __init__(self, vocabulary: int) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._vocabulary = vocabulary
        self._texts: list[list[int]] = []

    def first(self, place: Place) -> list[list[int]]:
        """The beginnings of the first texts; the longest must be asked for first."""
        while len(self._texts) < place.batch:
            self._texts += self.new(place.batch - len(self._texts), place.context)
        return [text[: place.context] for text in self._texts[: place.batch]]

    def new(self, number: int, length: int) -> list[list[int]]:
        """New texts, without prefix hits."""
        shape = number, length
        return torch.randint(1, self._vocabulary, shape, generator=self._generator).tolist()


def decode(llm: LLM, texts: Sequence[list[int]], given: argparse.Namespace) -> dict[str, Any]:
    """The windows of all rounds for each setting."""
    names = [PLAIN, str(given.num_speculative_tokens), AUTO]
    chosen = policies(llm, names)
    output, most = given.output, (MOST + 1) * (max(given.output, given.warm_up) + 2)

    def run(name: str, shorter: int, tokens: int) -> Window:
        rates = [given.chance] * MOST_DRAWN if given.chance else None
        asked = [Asked(prompt=text[: len(text) - shorter], rates=rates) for text in texts]
        return run_window(llm, chosen[name], asked, tokens, most)

    for name in chosen:  # reads the contexts, and captures what is left
        run(name, OTHER_END if name == AUTO else 0, given.warm_up)
    windows: dict[str, list[Window]] = {name: [] for name in chosen}
    for number in range(given.repeat):
        first = number % len(chosen)
        for name in [*chosen][first:] + [*chosen][:first]:
            if name == AUTO:
                run(name, OTHER_END, given.warm_up)
            windows[name].append(run(name, 0, output))
    return windows


def decode_rows(draft_window: int, place: Place, windows: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each setting."""
    plain = windows[PLAIN]
    for name, own in windows.items():
        ratios = [ours.speed / theirs.speed for ours, theirs in zip(own, plain, strict=True)]
        yield Row(
            draft_window=draft_window,
            context=place.context,
            batch=place.batch,
            setting=name,
            ms=statistics.median(1e3 * place.batch / it.speed for it in own),
            al=statistics.median(it.tokens / place.batch / len(it.choices) for it in own),
            of_plain=statistics.median(ratios),
        )


def whole_rows(
    llm: LLM, draft_window: int, place: Place, contexts: Contexts, given: argparse.Namespace
) -> Iterator[Row]:
    """Whole requests, "auto" and plain by turns."""
    seconds: dict[str, list[float]] = {PLAIN: [], AUTO: []}
    als: dict[str, list[float]] = {PLAIN: [], AUTO: []}
    for number in range(given.repeat + 1):  # the first warms up
        for name in (PLAIN, AUTO) if number % 2 else (AUTO, PLAIN):
            params = SamplingParams(
                temperature=0,
                max_tokens=given.whole_output,
                ignore_eos=True,
                num_speculative_tokens=0 if name == PLAIN else None,
            )
            texts = contexts.new(place.batch, place.context)
            prompts = [TokensPrompt(prompt_token_ids=text) for text in texts]
            began = perf_counter()
            outputs = llm.generate(prompts, params)
            if number:
                seconds[name].append(perf_counter() - began)
                steps = sum(output.metrics.num_steps for output in outputs)
                als[name].append(given.whole_output * place.batch / steps)
    for name, own in seconds.items():
        ratios = [plain / ours for ours, plain in zip(own, seconds[PLAIN], strict=True)]
        yield Row(
            draft_window=draft_window,
            context=place.context,
            batch=place.batch,
            setting=name,
            ms=1e3 * statistics.median(own),
            al=statistics.median(als[name]),
            of_plain=statistics.median(ratios),
            whole=True,
        )


def measure(draft_window: int, given: argparse.Namespace) -> Iterator[Row]:
    """Measure all rows with one engine."""
    longest = max(place.context for place in given.contexts) + (MOST + 1) * (given.output + 2)
    longest = max(longest, given.whole.context + given.whole_output + MOST + 1)
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), perf_counter()
        changes = {"max_position_embeddings": longest + MOST + 1}
        drafter: dict[str, Any] = {
            "model": str(write_config(folder / "draft", given.draft, **changes)),
            "num_speculative_tokens": AUTO,
        }
        if given.chance:
            drafter.update(drawn([given.chance]))
        if draft_window:
            drafter["draft_window"] = draft_window
        llm = LLM(
            write_config(folder / "target", given.target, **changes),
            speculative_config=drafter,
            load_format="twin",
            max_model_len=longest,
            max_num_seqs=max(place.batch for place in (*given.contexts, given.whole)),
            device=given.device,
            dtype=given.dtype,
            skip_tokenizer_init=True,
            warm_up=True,
        )
        window = f"draft window {draft_window}" if draft_window else "no draft window"
        print(f"\n{window}: ready in {perf_counter() - began:.1f} s\n{_HEADINGS}", flush=True)
        contexts = Contexts(geometry_named(given.target)["vocab_size"])
        for place in sorted(given.contexts, key=lambda it: -it.context):
            windows = decode(llm, contexts.first(place), given)
            yield from decode_rows(draft_window, place, windows)
        yield from whole_rows(llm, draft_window, given.whole, contexts, given)


_HEADINGS = "context  batch  setting   ms a token     AL  of plain"


def show(row: Row) -> None:
    """One line below the headings."""
    print(
        f"{row.context:7d} {row.batch:6d}  {row.setting:>7} {row.ms:12.2f} {row.al:6.2f} "
        f"{row.of_plain:9.2f}{'  whole' if row.whole else ''}",
        flush=True,
    )


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """The bars for "auto" with a window."""
    for row in rows:
        if row.setting != AUTO or not row.draft_window:
            continue
        limit = WHOLE_BAR if row.whole else BARS.get(row.batch)
        title = f"{'whole, ' if row.whole else ''}{row.batch} x {row.context}, over plain"
        yield Bar(title, row.of_plain, limit, at_least=True)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    rows: list[Row] = []
    for draft_window in given.draft_windows:
        for row in measure(draft_window, given):
            rows.append(row)
            show(row)
        release()
    found = list(bars(rows))
    print("", *(bar.line() for bar in found), sep="\n")
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(bar.met is False for bar in found))


def _place(text: str) -> Place:
    batch, context = text.split("x")
    return Place(int(context), int(batch))


def _places(text: str) -> tuple[Place, ...]:
    return tuple(_place(part) for part in text.split(","))


def _parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--target", default="qwen3-8b")
    cli.add_argument("--draft", default="qwen3-8b:4")
    cli.add_argument("--contexts", type=_places, default=_places("1x131072,1x32768,8x32768"))
    cli.add_argument("--whole", type=_place, default=_place("8x4096"))
    cli.add_argument("--whole-output", type=int, default=288)
    cli.add_argument("--draft-windows", type=sizes, default=(1024, 0))
    cli.add_argument("--num-speculative-tokens", "-k", type=int, default=4)
    cli.add_argument("--chance", type=float, default=0.7)
    cli.add_argument("--output", type=int, default=48)
    cli.add_argument("--warm-up", type=int, default=24)
    cli.add_argument("--repeat", type=int, default=3)
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    cli.add_argument("--json", type=Path)
    return cli


if __name__ == "__main__":
    sys.exit(main())
