"""Decoding on a GPU, with and without a drafter: time of a step, its parts, and the memory limit.

    python -m benchmarks.gpu_decode --target qwen3-8b --draft qwen3-0.6b \\
        --num-speculative-tokens 4 --acceptance-length 2.8 --batch-sizes 1,8,32 --with-plain
    python -m benchmarks.gpu_decode --target qwen3-8b --draft qwen3-8b:4 --load-format twin
    python -m benchmarks.gpu_decode --suite bars          # plain decoding and draft models
    python -m benchmarks.gpu_decode --suite heads         # drafting heads, parallel drafting
    python -m benchmarks.gpu_decode --suite moe --only "gpt-oss-120b plain"
    python -m benchmarks.gpu_decode --suite nvfp4         # Llama-70B in four-bit floats
    python -m benchmarks.gpu_decode --suite latent        # GLM-4.7-Flash
    python -m benchmarks.gpu_decode --suite states        # Qwen3.5: gated delta nets, MTP
    python -m benchmarks.gpu_decode --quantization int4   # Qwen3-8B in four bits
    python -m benchmarks.gpu_decode --shared-prefix 4096 [--reads-apart]

Geometries are named as in `benchmarks/geometries.py`; NAME:3 is the first 3 layers of one. Weights
are random. With `--load-format dummy` no draft would be accepted, so the verdict is drawn with the
given acceptance length; a twin's draft, its target's first layers, is judged for real. Mixtures of
experts are twins, since the text of dummies hardly moves on; their heads are random.

    AL      measured: 1 + accepted draft tokens per draft
    step    (time of LLM.generate for 288 output tokens - that for 32) / 256 * AL: greedy, distinct
            random prompts of exactly --prompt tokens, no prefix caching; median of --repeat. With
            --shared-prefix all prompts begin with as many equal tokens more, which the prefix cache
            has; --reads-apart lets attention read these for each request
    +-      half of the difference between the largest and the smallest of them
    draft, target, rest
            means per step by time stamps on the device, over the same steps
    limit   bytes of the matrices that a step reads / what the memory gives (4.35 TB/s on one H200,
            3.0 on one H100; measured);
            of targets that keep states with those, read and written, and with cached tokens
    experts distinct experts of a layer that a step's rows touched, which the limit counts: those
            that the rows of the texts choose, mean over layers and eight places
    share   limit / step
    states  MB of states that a step reads and writes
    plain   tokens/s over those of plain decoding in this run (--with-plain)

Each configuration has an engine of its own, which is gone before the next is made. With --json the
last line is one JSON document.
"""

import argparse
import json
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.decode_timing import (
    OWN_MODULES,
    Method,
    Row,
    Setup,
    limit_ms,
    measure,
    release,
)
from slipstream.models.precision import PRECISIONS
from slipstream.runner import prefix_groups


@dataclass(frozen=True)
class Bar:
    """What a configuration is to reach: per batch size our bar and a peer's time, in ms; None where
    there is none."""

    setup: Setup
    steps: dict[int, tuple[float | None, float | None]]


# The peer's times are vLLM 0.26.0's (SGLang 0.5.17 was slower), by the same formula on one H200 of
# that day. They are shown beside ours, and not divided: two cards differ by up to 4 percent.
PEER = "vLLM 0.26.0 on 2026-11-22"


def bars() -> tuple[Bar, ...]:
    """The table of the bars: plain decoding and draft models."""
    small = Setup(target="qwen3-8b", options={})
    large = Setup(target="qwen3-32b", options={})
    drafted = replace(small, draft="qwen3-0.6b", num_speculative_tokens=4, acceptance_length=2.8)
    return (
        Bar(small, {1: (3.8, 4.89), 8: (4.0, 5.16), 32: (4.5, 5.80)}),
        Bar(drafted, {1: (5.8, 19.7), 8: (7.0, 18.3), 32: (9.3, 19.5)}),
        Bar(
            replace(drafted, draft_vocab_size=32768),
            {1: (6.5, None), 8: (7.2, None), 32: (8.6, None)},
        ),
        Bar(large, {1: (15.6, 18.9), 32: (17.4, 20.8), 100: (22.5, 26.7)}),
        Bar(
            replace(large, draft="qwen3-1.7b", num_speculative_tokens=3, acceptance_length=2.79),
            {1: (19.0, 26.7), 32: (24.0, 33.3), 100: (52.0, 78.1)},
        ),
    )


def head_bars() -> tuple[Bar, ...]:
    """The table of the bars of heads and parallel drafting."""
    target = Setup(target="qwen3-8b", options={})
    eagle3 = replace(
        target, draft="qwen3-8b-eagle3", num_speculative_tokens=4, acceptance_length=2.8
    )
    p_eagle = replace(eagle3, draft="qwen3-8b-p-eagle", num_speculative_tokens=5)
    pard = replace(
        target,
        draft="qwen3-0.6b",
        mask_token=151670,
        num_speculative_tokens=8,
        acceptance_length=3.5,
    )
    return (
        Bar(eagle3, {1: (4.6, 6.83), 8: (5.2, 7.38), 32: (6.6, 9.25)}),
        Bar(p_eagle, {1: (4.4, 6.02), 8: (5.1, 6.88), 32: (7.2, 9.89)}),
        Bar(pard, {1: (4.6, 8.0), 8: (6.0, 9.0), 32: (9.8, 14.6)}),
    )


def expert_bars() -> tuple[Bar, ...]:
    """Mixtures of experts, and heads for one of them."""
    small, large, qwen = (
        Setup(target=name, load_format="twin", options={})
        for name in ("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b")
    )
    eagle3 = replace(
        large, draft="gpt-oss-120b-eagle3", num_speculative_tokens=3, acceptance_length=2.4
    )
    p_eagle = replace(eagle3, draft="gpt-oss-120b-p-eagle")
    return (
        Bar(small, {1: (1.5, 2.81), 8: (3.2, 4.85), 32: (4.2, 6.1), 128: (6.0, 9.2)}),
        Bar(large, {1: (2.1, 4.04), 8: (5.6, 8.7), 32: (11.5, None), 128: (18.0, 29.0)}),
        Bar(qwen, {1: (2.3, 3.74), 8: (7.8, None), 32: (14.0, 15.1)}),
        Bar(eagle3, {1: (3.6, None), 8: (12.5, None), 32: (19.0, None)}),
        Bar(replace(p_eagle, num_speculative_tokens=7, acceptance_length=2.7), {1: (5.6, None)}),
        Bar(p_eagle, {8: (12.5, None)}),
    )


def float4_bars() -> tuple[Bar, ...]:
    """A dense model of 70 billion parameters in NVFP4, with a draft in parallel and one by one."""
    plain = Setup(target="llama-70b-nvfp4", options={})
    drafted = replace(plain, draft="llama-3.2-1b", num_speculative_tokens=4, acceptance_length=2.8)
    pard = replace(drafted, mask_token=128011, num_speculative_tokens=8, acceptance_length=3.5)
    return (
        Bar(plain, {1: (11.5, None), 8: (None, None)}),
        Bar(pard, {1: (None, None), 8: (None, None)}),
        Bar(drafted, {1: (None, None), 8: (None, None)}),
    )


def latent_bars() -> tuple[Bar, ...]:
    """Latent attention, with experts: at batch 1 the bar is 55 percent of the limit."""
    plain = Setup(target="glm-4.7-flash", load_format="twin", options={})
    at_once = limit_ms(plain) / 0.55
    return (Bar(plain, {1: (at_once, None), 8: (None, None), 32: (None, None)}),)


def state_bars() -> tuple[Bar, ...]:
    """Gated delta nets, plain and with the MTP module; at batch 1 the bars are 75 percent of the
    limit, and 55 with experts."""
    dense = Setup(target="qwen3.5-9b", options={})
    experts = Setup(target="qwen3.5-35b-a3b", load_format="twin", options={})
    found = []
    for setup, share in ((dense, 0.75), (experts, 0.55)):
        drafted = replace(setup, draft=OWN_MODULES, num_speculative_tokens=3, acceptance_length=2.8)
        for given in (setup, drafted):
            bar = limit_ms(given) / share
            found.append(Bar(given, {1: (bar, None), 8: (None, None), 32: (None, None)}))
    return tuple(found)


SUITES = {
    "bars": bars,
    "heads": head_bars,
    "moe": expert_bars,
    "nvfp4": float4_bars,
    "latent": latent_bars,
    "states": state_bars,
}
HEADINGS = "batch  K    AL   step ms    +-   draft  target  verify    rest   limit  share  tokens/s"


def show(row: Row) -> None:
    """One line below `HEADINGS`."""
    split = "".join(f"{part:8.2f}" for part in row.split) or " " * 32
    line = (
        f"{row.batch:5d} {row.k:2d} {row.al:5.2f} {row.step:9.2f} {row.spread:5.2f}{split}"
        f"{row.limit:8.2f} {row.limit / row.step:6.0%} {row.tokens_per_s:9.0f}"
    )
    if row.experts is not None:
        line += f"  experts {row.experts:.1f}"
    if row.states:
        line += f"  states {row.states / 1e6:.1f} MB"
    if row.plain_ratio is not None:
        line += f"  plain x {row.plain_ratio:.2f}"
    if row.bar is not None:
        line += f"  bar {row.bar:5.1f} {'met ' if row.step <= row.bar else 'MISSED'}"
    if row.peer is not None:
        line += f"  peer {row.peer:5.2f}"
    print(line, flush=True)


class Report:
    """Measures one configuration after the other and prints as it goes."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.failed = False

    def add(self, setup: Setup, method: Method, finish: Callable[[Row], Row]) -> list[Row]:
        """The rows of a configuration, completed by `finish`; those before an error if it fails."""
        print(f"\n{setup.title}, prompt {method.prompt}, {setup.load_format}", flush=True)
        rows: list[Row] = []
        try:
            for row in measure(setup, method, _show_ready):
                rows.append(finish(row))
                show(rows[-1])
        except Exception:  # the other configurations are still worth their time
            traceback.print_exc()
            self.failed = True
        release()
        self.rows += rows
        return rows


def _show_ready(seconds: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux has kilobytes
    print(f"ready in {seconds:.1f} s, peak host memory {peak:.1f} GB\n{HEADINGS}", flush=True)


def run_suite(report: Report, bars: Sequence[Bar], method: Method, options: dict[str, Any]) -> None:
    """Every configuration of a suite, with its bars."""
    if any(peer is not None for bar in bars for _, peer in bar.steps.values()):
        print(f"peer: {PEER}, on another card: not a ratio of this run", flush=True)
    for bar in bars:

        def with_bar(row: Row, bar: Bar = bar) -> Row:
            ours, peer = bar.steps[row.batch]
            return replace(row, bar=ours, peer=peer)

        setup = replace(bar.setup, options=options)
        sizes = tuple(size for size in bar.steps if size in (method.batch_sizes or bar.steps))
        if sizes:
            report.add(setup, replace(method, batch_sizes=sizes), with_bar)


def run_one(report: Report, setup: Setup, method: Method, with_plain: bool) -> None:
    """One configuration, with plain decoding before it when asked."""
    plain: dict[int, float] = {}
    if with_plain and setup.draft is not None:
        rows = report.add(setup.plain, method, lambda row: row)
        plain = {row.batch: row.tokens_per_s for row in rows}

    def with_ratio(row: Row) -> Row:
        if row.batch not in plain:
            return row
        return replace(row, plain_ratio=row.tokens_per_s / plain[row.batch])

    report.add(setup, method, with_ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every configuration ran."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.suite:
        for name in _OF_ONE_SETUP:
            if getattr(given, name) is not None:
                parser.error(f"--suite has its own {name.replace('_', '-')}; leave it out")
    sizes = given.batch_sizes or (() if given.suite else (1, 8, 32))
    shared = given.shared_prefix
    method = Method(sizes, given.prompt + shared, given.short, given.long, given.repeat, shared)
    if given.reads_apart:
        prefix_groups.LEAST_SAVED = sys.maxsize
    options = dict(_engine_options(given))
    report = Report()
    if given.suite:
        bars = [bar for bar in SUITES[given.suite]() if given.only in bar.setup.title]
        if not bars:
            titles = "; ".join(bar.setup.title for bar in SUITES[given.suite]())
            parser.error(f"--only {given.only!r} is in no title of the suite: {titles}")
        run_suite(report, bars, method, options)
    else:
        run_one(report, _setup(given, options), method, given.with_plain)
    if given.json:
        print(json.dumps({"method": asdict(method), "rows": [asdict(row) for row in report.rows]}))
    return int(report.failed)


_OF_ONE_SETUP = (
    *("target", "draft", "acceptance_length", "draft_vocab_size", "quantization"),
    *("drafter_quantization", "drafter_kv_cache_dtype", "context", "num_speculative_tokens"),
)


def _setup(given: argparse.Namespace, options: dict[str, Any]) -> Setup:
    length = given.acceptance_length
    count = 4 if given.num_speculative_tokens is None else given.num_speculative_tokens
    if length is None and given.load_format == "dummy":
        length = 1 + 0.45 * count
    return Setup(
        target=given.target or "qwen3-8b",
        draft=given.draft,
        num_speculative_tokens=count if given.draft else 0,
        acceptance_length=length if given.draft else None,
        draft_vocab_size=given.draft_vocab_size,
        quantization=given.quantization,
        drafter_quantization=given.drafter_quantization,
        drafter_cache_dtype=given.drafter_kv_cache_dtype,
        dtype=given.dtype,
        load_format=given.load_format,
        context=given.context,
        options=options,
    )


def _engine_options(given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for name in ("device", "max_num_seqs", "enforce_eager", "batch_invariant", "kv_cache_dtype"):
        value = getattr(given, name)
        if value:
            yield name, value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--suite", choices=SUITES, help="all configurations that have a bar")
    cli.add_argument("--only", default="", help="of a suite, those whose title holds this text")
    cli.add_argument("--target", help="[qwen3-8b]")
    cli.add_argument("--draft", help="[none: plain decoding]")
    cli.add_argument("--num-speculative-tokens", "-k", type=int, help="[4]")
    cli.add_argument(
        "--acceptance-length", type=float, help="forced with dummy weights [1 + 0.45 K]"
    )
    cli.add_argument("--batch-sizes", type=_sizes, help="[1,8,32; of a suite all that it has]")
    cli.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    cli.add_argument("--shared-prefix", type=int, default=0, help="tokens before these")
    cli.add_argument("--reads-apart", action="store_true", help="shared tokens for each request")
    cli.add_argument("--short", type=int, default=32, help="output tokens of the short run")
    cli.add_argument("--long", type=int, default=288, help="output tokens of the long run")
    cli.add_argument("--draft-vocab-size", type=int)
    cli.add_argument("--quantization", choices=PRECISIONS)
    cli.add_argument("--drafter-quantization", choices=PRECISIONS)
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], help="of the target's cache")
    cli.add_argument("--drafter-kv-cache-dtype", choices=["fp8"], help="of the draft's cache")
    cli.add_argument("--context", type=int, help="max_model_len [what prompt and output need]")
    cli.add_argument("--load-format", choices=["dummy", "twin"], default="dummy")
    cli.add_argument("--repeat", type=int, default=3)
    cli.add_argument("--with-plain", action="store_true", help="plain decoding of the target too")
    cli.add_argument("--device", choices=["cpu", "cuda"])
    cli.add_argument("--max-num-seqs", type=int, help="[the largest batch]")
    cli.add_argument("--enforce-eager", action="store_true")
    cli.add_argument("--batch-invariant", action="store_true")
    cli.add_argument("--json", action="store_true")
    return cli


if __name__ == "__main__":
    sys.exit(main())
