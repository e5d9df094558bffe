"""Greedy tokens with a drafter beside those of plain decoding, and what each difference is.

    python -m benchmarks.gpu_lossless                  # all pairs, bf16, K in 1, 3, 7
    python -m benchmarks.gpu_lossless --pairs demo --cpu
    python -m benchmarks.gpu_lossless --pairs moe      # 100 requests
    python -m benchmarks.gpu_lossless --mode coupled   # seeds at temperature 1 with top-p
    python -m benchmarks.gpu_lossless --device cpu --tiny

With `--mode coupled` every request is sampled with a seed of its own, which promises the text of
plain decoding. Two texts part where the noise makes two tokens nearly equal, which their logprobs
do not tell, so differences are only counted where outputs need not be the same.

There are three pairs: the bundled demo, a dense twin, and "moe", a twin of gpt-oss with experts in
MXFP4 and prompts longer than its window, so that blocks after it are given back. All run with and
without `batch_invariant`. Prompts arrive together, so that the first step reads them all and every
later one only decodes; "staggered" requests arrive one by one while others decode. `plain` at batch
8 and 32 is compared with plain decoding at batch 1, all else with plain decoding in the same batch.

    same      a difference would be an error: `batch_invariant`, or decoding steps of at most
              64 rows, which is batch x (K + 1)
    near tie  where two outputs part, plain decoding finds the other's token among the five best,
              and its logprob at most 0.25 lower: a matter of bf16 rounding in the layers

Behind its first difference an output is another text, so each request counts once. Then comes AL of
the demo pair (prompts and lengths as in `demo_acceptance.py`), with --cpu on the CPU as well.

The exit code is 1 when outputs differ that have to be the same, or by more than a near tie. What
has to be the same is a GPU's promise: on a CPU, whose matmuls depend on their rows, use float32.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_timing import release
from benchmarks.demo_acceptance import HELD_OUT, WHOLE_DRAFTS
from benchmarks.geometries import geometry_named, write_config
from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.engine.prompts import EncodedPrompt
from slipstream.models.checkpoint import resolve_checkpoint
from slipstream.models.tokenizer import Tokenizer

NEAR_TIE, CANDIDATES = 0.25, 5
DECODE_ROWS = 64  # of a step without prompts, whose rows do not depend on each other
MOST_PROMPT = 128  # tokens of a prompt, so that one step reads all prompts
BEYOND_WINDOW = 130  # tokens of the shortest prompt of a mixture, whose window is 128
BLOCK_SIZE = 16
STAGGERED_BATCH, STAGGERED_STEPS = 8, 3  # requests, and the steps between their arrivals

Prompts = list[list[int]]


@dataclass(frozen=True)
class Pair:
    """A target, its drafter, and what they read."""

    name: str
    target: str
    draft: str
    prompts: Prompts
    length: int  # output tokens of each request
    options: dict[str, Any]


@dataclass(frozen=True)
class Expected:
    """The output of plain decoding: tokens, and the best candidates' logprobs at each."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]


@dataclass(frozen=True)
class Difference:
    """The first difference from plain decoding; the gap is None if the token is no candidate."""

    request: int
    place: int
    plain: int
    other: int
    gap: float | None

    @property
    def is_near_tie(self) -> bool:
        return self.gap is not None and self.gap <= NEAR_TIE


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    pair: str
    invariant: bool
    k: int
    batch: int
    staggered: bool
    num_requests: int
    al: float
    must_be_same: bool
    is_sampled: bool = False
    differences: tuple[Difference, ...]

    @property
    def failed(self) -> bool:
        if self.must_be_same or self.is_sampled:
            return self.must_be_same and bool(self.differences)
        return not all(difference.is_near_tie for difference in self.differences)


HEADINGS = "pair    invariant  K  batch  requests  equal  near ties  other    AL"


def show(row: Row) -> None:
    """A line below `HEADINGS`, and one for each difference."""
    ties = sum(difference.is_near_tie for difference in row.differences)
    batch = f"{row.batch}{'s' if row.staggered else ' '}"
    verdict = "FAILED" if row.failed else "ok, same" if row.must_be_same else "ok"
    print(
        f"{row.pair:7s} {'yes' if row.invariant else 'no':>9s} {row.k:2d} {batch:>6s}"
        f"{row.num_requests:10d}{row.num_requests - len(row.differences):7d}{ties:11d}"
        f"{len(row.differences) - ties:7d}{row.al:6.2f}  {verdict}",
        flush=True,
    )
    for it in row.differences:
        gap = f"not among the {CANDIDATES} best" if it.gap is None else f"gap {it.gap:.4f}"
        print(
            f"        request {it.request} parts at token {it.place}: plain {it.plain}, "
            f"here {it.other}, {gap}",
            flush=True,
        )


class Comparison:
    """Runs one pair, with or without `batch_invariant`.

    Args:
        batch_sizes: rising.
        options: of every engine.
        sampled: requests have seeds, and are coupled.
    """

    def __init__(
        self,
        pair: Pair,
        invariant: bool,
        batch_sizes: Sequence[int],
        options: dict[str, Any],
        sampled: bool,
    ) -> None:
        self._pair, self._invariant, self._sampled = pair, invariant, sampled
        self._batch_sizes, self._options = batch_sizes, options
        self._expected: dict[int, list[Expected]] = {}

    def rows(self, depths: Sequence[int]) -> Iterator[Row]:
        """Plain decoding first, which all else is compared with."""
        yield from self._plain()
        for k in depths:
            yield from self._drafted(k)

    def _plain(self) -> Iterator[Row]:
        llm = self._engine(0)
        for batch in self._batch_sizes:
            outputs = self._together(llm, batch, logprobs=CANDIDATES)
            self._expected[batch] = [_expected(output) for output in outputs]
            if batch != self._batch_sizes[0]:
                yield self._row(0, batch, outputs, compared_with=self._batch_sizes[0])
        yield self._staggered_row(llm, 0)
        del llm
        release()

    def _drafted(self, k: int) -> Iterator[Row]:
        llm = self._engine(k)
        for batch in self._batch_sizes:
            outputs = self._together(llm, batch)
            yield self._row(k, batch, outputs, compared_with=batch)
        yield self._staggered_row(llm, k)
        del llm
        release()

    def _staggered_row(self, llm: LLM, k: int) -> Row:
        batch = min(STAGGERED_BATCH, self._batch_sizes[-1])
        outputs = _staggered(llm, self._pair.prompts[:batch], self._params(range(batch)))
        return self._row(k, batch, outputs, compared_with=self._batch_sizes[-1], staggered=True)

    def _row(
        self,
        k: int,
        batch: int,
        outputs: Sequence[RequestOutput],
        compared_with: int,
        staggered: bool = False,
    ) -> Row:
        alike = batch == compared_with and not staggered and batch * (k + 1) <= DECODE_ROWS
        # At batch 1 there may be fewer, the first ones.
        expected = self._expected[compared_with][: len(outputs)]
        compared = outputs[: len(expected)]
        return Row(
            pair=self._pair.name,
            invariant=self._invariant,
            k=k,
            batch=batch,
            staggered=staggered,
            num_requests=len(compared),
            al=_acceptance_length(outputs),
            must_be_same=self._invariant or alike,
            is_sampled=self._sampled,
            differences=tuple(differences(expected, compared)),
        )

    def _together(self, llm: LLM, batch: int, logprobs: int | None = None) -> list[RequestOutput]:
        """Run this number of requests at a time; of single requests only a few."""
        prompts = self._pair.prompts
        most = len(prompts) if batch > 1 else min(8, len(prompts))
        outputs: list[RequestOutput] = []
        for first in range(0, most, batch):
            group = [{"prompt_token_ids": ids} for ids in prompts[first : first + batch]]
            params = self._params(range(first, first + len(group)), logprobs)
            outputs += llm.generate(group, params)  # type: ignore[arg-type]
        return outputs

    def _params(self, requests: range, logprobs: int | None = None) -> list[SamplingParams]:
        how: dict[str, Any] = {"temperature": 0}
        if self._sampled:
            how = {"temperature": 1, "top_p": 0.95}
        how |= {"max_tokens": self._pair.length, "ignore_eos": True, "logprobs": logprobs}
        seeds = requests if self._sampled else [None] * len(requests)
        return [SamplingParams(seed=seed, **how) for seed in seeds]

    def _engine(self, k: int) -> LLM:
        longest = max(map(len, self._pair.prompts)) + self._pair.length + 16
        requests = self._batch_sizes[-1]
        speculation = {"model": self._pair.draft, "num_speculative_tokens": k} if k else None
        return LLM(
            self._pair.target,
            speculative_config=speculation,
            batch_invariant=self._invariant,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            max_num_seqs=requests,
            max_model_len=longest,
            max_num_batched_tokens=8192,
            block_size=BLOCK_SIZE,
            num_kv_blocks=requests * -(-longest // BLOCK_SIZE) + requests,
            **self._pair.options,
            **self._options,
        )


def _staggered(llm: LLM, prompts: Prompts, params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """Requests that arrive while others decode."""
    finished: dict[str, RequestOutput] = {}
    step = 0
    while llm.engine.has_unfinished or step <= STAGGERED_STEPS * (len(prompts) - 1):
        index, between = divmod(step, STAGGERED_STEPS)
        if not between and index < len(prompts):
            llm.engine.add(
                f"staggered-{index}", EncodedPrompt(None, prompts[index], ()), params[index]
            )
        for submission in llm.engine.step():
            if submission.finished:
                finished[submission.request_id] = submission.output()
        step += 1
    return [finished[f"staggered-{index}"] for index in range(len(prompts))]


def _expected(output: RequestOutput) -> Expected:
    sample = output.outputs[0]
    assert sample.logprobs is not None
    rows = [{token: it.logprob for token, it in row.items()} for row in sample.logprobs]
    return Expected(list(sample.token_ids), rows)


def differences(
    expected: Sequence[Expected], outputs: Sequence[RequestOutput]
) -> Iterator[Difference]:
    """The first place at which each output parts from the expected one."""
    for request, (plain, output) in enumerate(zip(expected, outputs, strict=True)):
        ours = output.outputs[0].token_ids
        assert len(ours) == len(plain.token_ids)
        for place, (theirs, token) in enumerate(zip(plain.token_ids, ours, strict=True)):
            if theirs != token:
                row = plain.logprobs[place]
                gap = row[theirs] - row[token] if token in row else None
                yield Difference(request, place, theirs, token, gap)
                break


def _acceptance_length(outputs: Sequence[RequestOutput]) -> float:
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    return 1.0 + accepted / max(1, sum(output.metrics.num_drafts for output in outputs))


def demo_pair(number: int, length: int) -> Pair:
    """The bundled models on text that neither saw."""
    tokenizer = Tokenizer(resolve_checkpoint("demo"))
    entries = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    texts = [entry["prompt"] for entry in entries if "prompt" in entry][:number]
    prompts = [list(tokenizer.encode(text))[:MOST_PROMPT] for text in texts]
    return Pair("demo", "demo", "demo/draft", prompts, length, {})


def twin_pair(
    name: str, target: str, draft: str, prompts: Iterator[int], length: int, folder: Path
) -> Pair:
    """Random weights whose first layers are the drafter, on random prompts of such lengths."""
    generator = torch.Generator().manual_seed(0)
    most = geometry_named(target)["vocab_size"]
    ids = [torch.randint(1, most, (size,), generator=generator).tolist() for size in prompts]
    ours = str(write_config(folder / name / "target", target))
    drafts = str(write_config(folder / name / "draft", draft))
    return Pair(name, ours, drafts, ids, length, {"load_format": "twin"})


def prompt_lengths(number: int, least: int) -> Iterator[int]:
    """Lengths from `least` on, at most 111 tokens more."""
    return (least + index * 37 % (MOST_PROMPT - 16) for index in range(number))


def demo_acceptance(device: str, dtype: str, prompts: int, k: int = 4) -> float:
    """AL of the demo pair over held-out prompts, greedy, at batch 8."""
    llm = LLM(
        "demo",
        speculative_config={"model": "demo/draft", "num_speculative_tokens": k},
        dtype=dtype,
        device=device,
        max_num_seqs=8,
        enable_prefix_caching=False,
        num_kv_blocks=8 * 2048 // BLOCK_SIZE,
    )
    entries = [json.loads(line) for line in HELD_OUT.read_text().splitlines()][:prompts]
    params = SamplingParams(temperature=0, max_tokens=1 + WHOLE_DRAFTS * (k + 1))
    outputs = llm.generate([entry["prompt"] for entry in entries if "prompt" in entry], params)
    chats = [entry["messages"] for entry in entries if "messages" in entry]
    outputs += llm.chat(chats, params) if chats else []
    del llm
    release()
    return _acceptance_length(outputs)


def compare_acceptance(given: argparse.Namespace) -> None:
    """Print AL of the demo pair by dtype, and how far it is from that on the CPU."""
    for dtype in given.al_dtypes.split(","):
        here = demo_acceptance(given.device, dtype, given.al_prompts)
        line = f"AL of the demo pair, K=4, {given.al_prompts} prompts, {dtype}: {here:.3f}"
        if given.cpu:
            there = demo_acceptance("cpu", dtype, given.al_prompts)
            line += f"; on the CPU {there:.3f}, {here / there - 1:+.2%} apart"
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing differs that must not."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = _parser(tiny="--tiny" in words).parse_args(words)
    options: dict[str, Any] = {"dtype": given.dtype, "device": given.device}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in _pairs(given, Path(folder)):
            print(f"{len(pair.prompts)} prompts, {pair.length} tokens each, {given.dtype}")
            print(HEADINGS, flush=True)
            for invariant in (True, False):
                sampled = given.mode == "coupled"
                run = Comparison(pair, invariant, given.batch_sizes, options, sampled)
                for row in run.rows(given.depths):
                    show(row)
                    rows.append(row)
    failed = sum(row.failed for row in rows)
    ties = sum(it.is_near_tie for row in rows for it in row.differences)
    others = sum(len(row.differences) for row in rows) - ties
    print(f"{len(rows)} runs, {failed} failed; differences: {ties} near ties, {others} others")
    if given.al_prompts and "demo" in given.pairs.split(","):
        compare_acceptance(given)
    return int(failed > 0)


def _pairs(given: argparse.Namespace, folder: Path) -> Iterator[Pair]:
    for name in given.pairs.split(","):
        if name == "demo":
            yield demo_pair(given.prompts, given.length)
        elif name == "twin":
            sizes = prompt_lengths(given.prompts, 16)
            yield twin_pair(name, given.target, given.draft, sizes, given.length, folder)
        elif name == "moe":
            sizes = prompt_lengths(given.moe_prompts, BEYOND_WINDOW)
            yield twin_pair(
                name, given.moe_target, given.moe_draft, sizes, given.moe_length, folder
            )
        else:
            raise SystemExit(f"there is no pair {name!r}; there are demo, twin and moe")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _parser(tiny: bool) -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--pairs", default="demo,twin,moe")
    cli.add_argument("--mode", choices=["greedy", "coupled"], default="greedy")
    cli.add_argument("--target", default="qwen3-0.6b:8", help="of the twin")
    cli.add_argument("--draft", default="qwen3-0.6b:2", help="of the twin")
    cli.add_argument("--moe-target", default="gpt-oss-20b:6")
    cli.add_argument("--moe-draft", default="gpt-oss-20b:1")
    cli.add_argument("--moe-prompts", type=int, default=100)
    cli.add_argument("--moe-length", type=int, default=64, help="output tokens of each")
    cli.add_argument("--depths", "-k", type=_sizes, default=(1, 3, 7), help="K")
    cli.add_argument("--batch-sizes", type=_sizes, default=(1, 8, 32), help="rising")
    cli.add_argument("--prompts", type=int, default=32)
    cli.add_argument("--length", type=int, default=128, help="output tokens of each")
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    cli.add_argument("--al-prompts", type=int, default=80, help="for AL; 0 leaves it out")
    cli.add_argument("--al-dtypes", default="bfloat16")
    cli.add_argument("--cpu", action="store_true", help="AL on the CPU too")
    cli.add_argument("--tiny", action="store_true", help="sizes for a smoke test, in float32")
    if tiny:
        cli.set_defaults(target="tiny", draft="tiny:1", batch_sizes=(1, 2), prompts=4, length=16)
        cli.set_defaults(moe_target="tiny-moe", moe_draft="tiny-moe:1", moe_prompts=4)
        cli.set_defaults(moe_length=8, dtype="float32", al_prompts=2, al_dtypes="float32")
    return cli


if __name__ == "__main__":
    sys.exit(main())
