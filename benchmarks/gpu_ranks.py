"""Several GPUs: how they are linked, what ranks exchange in which time, what they say, and steps.

    python -m benchmarks.gpu_ranks                         # on two GPUs, all of it
    python -m benchmarks.gpu_ranks --ranks 4
    python -m benchmarks.gpu_ranks --only links exchanges  # of the five parts
    python -m benchmarks.gpu_ranks --device cpu --tiny     # by gloo; its times mean nothing

    links      whether each GPU reaches the memory of each other one, and what the driver says of
               their links
    exchanges  what a sum over the ranks takes in a CUDA graph, and whether its bits are right
               (`rank_exchanges.py` does that alone)
    texts      greedy and seeded texts of the bundled demo, with drafters that every rank has whole
               and that ranks share, beside those of one GPU: in float32 they have to be the same.
               Where ranks cannot share the demo's six heads, greedy ones of random weights
               (Qwen3-0.6B's first layers)
    experts    texts of a mixture with random weights (Qwen3-30B-A3B's first layers), whose experts
               ranks with requests of their own share (--enable-expert-parallel), beside those of
               one GPU: of more requests, of one, and with one that ends first
    losses     a rank killed in the middle of a call: how soon the call ends with an error
    steps      of large models with random weights, as `gpu_decode.py` measures them, beside their
               bars; the limit is that of all GPUs together. Behind it stands what the sums of a
               step take by the figures above

The exit code is 1 where texts differ in float32 or a part fails. `benchmarks/rank_kills.py` kills
ranks.
"""

import argparse
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from time import perf_counter
from typing import Any

import torch

from benchmarks.decode_timing import Method, Row, Setup, measure, release
from benchmarks.geometries import geometry_named, write_config
from benchmarks.gpu_decode import HEADINGS, show
from benchmarks.rank_exchanges import OURS, REPLAYS, ROWS, SHARES, WIDTH, Case, Times, exchanges
from benchmarks.rank_exchanges import show as show_times
from benchmarks.rank_kills import followers_of
from slipstream import LLM, SamplingParams
from slipstream.core.errors import RanksLostError

PARTS = ("links", "exchanges", "texts", "experts", "losses", "steps")
LOSS_SECONDS, EXCHANGE_SECONDS = 10.0, 100.0
LENGTH = 48  # output tokens of a text
DEMO_HEADS = 6
PROMPTS = ("def main(", "import os\n", "class Tree:\n    def ", "for it in range(", "# The first ")


# ------------------------------------------------------------------ links


def links(ranks: int) -> None:
    """Print what reaches what."""
    for one in range(ranks):
        reached = [str(it) for it in range(ranks) if _reaches(one, it)]
        print(f"GPU {one}, {torch.cuda.get_device_name(one)}: reaches {', '.join(reached) or '-'}")
    try:
        told = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
        print(told.stdout)
    except OSError as error:
        print(f"nvidia-smi: {error}")


def _reaches(one: int, other: int) -> bool:
    return one != other and torch.cuda.can_device_access_peer(one, other)


# ------------------------------------------------------------------ texts


def texts(ranks: int, kind: str) -> bool:
    """Whether several ranks give the texts of one, where they have to."""
    if DEMO_HEADS % ranks:
        return _dense_texts(ranks, kind)
    drafters: list[dict[str, Any] | None] = [
        None,
        {"model": "demo/draft"},
        {"model": "demo/draft", "draft_tensor_parallel_size": ranks},
        {"model": "demo/eagle3"},
        {"model": "demo/pard", "draft_tensor_parallel_size": ranks},
    ]
    good = True
    for dtype in ("float32", "bfloat16"):
        expected = _texts(1, kind, dtype, None)
        for drafter in drafters:
            found = _texts(ranks, kind, dtype, drafter)
            parted = sum(one != other for one, other in zip(expected, found, strict=True))
            print(f"{dtype}, {drafter or 'plain'}: {parted} of {len(found)} texts part", flush=True)
            good &= not parted or dtype != "float32"
    return good


def _dense_texts(ranks: int, kind: str) -> bool:
    with TemporaryDirectory() as folder:
        sizes = {"num_hidden_layers": 4}
        target = str(write_config(Path(folder) / "target", "qwen3-0.6b", **sizes))
        sizes["num_hidden_layers"] = 1
        draft = str(write_config(Path(folder) / "draft", "qwen3-0.6b", **sizes))
        drafters: list[dict[str, Any] | None] = [
            None,
            {"model": draft},
            {"model": draft, "draft_tensor_parallel_size": ranks},
            {"method": "ngram"},
        ]
        return _compared(target, kind, drafters, {"tensor_parallel_size": ranks})


def _texts(ranks: int, kind: str, dtype: str, drafter: dict[str, Any] | None) -> list[list[int]]:
    """Greedy ones, then seeded ones."""
    llm = LLM(
        "demo",
        speculative_config=drafter and {"num_speculative_tokens": 4, **drafter},
        tensor_parallel_size=ranks,
        rank_check_interval=8,
        dtype=dtype,
        device=kind,
        max_num_seqs=8,
        max_model_len=256,
    )
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    seeded = [
        SamplingParams(seed=seed, max_tokens=LENGTH, ignore_eos=True, top_p=0.9)
        for seed in range(len(PROMPTS))
    ]
    outputs = llm.generate(list(PROMPTS), greedy) + llm.generate(list(PROMPTS), seeded)
    del llm
    release()
    return [list(output.outputs[0].token_ids) for output in outputs]


def experts(ranks: int, kind: str, tiny: bool) -> bool:
    """Whether ranks that share only experts give the texts of one, where they have to."""
    sizes = {"num_hidden_layers": 4}
    if tiny:
        sizes |= {"hidden_size": 64, "num_experts": 16, "moe_intermediate_size": 48}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    with TemporaryDirectory() as folder:
        target = str(write_config(Path(folder) / "target", "qwen3-30b-a3b", **sizes))
        sizes["num_hidden_layers"] = 1
        draft = str(write_config(Path(folder) / "draft", "qwen3-30b-a3b", **sizes))
        drafters: list[dict[str, Any] | None] = [None, {"model": draft}, {"method": "ngram"}]
        shared = {"data_parallel_size": ranks, "enable_expert_parallel": True}
        return _compared(target, kind, drafters, shared)


def _compared(
    target: str, kind: str, drafters: Sequence[dict[str, Any] | None], shared: dict[str, Any]
) -> bool:
    """Whether texts of random weights are one GPU's, wherever they have to be."""
    good = True
    for dtype in ("float32", "bfloat16"):
        expected = _random_texts(target, kind, dtype, None, {})
        for drafter in drafters:
            found = _random_texts(target, kind, dtype, drafter, shared)
            parted = sum(one != other for one, other in zip(expected, found, strict=True))
            print(f"{dtype}, {drafter or 'plain'}: {parted} of {len(found)} texts part", flush=True)
            good &= not parted or dtype != "float32"
    return good


def _random_texts(
    target: str, kind: str, dtype: str, drafter: dict[str, Any] | None, shared: dict[str, Any]
) -> list[list[int]]:
    """Greedy ones of several lengths, and one alone."""
    llm = LLM(
        target,
        speculative_config=drafter and {"num_speculative_tokens": 4, **drafter},
        load_format="twin",
        dtype=dtype,
        device=kind,
        max_num_seqs=8,
        max_model_len=256,
        skip_tokenizer_init=True,
        **shared,
    )
    params = [
        SamplingParams(temperature=0, max_tokens=LENGTH // (1 + at % 3), ignore_eos=True)
        for at in range(7)
    ]
    prompts: list[Any] = [
        {"prompt_token_ids": [*range(at + 3, 50 + 9 * at)]} for at in range(len(params))
    ]
    outputs = llm.generate(prompts, params) + llm.generate(prompts[:1], params[0])
    del llm
    release()
    return [list(output.outputs[0].token_ids) for output in outputs]


# ------------------------------------------------------------------ losses


def losses(ranks: int, kind: str, trials: int = 3) -> bool:
    """Whether calls end with an error within `LOSS_SECONDS` when a follower is killed."""
    return all([_loss(ranks, kind) for _ in range(trials)])


def _loss(ranks: int, kind: str) -> bool:
    llm = LLM(
        "demo", tensor_parallel_size=ranks, device=kind, max_num_seqs=8, gpu_memory_utilization=0.1
    )
    struck: list[float] = []

    def strike() -> None:
        struck.append(perf_counter())
        os.kill(followers_of(os.getpid())[0], signal.SIGKILL)

    timer = Timer(0.7, strike)
    timer.start()
    words = "nothing was told"
    try:
        while len(struck) == 0 or perf_counter() - struck[0] < LOSS_SECONDS:
            llm.generate(list(PROMPTS), SamplingParams(max_tokens=1900, ignore_eos=True))
    except RanksLostError as error:
        words = str(error)
    seconds = perf_counter() - struck[0]
    print(f"killed a rank; {seconds:.1f} s later: {words}", flush=True)
    del llm
    release()
    return seconds < LOSS_SECONDS


# ------------------------------------------------------------------ steps


@dataclass(frozen=True)
class Bar:
    """A configuration, and the ms of its steps that are wanted, by ranks and then batch size."""

    setup: Setup
    steps: dict[int, dict[int, float]]


_LARGE = Setup(target="qwen3-32b", options={})
_DRAFTED = replace(_LARGE, draft="qwen3-1.7b", num_speculative_tokens=3, acceptance_length=2.79)
_OF_DRAFTED = {2: {1: 12.3, 32: 17.5, 100: 40.0}, 4: {1: 8.6, 32: 12.5, 100: 27.0}}
BARS = (
    Bar(_LARGE, {2: {1: 8.9, 32: 10.4, 100: 14.5}, 4: {1: 5.3, 32: 6.4, 100: 9.0}}),
    Bar(_DRAFTED, _OF_DRAFTED),
    Bar(replace(_DRAFTED, draft_is_shared=True), _OF_DRAFTED),
    Bar(
        Setup(target="gpt-oss-120b", load_format="twin", options={}),
        {2: {1: 1.6, 32: 6.9, 128: 11.0}, 4: {1: 1.4, 32: 4.6, 128: 7.0}},
    ),
)
_TINY = Setup(target="tiny", draft="tiny:2", num_speculative_tokens=2, options={})
TINY = tuple(
    Bar(replace(_TINY, acceptance_length=2.0, draft_is_shared=shared), {2: {1: 1e9}})
    for shared in (False, True)
)


def steps(bars: Sequence[Bar], ranks: int, kind: str, method: Method, times: Times) -> None:
    """Print every step and its bar."""
    for bar in bars:
        wanted = bar.steps.get(ranks, {1: 0.0, 32: 0.0})
        options = {"tensor_parallel_size": ranks, "device": kind}
        setup = replace(bar.setup, options=options)
        shared = ", draft shared" if setup.draft_is_shared else ""
        print(f"\n{setup.title}{shared}, {ranks} ranks\n{HEADINGS}", flush=True)
        for row in measure(setup, replace(method, batch_sizes=tuple(wanted)), lambda seconds: None):
            show(replace(row, limit=row.limit / ranks, bar=wanted[row.batch] or None))
            for line in _of_exchanges(setup, row, times):
                print(line, flush=True)
        release()


def _of_exchanges(setup: Setup, row: Row, times: Times) -> Iterator[str]:
    """The time of the target's sums: two per layer, and the embedding's."""
    rows = row.batch * (row.k + 1)
    found = [times[it] for it in (OURS, SHARES, "ours, 2 kernels") if it in times]
    found = found or [times[it] for it in ("gather + norm",) if it in times]
    measured = min((it for of in found for it in of if it >= rows), default=None)
    if measured is not None:
        count = 2 * geometry_named(setup.target)["num_hidden_layers"] + 1
        ms = count * min(of[measured] for of in found if measured in of) / 1e3
        yield f"      {count} sums and norms of at most {measured} rows: about {ms:.2f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all went well."""
    given = _parser().parse_args(arguments)
    kind, ranks = given.device, given.ranks
    if kind == "cuda" and torch.cuda.device_count() < ranks:
        print(f"{ranks} ranks need as many GPUs, and torch sees {torch.cuda.device_count()}")
        return 1
    method = Method((), 16, 4, 8, 1) if given.tiny else Method((), 512, 32, 288, 3)
    good, times = True, Times()
    for part in given.only:
        print(f"\n== {part}", flush=True)
        try:
            if part == "links" and kind == "cuda":
                links(ranks)
            elif part == "exchanges":
                width, rows = (64, (1, 8)) if given.tiny else (WIDTH, ROWS)
                times = exchanges(Case(ranks, kind, width, rows, REPLAYS), EXCHANGE_SECONDS)
                show_times(times)
            elif part == "texts":
                good &= texts(ranks, kind)
            elif part == "experts":
                good &= experts(ranks, kind, given.tiny)
            elif part == "losses":
                good &= losses(ranks, kind)
            elif part == "steps":
                steps(TINY if given.tiny else BARS, ranks, kind, method, times)
        except Exception:  # the other parts are still worth their time
            traceback.print_exc()
            good = False
    return int(not good)


def _parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--ranks", type=int, default=2)
    cli.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    cli.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    cli.add_argument("--tiny", action="store_true", help="tiny models, to see that all runs")
    return cli


if __name__ == "__main__":
    sys.exit(main())
