"""Inter-token latency of running requests while a long prompt is read beside them.

    python -m benchmarks.long_prompts [--thresholds 0 2048 512 256] [--prompt 32768] [--json FILE]

One engine with random weights. --batch requests decode; then a request with a prompt of --prompt
tokens comes. For each `long_prefill_token_threshold` (0: none), in turns, medians over --repeat:

    alone         ms between two tokens before the prompt comes
    median, most  ms between two tokens of the running requests while it is read
    times         median / alone; the bar is 2
    first         seconds until the long prompt's first token

With --draft its tokens are accepted at random, --acceptance-length a step, and latencies are those
of steps, which bring several tokens.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.decode_timing import Method, Setup, make_engine
from benchmarks.decode_windows import Asked, num_gained, running
from slipstream import LLM, SamplingParams
from slipstream.engine.prompts import EncodedPrompt
from slipstream.engine.samples import Submission

SHORT, OUTPUT, BEFORE = 512, 4096, 64  # tokens of a running request, steps before the long prompt


@dataclass(frozen=True)
class Row:
    """One line of the table; times in ms, but for `first`."""

    threshold: int
    alone: float
    median: float
    most: float
    times: float
    first: float


def main() -> None:
    given = _parser().parse_args()
    setup = Setup(
        target=given.target,
        draft=given.draft,
        num_speculative_tokens=given.num_speculative_tokens if given.draft else 0,
        acceptance_length=given.acceptance_length if given.draft else None,
        options={"max_num_seqs": given.batch + 1, "warm_up": True},
        context=given.prompt + OUTPUT,
    )
    method = Method((given.batch,), SHORT, 1, OUTPUT, given.repeat)
    with tempfile.TemporaryDirectory() as folder:
        llm = make_engine(setup, method, Path(folder))
    generator = torch.Generator().manual_seed(0)
    found: dict[int, list[Row]] = {it: [] for it in given.thresholds}
    for turn in range(given.repeat + 1):  # the first compiles what is missing
        for threshold in given.thresholds:
            row = measured(llm, threshold, given.batch, given.prompt, generator)
            if turn:
                found[threshold].append(row)
    rows = [_median(each) for each in found.values()]
    print(f"{'threshold':>10}{'alone':>9}{'median':>9}{'most':>9}{'times':>8}{'first, s':>10}")
    for it in rows:
        print(
            f"{it.threshold:10}{it.alone:9.2f}{it.median:9.2f}{it.most:9.2f}{it.times:8.2f}"
            f"{it.first:10.3f}"
        )
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(row) for row in rows]))


def measured(llm: LLM, threshold: int, batch: int, length: int, generator: torch.Generator) -> Row:
    """One long prompt beside `batch` requests that decode."""
    scheduler = llm.engine.scheduler
    scheduler.limits = replace(scheduler.limits, prompts_beside_decoding=threshold or None)
    vocab_size = llm.engine.resolved.vocab_size

    def text(tokens: int) -> list[int]:
        return torch.randint(1, vocab_size, (tokens,), generator=generator).tolist()

    with running(llm, [Asked(prompt=text(SHORT)) for _ in range(batch)], OUTPUT) as live:
        for _ in range(BEFORE // 4):
            llm.engine.step()
        alone = _gaps(llm, live[0], steps=BEFORE)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        began = perf_counter()
        prompt = EncodedPrompt(None, text(length), ())
        long = llm.engine.add(f"long/{began}", prompt, params)
        beside = _gaps(llm, live[0], until=long)
        first = perf_counter() - began
    usual = statistics.median(alone)
    median = statistics.median(beside)
    return Row(threshold, usual, median, max(beside), median / usual, first)


def _gaps(
    llm: LLM, watched: Submission, steps: int = 0, until: Submission | None = None
) -> list[float]:
    """Milliseconds between the tokens of a request, for a number of steps or until another one has
    ended."""
    times, gained = [perf_counter()], num_gained(watched)
    while len(times) <= steps if until is None else not until.finished:
        llm.engine.step()
        if num_gained(watched) > gained:
            gained = num_gained(watched)
            times.append(perf_counter())
    return [1e3 * (later - earlier) for earlier, later in pairwise(times)]


def _median(rows: Sequence[Row]) -> Row:
    columns = zip(*(astuple(row) for row in rows), strict=True)
    threshold, *times = (statistics.median(column) for column in columns)
    return Row(int(threshold), *times)


def _parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--target", default="qwen3-8b", help="a geometry (benchmarks/geometries.py)")
    cli.add_argument("--draft", help="[none: plain decoding]")
    cli.add_argument("--num-speculative-tokens", "-k", type=int, default=4)
    cli.add_argument("--acceptance-length", type=float, default=2.8)
    cli.add_argument("--thresholds", type=int, nargs="+", default=[0, 2048, 512, 256])
    cli.add_argument("--prompt", type=int, default=32768, help="tokens")
    cli.add_argument("--batch", type=int, default=8, help="requests that decode")
    cli.add_argument("--repeat", type=int, default=3)
    cli.add_argument("--json", help="a file for the table")
    return cli


if __name__ == "__main__":
    main()
