"""What suffix drafting costs on the host: microseconds per guess after texts of 8k tokens.

    python -m benchmarks.suffix_guesses [--tokens 8192] [-k 8]

Each step reads three new tokens and guesses from the request's own text and from 100k tokens of
earlier outputs. `rescan` is the baseline of the same run: prompt lookup, which reads the text anew.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import torch

import slipstream
from slipstream.kernels.reference.preparation import suffix_lookup
from slipstream.models.tokenizer import Tokenizer
from slipstream.speculative.suffix.drafter import GuessLimits, SuffixAutomaton

PACKAGE = Path(slipstream.__file__).parent
LIMITS = GuessLimits(depth=24, spec_factor=1.0, min_prob=0.1)
STEPS, GAINED = 200, 3
NUM_OUTPUTS, OUTPUT_TOKENS = 200, 500


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--tokens", type=int, default=8192)
    cli.add_argument("-k", type=int, default=8)
    options = cli.parse_args()
    chance = random.Random(0)
    code = _code_tokens()
    weights = [1 / rank for rank in range(1, 8001)]
    half = len(code) // 2
    texts: dict[str, Callable[[int], list[int]]] = {
        "code": lambda size: _cut(
            code[:half] if size == OUTPUT_TOKENS else code[half:], size, chance
        ),
        "words at random (Zipf)": lambda size: chance.choices(range(8000), weights, k=size),
        "a page that comes again": lambda size: (code[:400] * (size // 400 + 1))[:size],
        "one token": lambda size: [5] * size,
    }
    for name, make in texts.items():
        row = _measure(make, options.tokens, options.k)
        print(json.dumps({"text": name, **row}), flush=True)


def _measure(make: Callable[[int], list[int]], size: int, count: int) -> dict[str, float]:
    past = SuffixAutomaton(LIMITS)
    for _ in range(NUM_OUTPUTS):
        past.add(make(OUTPUT_TOKENS))
    text = make(size + STEPS * GAINED)
    own = SuffixAutomaton(LIMITS)
    began = perf_counter()
    own.extend(text[:size])
    reading = perf_counter() - began
    seconds, rescans, guessed = [], [], 0
    for known in range(size + GAINED, len(text) + 1, GAINED):
        began = perf_counter()
        own.extend(text[known - GAINED : known])
        context = text[known - LIMITS.depth : known]
        guess = past.guess(context, count, better_than=own.guess(context, count))
        seconds.append(perf_counter() - began)
        guessed += len(guess.token_ids)
        rescans.append(_rescan(text[:known], count))
    return {
        "prompt_ms": round(reading * 1e3, 1),
        "us_median": round(median(seconds) * 1e6, 1),
        "us_p99": round(quantiles(seconds, n=100)[-1] * 1e6, 1),
        "rescan_us_median": round(median(rescans) * 1e6, 1),
        "guessed_tokens_mean": round(guessed / STEPS, 2),
    }


def _rescan(text: list[int], count: int) -> float:
    """Seconds of one prompt lookup over the text, which lies in a tensor already."""
    table, known = torch.tensor([text], dtype=torch.int32), torch.tensor([len(text)])
    slot = torch.tensor([0])
    began = perf_counter()
    suffix_lookup(table, slot, known, count, 2, 5)
    return perf_counter() - began


def _code_tokens() -> list[int]:
    tokenizer = Tokenizer(PACKAGE / "demo" / "target")
    files = sorted(PACKAGE.rglob("*.py"))
    return list(tokenizer.encode("".join(file.read_text() for file in files)))


def _cut(tokens: list[int], size: int, chance: random.Random) -> list[int]:
    first = chance.randrange(len(tokens) - size)
    return tokens[first : first + size]


if __name__ == "__main__":
    main()
