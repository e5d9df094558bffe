"""How fast the bundled target decodes with each of its drafters, beside plain decoding.

    python -m benchmarks.demo_drafters [--prompts 12] [--tokens 128] [--rounds 1] [--only NAME ...]
    SLIPSTREAM_CPU_KERNELS=avx512 python -m benchmarks.demo_drafters --auto

Held-out chats, greedy, one request at a time. All engines answer a prompt before any of them goes
on to the next, each time another one first; a time is that of the whole answer, its prompt's pass
included. With --auto engines choose how much they draft. Every answer is compared with the plain
one. Prints medians as a table of Markdown: times plain is that of the ratios within each prompt.
The last line is one JSON document.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from benchmarks.demo_acceptance import HELD_OUT
from slipstream import LLM, SamplingParams
from slipstream.core.outputs import RequestMetrics
from slipstream.kernels.registry import kernels_for
from slipstream.models.loading import dtype_named

PLAIN = "none"
WARM_UP = 16  # tokens

DRAFTERS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "demo/draft": {"model": "demo/draft", "num_speculative_tokens": 4},
    "demo/pard": {"model": "demo/pard", "num_speculative_tokens": 5},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "demo/p-eagle": {"model": "demo/p-eagle", "num_speculative_tokens": 5},
    "demo/mtp": {"model": "demo/mtp", "num_speculative_tokens": 4},
    "demo/eagle3": {"model": "demo/eagle3", "num_speculative_tokens": 4},
}


@dataclass(kw_only=True)
class Measured:
    """An engine and what it did.

    Attributes:
        parts: microseconds of all its steps, by part.
        seconds, metrics, tokens: of every answer, in the order of the prompts, round by round.
    """

    name: str
    llm: LLM
    parts: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    metrics: list[RequestMetrics] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def warm_up(self, chat: list[dict[str, str]]) -> None:
        """Do all work that is done once."""
        self.llm.chat(chat, SamplingParams(temperature=0, max_tokens=WARM_UP))
        self.parts = {part: -1e6 * took for part, took in self.llm.metrics.seconds.items()}

    def answer(self, chat: list[dict[str, str]], params: SamplingParams) -> None:
        """Answer a prompt, and record the result."""
        began = perf_counter()
        output = self.llm.chat(chat, params)[0]
        self.seconds.append(perf_counter() - began)
        self.metrics.append(output.metrics)
        self.tokens.append(list(output.outputs[0].token_ids))

    def row(self, plain: "Measured") -> dict[str, Any]:
        """The drafter's measurements, and their ratios to plain decoding."""
        counts = [len(tokens) for tokens in self.tokens]
        steps, drafts, accepted = (
            sum(getattr(metrics, name) for metrics in self.metrics)
            for name in ("num_steps", "num_drafts", "num_accepted_tokens")
        )
        rates = [count / took for count, took in zip(counts, self.seconds, strict=True)]
        ratios = [before / took for before, took in zip(plain.seconds, self.seconds, strict=True)]
        most = self.llm.engine.resolved.limits.num_speculative_tokens
        pairs = zip(self.tokens, plain.tokens, strict=True)
        totals = {part: 1e6 * took for part, took in self.llm.metrics.seconds.items()}
        return {
            "drafter": self.name,
            "K": f"auto, {most}" if self.llm.engine.resolved.adaptive else most,
            "tokens/s": round(statistics.median(rates)),
            "times plain": round(statistics.median(ratios), 2),
            "AL": round(1 + accepted / max(drafts, 1), 2),
            **{
                f"{part}, us": round((total + self.parts[part]) / steps)
                for part, total in totals.items()
            },
            "differing": sum(ours != theirs for ours, theirs in pairs),
        }


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--prompts", type=int, default=12)
    cli.add_argument("--tokens", type=int, default=128)
    cli.add_argument("--rounds", type=int, default=1, help="how often to go through the prompts")
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--auto", action="store_true", help="K auto for every drafter")
    cli.add_argument("--only", nargs="*", choices=[*DRAFTERS][1:], help="drafters to measure")
    options = cli.parse_args()
    names = [*DRAFTERS] if options.only is None else [PLAIN, *options.only]
    engines = [Measured(name=name, llm=_open(name, options)) for name in names]
    _run(engines, _chats(options.prompts), options.tokens, options.rounds)
    rows = [engine.row(engines[0]) for engine in engines]
    kernels = kernels_for(torch.device("cpu"), dtype_named(options.dtype)).network.backend
    print(f"Kernels: {kernels}\n\n{_table(rows)}\n")
    print(json.dumps({"dtype": options.dtype, "kernels": kernels, "rows": rows}))
    if any(row["differing"] for row in rows):
        sys.exit("answers differ from plain decoding")


def _open(name: str, options: argparse.Namespace) -> LLM:
    config = DRAFTERS[name]
    if config is not None and options.auto:
        config = {**config, "num_speculative_tokens": "auto"}
    return LLM(
        "demo",
        speculative_config=config,
        device="cpu",
        dtype=options.dtype,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )


def _chats(count: int) -> list[list[dict[str, str]]]:
    entries = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    return [entry["messages"] for entry in entries if "messages" in entry][:count]


def _run(
    engines: Sequence[Measured], chats: Sequence[list[dict[str, str]]], tokens: int, rounds: int
) -> None:
    """Every prompt by every engine, so many times."""
    for engine in engines:
        engine.warm_up(chats[0])
    params = SamplingParams(temperature=0, max_tokens=tokens)
    for number in range(rounds * len(chats)):
        first = number % len(engines)
        for engine in [*engines[first:], *engines[:first]]:
            engine.answer(chats[number % len(chats)], params)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = [*rows[0]]
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
