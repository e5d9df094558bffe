"""Sampling and verification on a GPU: microseconds per call inside a CUDA graph.

    PYTHONPATH=. python3 -m benchmarks.gpu_sampling [--sweep] [--quick]

What stands after the head's logits of 151,936 tokens: `verify` and `commit` of a batch with K
draft tokens, and `sample_draft`. Four batches take turns; a number is the median time of a graph
over its calls. `fused` are the Triton kernels, `torch` is the plain column that defines them,
captured likewise; `limit` is one read of all logits (and, of drafts, one write) at 4.35 TB/s.

    greedy   temperature 0
    sampled  temperature 1, probabilities of the draft kept
    top_k    sampled, top_k 20, top_p 0.95
    top_p    sampled, top_p 0.95, a peaked distribution, as a trained model's
    flat     sampled, top_p 0.95, normal logits: the worst for the search
    reduced  sampled, drafts over 32,768 tokens
    full     as top_k, with presence and repetition penalties

`--sweep` times the fused column with other tiles instead. The last line is one JSON document.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.graph_timing import bytes_per_us
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams, Verification
from slipstream.kernels.reference import SAMPLING as REFERENCE
from slipstream.kernels.sampling import SampleRows
from slipstream.kernels.triton import sampling as fused
from slipstream.sampling import verification
from slipstream.sampling.state import SamplingState, Uses

VOCAB_SIZE = 151936
SETS = 4
DEVICE = torch.device("cuda")
TRUNCATED = {"top_k": 20, "top_p": 0.95}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "top_k": TRUNCATED,
    "top_p": {"top_p": 0.95},
    "flat": {"top_p": 0.95},
    "reduced": {"temperature": 1.0},
    "full": TRUNCATED | {"presence_penalty": 0.5, "repetition_penalty": 1.1},
}

Run = Callable[[int], object]
Work = tuple[SamplingState, Run]


@dataclass(frozen=True)
class Case:
    """One kind of batch."""

    kind: str
    requests: int
    drafts: int
    block: bool = False

    def __str__(self) -> str:
        return f"{'block' if self.block else self.kind:8} R={self.requests:3} K={self.drafts}"


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--sweep", action="store_true")
    cli.add_argument("--quick", action="store_true", help="batches of 1 and 32 only")
    options = cli.parse_args()
    torch.manual_seed(0)
    rows = list(_sweep() if options.sweep else _table(options.quick))
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}))


def _table(quick: bool) -> Iterator[dict[str, Any]]:
    print(f"{'':22}{'fused':>9}{'torch':>9}{'limit':>9} us")
    for requests in (1, 32) if quick else (1, 8, 32, 100):
        for kind in PARAMS:
            of_kind = [Case(kind, requests, 0), Case(kind, requests, 4)]
            if kind == "sampled":
                of_kind.append(Case(kind, requests, 4, block=True))
            for case in of_kind:
                drafts = case.drafts
                limit = requests * (drafts + 1) * VOCAB_SIZE * 4 / bytes_per_us()
                yield _measured(f"verify {case}", _verify(case), limit)
            if kind not in ("full", "reduced"):  # drafts have no processors
                case = Case(kind, requests, 1)
                written = 1 if kind == "greedy" else 2
                limit = requests * VOCAB_SIZE * 4 * written / bytes_per_us()
                yield _measured(f"draft  {case}", _draft(case), limit)


def _measured(name: str, work: Work, limit: float) -> dict[str, Any]:
    state, run = work
    ours = graph_us(run, 20)
    state.ops = REFERENCE
    plain = graph_us(run, 2)
    print(f"{name:22}{ours:9.1f}{plain:9.1f}{limit:9.1f}", flush=True)
    return {"case": name, "fused": round(ours, 2), "torch": round(plain, 1), "limit": limit}


def _sweep() -> Iterator[dict[str, Any]]:
    cases = [Case("greedy", 32, 4), Case("sampled", 1, 4), Case("sampled", 32, 4)]
    cases += [Case("top_k", 1, 4), Case("top_k", 32, 4), Case("top_p", 1, 4), Case("top_p", 32, 4)]
    cases += [Case("flat", 1, 0), Case("flat", 32, 4)]
    runs = [_verify(case)[1] for case in cases]
    names = [f"{case.kind[:6]}/{case.requests}/{case.drafts}" for case in cases]
    print(f"{'tiles':24}" + "".join(f"{name:>12}" for name in names))
    for tiles in (
        fused.SamplingTiles(2048, 64, 64, 4, 4, 8),
        fused.SamplingTiles(2048, 64, 64, 4, 8, 16),
        fused.SamplingTiles(2048, 128, 32, 4, 4, 8),
        fused.SamplingTiles(2048, 128, 64, 4, 4, 16),
        fused.SamplingTiles(2048, 32, 64, 4, 4, 8),
        fused.SamplingTiles(2048, 64, 32, 4, 4, 4),
        fused.SamplingTiles(1024, 64, 64, 2, 2, 8),
        fused.SamplingTiles(4096, 64, 128, 4, 8, 16),
        fused.SamplingTiles(4096, 64, 64, 8, 4, 8),
    ):
        fused.TILES = tiles
        times = [graph_us(run, 10) for run in runs]
        name = "/".join(map(str, astuple(tiles)))
        print(f"{name:24}" + "".join(f"{time:12.1f}" for time in times), flush=True)
        yield {"tiles": name, **dict(zip(names, times, strict=True))}


def _state(case: Case) -> SamplingState:
    state = SamplingState(case.requests, VOCAB_SIZE, DEVICE)
    for slot in range(case.requests):
        params = SamplingParams(**PARAMS[case.kind])
        request = Request("", list(range(512)), params, slot, frozenset({1}), 9, 4, 0)
        request.token_ids.extend(range(300))
        state.admit({slot: request})
    return state


def _logits(case: Case, rows: int) -> Tensor:
    logits = torch.randn(rows, VOCAB_SIZE, device=DEVICE)
    if case.kind != "flat":  # a hundred tokens hold nearly all of the probability
        peaks = torch.randint(VOCAB_SIZE, (rows, 100), device=DEVICE)
        logits.scatter_add_(1, peaks, torch.rand(rows, 100, device=DEVICE) * 12 + 6)
    return logits


def _verify(case: Case) -> Work:
    state, num = _state(case), case.requests
    if case.block:
        for slot in range(num):
            request = state.request(slot)
            request.verification = Verification.BLOCK
            state.admit({slot: request})
    uses = state.uses(range(num))
    batches = []
    slots = torch.arange(num, device=DEVICE)
    vocabulary = None
    if case.kind == "reduced":
        vocabulary = torch.randperm(VOCAB_SIZE, device=DEVICE)[:32768].sort().values
    for _ in range(SETS if num < 100 else 2):
        logits = _logits(case, num * (case.drafts + 1))
        drafts = logits.view(num, case.drafts + 1, VOCAB_SIZE)[:, : case.drafts].argmax(-1)
        probs = None
        if Uses.SAMPLING in uses and case.drafts:
            judged = logits.view(num, case.drafts + 1, VOCAB_SIZE)[:, : case.drafts]
            if vocabulary is not None:
                judged = judged[..., vocabulary]
                drafts = vocabulary[judged.argmax(-1)]
            probs = (judged * 1.3).softmax(-1)  # too sure of itself: some are refused
        lengths = torch.full_like(slots, case.drafts)
        rows = SampleRows.build(slots, slots + 512, drafts, lengths, slots < 0, probs, vocabulary)
        batches.append((logits, rows))

    def run(number: int) -> None:
        logits, rows = batches[number % len(batches)]
        verdict = verification.verify(logits, rows, state, uses)
        state.commit(slots, verdict.token_ids, verdict.num_tokens, uses)

    return state, run


def _draft(case: Case) -> Work:
    state = _state(case)
    uses = state.uses(range(case.requests))
    slots = torch.arange(case.requests, device=DEVICE)
    logits = [_logits(case, case.requests) for _ in range(SETS)]
    probs = torch.empty(case.requests, 4, VOCAB_SIZE, device=DEVICE)

    def run(number: int) -> Tensor:
        return verification.sample_draft(
            logits[number % SETS],
            slots,
            slots + 512,
            state,
            uses,
            VOCAB_SIZE,
            probs_out=probs[:, number % 4] if Uses.SAMPLING in uses else None,
        )

    return state, run


def graph_us(run: Run, calls: int) -> float:
    """Median time of a call, of `calls` in a graph."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            run(number)
    times: list[float] = []
    for repeat in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


if __name__ == "__main__":
    main()
