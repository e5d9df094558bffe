"""A real GGUF model, plain, here and by llama.cpp: the same file and prompts, in turns.

    scripts/real_model          # fetches models and prints their paths
    python -m benchmarks.real_model --model FILE --venv DIR [--json FILE]

DIR is a virtual environment with llama-cpp-python; without it only this project is measured. Every
round decodes --prompt tokens of a fixed text at each of --batches, and then reads prompts of
--prefills tokens for one output token each. Medians over --rounds; ratios are of our speed to that
of llama.cpp, above 1 where ours is faster. Nothing else may run beside it, please.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu_bars import ratio, table
from benchmarks.cpu_own import own_entry
from benchmarks.cpu_rounds import PREFILL, Plan, Result, batch_measure, compare
from benchmarks.peers.catalogue import entries
from benchmarks.peers.process import Entry
from benchmarks.peers.protocol import Job
from benchmarks.prompt_ids import PromptText

_SHORTER = 3  # a request of a batch gets so many times fewer tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the figures; 1 where an engine failed."""
    given = _arguments(arguments)
    decoding = {
        batch: given.new_tokens if batch == 1 else max(1, given.new_tokens // _SHORTER)
        for batch in given.batches
    }
    # Engines are loaded once for each length of a prompt that is read.
    plans = [
        Plan(
            prompt=given.prompt,
            decode={} if place else decoding,
            prefill=length,
            rounds=given.rounds,
        )
        for place, length in enumerate(given.prefills)
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = [(plan, _measured(given, plan, Path(folder))) for plan in plans]
    lines: list[tuple[str, ...]] = [("measure", "ours, tokens/s", "llama.cpp", "ratio")]
    lines += [line for plan, results in found for line in _lines(plan, results)]
    print(table(lines))
    errors = [f"{one.name}: {one.error}" for _, results in found for one in results if one.error]
    print("\n".join(errors))
    if given.json is not None:
        document = [_document(plan, results) for plan, results in found]
        given.json.write_text(json.dumps({"model": given.model.name, "plans": document}, indent=1))
    return 1 if errors else 0


def _measured(given: argparse.Namespace, plan: Plan, work: Path) -> list[Result]:
    job = Job(
        target=str(given.model.absolute()),
        threads=given.threads,
        max_batch=max(plan.decode, default=1),
        max_tokens=plan.max_tokens,
        work=str(work),
    )
    engines: list[Entry] = [own_entry("ours", job)]
    if given.venv is not None:
        engines += entries("llama.cpp", given.venv, job)
    return compare(engines, plan, PromptText(given.model), given.logs or work, given.timeout, _say)


def _lines(plan: Plan, results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Tokens a second: of all requests together, or of a prompt."""
    rows = []
    for batch in plan.decode:
        rows.append((f"decoding, {batch_measure(batch)}", batch_measure(batch), batch))
    rows.append((f"reading {plan.prefill} tokens", PREFILL, plan.prefill))
    lines = []
    for words, measure, tokens in rows:
        seconds = [one.median(measure) for one in results]
        speeds = ["-" if it is None else f"{tokens / it:.1f}" for it in seconds]
        ours, theirs = seconds[0], seconds[1] if len(seconds) > 1 else None
        times = ratio(theirs, ours)
        speeds += ["-"] * (2 - len(speeds))
        lines.append((words, *speeds, "-" if times is None else f"{times:.2f}"))
    return lines


def _document(plan: Plan, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "prompt": plan.prompt,
        "prefill": plan.prefill,
        "engines": [result.document() for result in results],
    }


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--model", type=Path, required=True, help="a GGUF file")
    cli.add_argument("--venv", type=Path, help="where llama-cpp-python is installed")
    cli.add_argument("--batches", type=_numbers, default=[1, 8])
    cli.add_argument("--prefills", type=_numbers, default=[512, 1024])
    cli.add_argument("--prompt", type=int, default=64)
    cli.add_argument("--new-tokens", type=int, default=96, help="at batch 1; others get a third")
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--timeout", type=float, default=300.0, help="seconds of any single run")
    cli.add_argument("--logs", type=Path, help="a folder for what the engines print")
    cli.add_argument("--json", type=Path, help="a file for all figures")
    return cli.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
