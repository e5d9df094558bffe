"""Sums over ranks, as layers have them, in a CUDA graph: their time and their bits.

    python -m benchmarks.rank_exchanges                    # two GPUs; under a minute
    python -m benchmarks.rank_exchanges --ranks 4 --rows 1 8 32
    python -m benchmarks.rank_exchanges --device cpu --width 64     # by gloo; times mean nothing

Rows of 5,120 numbers in bfloat16; microseconds of one sum of 50 that follow each other in a graph:

    ours + norm     through the GPUs' memory: sum, residual and RMS norm in one kernel
    shares + norm   the same, but each rank sums its share of the columns, and ranks gather the sum
    ours, 2 kernels the gather through the GPUs' memory, then additions, residual and norm
    norm            additions, residual and norm of what is there: what no exchange can be below
    gather + norm   NCCL's gather, then additions, residual and norm in one kernel
    nccl            an all-reduce of NCCL (gloo)
    one-shot        torch's all-reduce over symmetric memory, where it can be had

Before it is timed, each of ours is compared with NCCL's gather bit for bit on every rank. Then
chains of sums, each of which takes what the one before it gave, are replayed with random delays on
each rank, and compared with the same chain through NCCL. The exit code is 1 where bits differ, a
wait ends in vain, or a rank fails; ranks that hang are ended after `--seconds`.
"""

import argparse
import random
import socket
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import get_context

from benchmarks.graph_timing import graph_us
from slipstream.kernels.inboxes import Inboxes
from slipstream.kernels.norm import SublayerOutput, UnreducedSum
from slipstream.kernels.registry import kernels_for
from slipstream.kernels.table import Norm
from slipstream.runner.collectives import Collectives, open_store
from slipstream.runner.peer_memory import connect_inboxes

_DIST: Any = dist
ROWS, WIDTH, CALLS, REPLAYS = (1, 2, 8, 32, 128, 400), 5120, 50, 2000
OURS, SHARES = "ours + norm", "shares + norm"
LINKS, PATIENCE = 8, 20_000_000  # sums of a chain; looks, which are ten seconds

Times = dict[str, dict[int, float]]  # microseconds, by what is measured and rows


@dataclass(frozen=True)
class Case:
    """The measurement of every rank.

    Attributes:
        replays: of a chain of sums.
    """

    size: int
    kind: str
    width: int
    rows: Sequence[int]
    replays: int


def exchanges(case: Case, seconds: float) -> Times:
    """The first rank's results; RuntimeError if a rank failed or hung."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    results: Any = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, port, case, results)) for rank in range(case.size)
    ]
    for process in ranks:
        process.start()
    until = monotonic() + seconds
    while any(it.is_alive() for it in ranks) and monotonic() < until:
        if any(it.exitcode for it in ranks):
            until = min(until, monotonic() + 3)
        sleep(0.05)
    codes = [it.exitcode for it in ranks]
    for process in ranks:
        process.kill()
    if any(codes) or None in codes:
        raise RuntimeError(f"ranks ended with {codes}, where None is one that hung")
    times: Times = results.get()
    return times


def _rank(rank: int, port: int, case: Case, results: Any) -> None:
    """One rank: all of them call the same in the same order."""
    try:
        with torch.inference_mode():
            times = _Rank(rank, port, case).measured()
        if rank == 0:
            results.put(times)
        _DIST.barrier()
        _DIST.destroy_process_group()
    except BaseException:
        print(f"rank {rank}:", flush=True)
        traceback.print_exc()
        sys.exit(1)


class _Rank:
    def __init__(self, rank: int, port: int, case: Case) -> None:
        self.rank, self.case = rank, case
        kind, size = case.kind, case.size
        self.device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        store = open_store(port, size, leads=rank == 0)
        self.collectives = Collectives(store, rank, size, self.device)
        self.backend = "nccl" if kind == "cuda" else "gloo"
        whole = _DIST.PrefixStore("whole", store)
        _DIST.init_process_group(self.backend, store=whole, rank=rank, world_size=size)
        self.ops = kernels_for(self.device).network
        self.inboxes: Inboxes | None = None
        if kind == "cuda":
            peers = _DIST.PrefixStore("measured", store)
            self.inboxes = connect_inboxes(peers, rank, size, self.device, PATIENCE)
        self.say(f"GPUs reach each other's memory: {self.inboxes is not None}")

    def stacked(self, mine: Tensor) -> Tensor:
        """[...] of each rank -> [ranks, ...], by NCCL."""
        found = mine.new_empty((self.case.size, *mine.shape))
        _DIST.all_gather_into_tensor(found.view(-1), mine.contiguous().view(-1))
        return found

    def say(self, told: str) -> None:
        if self.rank == 0:
            print(told, flush=True)

    def measured(self) -> Times:
        norm = Norm(torch.rand(self.case.width, device=self.device).bfloat16(), 1e-6)
        times: Times = {}
        if self.inboxes is not None:
            self.compare_gathers()
            self.compare_share(norm)
            for rows in self.case.rows:
                self.time(rows, self.ours(rows, norm), times)
            for rows in self.case.rows:
                self.compare_chains(rows, norm)
        for rows in self.case.rows:
            self.time(rows, self.others(rows, norm), times)
        return times

    def time(self, rows: int, runs: dict[str, Callable[[], object]], times: Times) -> None:
        """Add what each of the runs takes to `times`."""
        for name, run in runs.items():
            times.setdefault(name, {})[rows] = found = self.microseconds(run)
            self.require_no_end()
            self.say(f"{rows:4d} rows  {name:16s}{found:8.2f} us")

    def require_no_end(self) -> None:
        if self.inboxes is not None and self.inboxes.ended.item():
            raise RuntimeError("a kernel has waited in vain")

    def unreduced(self, mine: Tensor, shares: bool = False) -> SublayerOutput:
        """`mine` for an op of ours that sums it over the ranks."""
        assert self.inboxes is not None
        rows, width, item = max(self.case.rows), self.case.width, mine.element_size()
        share = width // self.case.size if shares and width % self.case.size == 0 else None
        channel = self.inboxes.channel(rows, width, item, share)
        assert channel is not None, "there is room"
        return UnreducedSum(mine, mine.dtype, channel)

    def gathers(self, mine: Tensor) -> bool:
        from slipstream.kernels.triton.exchange import GATHERED_BYTES

        return mine.nbytes <= GATHERED_BYTES

    def gathered(self, mine: Tensor) -> Tensor:
        from slipstream.kernels.triton.exchange import gather

        assert self.inboxes is not None
        found = gather(mine, self.inboxes)
        assert found is not None, "it is small"
        return found

    def drawn(self, *shape: int) -> Tensor:
        """Other numbers on each rank."""
        generator = torch.Generator().manual_seed(self.rank)
        return torch.randn(*shape, generator=generator).to(self.device, torch.bfloat16)

    def ours(self, rows: int, norm: Norm) -> dict[str, Callable[[], object]]:
        """Exchanges through the GPUs' memory, whose bits are compared here."""
        mine = self.drawn(rows, self.case.width)
        stacked = self.stacked(mine)
        ops, residual = self.ops, stacked[0].clone()
        self.equal(ops.norm(self.unreduced(mine), None, None)[1:], [in_order(stacked)])
        expected = ops.norm(stacked, residual, norm)
        self.equal(ops.norm(self.unreduced(mine), residual, norm), expected)
        self.equal(ops.norm(self.unreduced(mine, shares=True), residual, norm), expected)
        self.say(f"{rows:4d} rows  bits are equal")
        runs: dict[str, Callable[[], object]] = {
            OURS: lambda: ops.norm(self.unreduced(mine), residual, norm),
            SHARES: lambda: ops.norm(self.unreduced(mine, shares=True), residual, norm),
            "norm": lambda: ops.norm(stacked, residual, norm),
        }
        if self.gathers(mine):
            runs["ours, 2 kernels"] = lambda: ops.norm(self.gathered(mine), residual, norm)
        return runs

    def others(self, rows: int, norm: Norm) -> dict[str, Callable[[], object]]:
        """Exchanges of libraries."""
        mine = self.drawn(rows, self.case.width)
        summed, residual, ops = torch.zeros_like(mine), torch.zeros_like(mine), self.ops
        runs: dict[str, Callable[[], object]] = {}
        if ops.sums_addends:
            runs["gather + norm"] = lambda: ops.norm(self.stacked(mine), residual, norm)
        runs[self.backend] = partial(_DIST.all_reduce, summed)
        return runs | (self.one_shot(mine) if self.case.kind == "cuda" else {})

    def equal(self, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        self.require_no_end()
        for one, other in zip(ours, theirs, strict=True):
            if not torch.equal(one, other):
                wrong = (one != other).nonzero()
                raise RuntimeError(f"{len(wrong)} numbers of {one.shape} differ, from {wrong[0]}")

    def compare_share(self, norm: Norm) -> None:
        """Measure the sums of an engine's layers."""
        for rows in (1, 8, 32, 400):
            mine = self.drawn(rows, self.case.width)
            share = self.collectives.share()
            made = share.addend(mine, mine.dtype, self.ops.sums_addends)
            assert isinstance(made, UnreducedSum), "ranks of an engine have inboxes as well"
            stacked = self.stacked(mine)
            residual = stacked[0].clone()  # one for all ranks, as that of an engine is
            self.equal(self.ops.norm(made, residual, norm), self.ops.norm(stacked, residual, norm))
            self.equal([self.collectives.reduce(mine)], [in_order(stacked)])
        self.collectives.check()
        self.say("sums of layers: bits are equal")

    def compare_gathers(self) -> None:
        for numbers in (1, 3, 511, 512, 513, 5120, 60_001):
            mine = self.drawn(2 * numbers).view(torch.float32)
            for _ in range(3):
                self.equal([self.gathered(mine)], [self.stacked(mine)])
        self.say("gathers through the GPUs' memory: bits are equal")

    def compare_chains(self, rows: int, norm: Norm) -> None:
        """Replay a chain, and compare it with what NCCL makes of the same numbers."""
        first, factor = self.drawn(2, rows, self.case.width).unbind(0)
        ends = []
        for ours in (True, False):
            mine, residual = first.clone(), torch.zeros_like(first)

            def chain(mine: Tensor = mine, residual: Tensor = residual, ours: bool = ours) -> None:
                for link in range(LINKS):
                    shares = link % 3 == 1
                    addend: SublayerOutput = (
                        self.unreduced(mine, shares) if ours else self.stacked(mine)
                    )
                    if ours and link % 4 == 3 and self.gathers(mine):
                        addend = self.gathered(mine)
                    normed, total = self.ops.norm(addend, residual, norm)
                    residual.copy_(total * 0.5)
                    mine.copy_(normed * factor + 0.25)

            replay = self.captured(chain) if ours else chain
            mine.copy_(first)
            residual.zero_()
            began, dice = perf_counter(), random.Random(self.rank)
            for turn in range(self.case.replays):
                if ours and dice.random() < 0.1:
                    torch.cuda._sleep(dice.randrange(200_000))  # type: ignore[no-untyped-call]
                if ours and dice.random() < 0.01:
                    sleep(dice.random() * 0.005)
                replay()
                if turn % 64 == 0:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            self.require_no_end()
            ends.append([mine, residual])
            took = perf_counter() - began
            self.say(f"{rows} rows, {'ours' if ours else 'NCCL'}: {self.case.replays} replays of "
                     f"{LINKS} sums in {took:.1f} s")  # fmt: skip
        self.equal(*ends)
        total = ends[0][1]  # which all ranks have
        self.equal(self.stacked(total).unbind(0), [total] * self.case.size)
        if not ends[0][0].isfinite().all():
            raise RuntimeError("a chain has left the numbers that can be compared")
        self.say(f"{rows} rows: bits are equal")

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def one_shot(self, mine: Tensor) -> dict[str, Callable[[], object]]:
        """torch's all-reduce over symmetric memory, where it can be had."""
        try:
            memory: Any = __import__("torch.distributed._symmetric_memory", fromlist=["empty"])
            name = _DIST.group.WORLD.group_name
            shared = memory.empty(mine.shape, dtype=mine.dtype, device=mine.device)
            memory.rendezvous(shared, name)
            shared.copy_(mine)
            run = torch.ops.symm_mem.one_shot_all_reduce
            run(shared, "sum", name)
            torch.cuda.synchronize()
        except Exception as error:  # how it fails differs from machine to machine
            self.say(f"one-shot: {type(error).__name__}: {error}")
            return {}
        return {"one-shot": lambda: run(shared, "sum", name)}

    def microseconds(self, run: Callable[[], object]) -> float:
        def calls() -> None:
            for _ in range(CALLS):
                run()

        if self.case.kind == "cuda":
            return graph_us(calls, CALLS)
        times = []
        for _ in range(3):
            began = perf_counter()
            calls()
            times.append((perf_counter() - began) / CALLS * 1e6)
        return statistics.median(times)


def in_order(stacked: Tensor) -> Tensor:
    """The sum of what stands in it, as ranks add."""
    total = stacked[0].float()
    for other in stacked[1:]:
        total += other
    return total.to(stacked.dtype)


def show(times: Times) -> None:
    """Print microseconds by rows."""
    rows = list(next(iter(times.values())))
    print("\nus at rows      " + "".join(f"{count:9d}" for count in rows))
    for name, found in times.items():
        print(
            f"{name:16s}" + "".join(f"{found.get(count, float('nan')):9.2f}" for count in rows),
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all bits are equal."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--ranks", type=int, default=2)
    cli.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    cli.add_argument("--width", type=int, default=WIDTH)
    cli.add_argument("--replays", type=int, default=REPLAYS, help="of each chain of eight sums")
    cli.add_argument("--seconds", type=float, default=100)
    cli.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = cli.parse_args(arguments)
    case = Case(given.ranks, given.device, given.width, given.rows, given.replays)
    try:
        show(exchanges(case, given.seconds))
    except RuntimeError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
