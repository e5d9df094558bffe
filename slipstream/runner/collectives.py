"""Collective operations between ranks: gloo between processes on a CPU, NCCL between GPUs.

Ranks that run the same rows only use all-gather. All-reduce is an all-gather followed by additions
in the order of the ranks, so all ranks get bitwise equal sums, and everything that is computed from
them is equal as well: results need not be sent from one rank to another. Ranks that run different
rows also use all-to-all.
"""

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.core.errors import RanksLostError
from slipstream.kernels.inboxes import Inboxes
from slipstream.kernels.norm import UnreducedSum
from slipstream.kernels.registry import kernels_for
from slipstream.layers.expert_pool import in_order
from slipstream.layers.parameters import Share
from slipstream.runner.peer_memory import connect_inboxes

_C10D: Any = dist  # most of torch.distributed has no type annotations
LOOPBACK: Final = "127.0.0.1"
_CONNECT = timedelta(seconds=120)
_TIMEOUT = timedelta(seconds=600)  # after waiting this long a rank treats the other one as lost


Graphs = Iterable[Any]  # torch.cuda.CUDAGraph


class CollectiveError(RuntimeError):
    """An exchange failed because another rank has ended or hangs; `__cause__` is the library's
    error."""

    def __init__(self) -> None:
        super().__init__("an exchange between ranks failed")


def open_store(port: int, size: int, leads: bool) -> Any:
    """The TCP store through which ranks connect. The leader opens it with port 0 and passes the
    port that it got to the others."""
    return _C10D.TCPStore(LOOPBACK, port, size, leads, _CONNECT, wait_for_workers=False)


class Collectives:
    """Connects this process with the other ranks; the constructor waits until all have joined.

    Args:
        device: the device of the exchanged tensors.
        name: the name of this group of ranks in the store.
        graphs: see `reset_before_end`; shared with the groups within this one.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        name: str = "ranks",
        graphs: list[Graphs] | None = None,
    ) -> None:
        self.rank, self.size, self._store, self._device = rank, size, store, device
        store = _C10D.PrefixStore(name, store)
        self._group: Any = _connected(store, rank, size, device)
        self._gather = kernels_for(device).gather
        self._inboxes: Inboxes | None = None
        if self._gather is not None:
            self._inboxes = connect_inboxes(store, rank, size, device)
        self._neighbours: dict[int, Collectives] = {}
        self._graphs: list[Graphs] = [] if graphs is None else graphs
        if device.type == "cuda":
            weakref.finalize(self, _end, self._group, self._graphs)

    def share(self) -> Share:
        """This rank's share of a network."""
        return Share(
            self.rank,
            self.size,
            self.reduce,
            self.gather,
            self.least,
            self.within,
            stack=self.all_gather,
            unreduced=self.unreduced,
            all_to_all=self.all_to_all,
            reaches_memory=self._inboxes is not None,
        )

    def within(self, size: int) -> Share:
        if size == self.size:
            return self.share()
        if size not in self._neighbours:
            own, first = self.rank % size, self.rank - self.rank % size
            given = self._store, own, size, self._device
            self._neighbours[size] = Collectives(*given, f"{size} from {first}", self._graphs)
        return replace(self._neighbours[size].share(), least=self.least)

    def all_gather(self, mine: Tensor) -> Tensor:
        """All-gather: [...] of each rank -> [size, ...] on every rank; only its stream waits."""
        mine = mine.contiguous()
        if self._inboxes is not None and self._gather is not None:
            self.check()
            gathered = self._gather(mine, self._inboxes)
            if gathered is not None:
                return gathered
        found = mine.new_empty((self.size, *mine.shape))
        _run(self._group._allgather_base, found, mine)
        return found

    def all_to_all(self, mine: Tensor) -> Tensor:
        """All-to-all: [size, ...], a part for each rank -> [size, ...], the parts for this one."""
        mine = mine.contiguous()
        found = torch.empty_like(mine)
        _run(self._group.alltoall_base, found, mine, [], [])
        return found

    def unreduced(self, partial: Tensor, dtype: torch.dtype) -> UnreducedSum | None:
        if self._inboxes is None:
            return None
        self.check()
        rows, width = partial.shape[-2:]
        channel = self._inboxes.channel_of(rows, width, dtype)
        return None if channel is None else UnreducedSum(partial, dtype, channel)

    def check(self) -> None:
        """Raise CollectiveError if an exchange has ended without the others' numbers."""
        if self._inboxes is not None and self._inboxes.ended.item():
            raise CollectiveError
        for neighbours in self._neighbours.values():
            neighbours.check()

    def reduce(self, mine: Tensor) -> Tensor:
        """All-reduce: the sum in the order of the ranks, in float32, rounded once."""
        return in_order(self.all_gather(mine))

    def gather(self, mine: Tensor) -> Tensor:
        """[T, n] of each rank -> [T, size n]."""
        return torch.cat(self.all_gather(mine).unbind(0), -1)

    def least(self, number: int) -> int:
        """The minimum of the ranks' numbers; the host waits for it."""
        return int(self.all_gather(torch.tensor([number], device=self._device)).min())

    def require_equal(self, tensors: Sequence[Tensor]) -> None:
        """Raise RanksLostError on every rank if these tensors are not equal on all of them."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in tensors:
            digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        mine = torch.tensor([int.from_bytes(digest.digest(), "little", signed=True)])
        found = self.all_gather(mine.to(self._device))
        if not torch.equal(found, found[:1].expand_as(found)):
            raise RanksLostError(
                "the ranks hold different tokens or counters, so their output is invalid: report "
                "this with the model and the options, and use tensor_parallel_size 1 until it is "
                "fixed"
            )

    def reset_before_end(self, graphs: Graphs) -> None:
        """Reset these CUDA graphs, which contain exchanges, before this group ends."""
        self._graphs.append(graphs)

    def finish(self) -> None:
        """Wait until the exchanges that this rank has launched have ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def abort(self) -> None:
        """Abort: threads that wait in an exchange get an error. May be called from any thread. On
        GPUs it returns only when all graphs with exchanges are reset."""
        self._end_waits()
        if self._device.type == "cuda":  # gloo detects lost peers
            self._group.abort()
        for neighbours in self._neighbours.values():
            neighbours.abort()

    def _end_waits(self) -> None:
        """End the waits of kernels for other ranks, now and from now on."""
        if self._inboxes is not None:
            self._inboxes.ended.fill_(1)
        for neighbours in self._neighbours.values():
            neighbours._end_waits()


def _end(group: Any, graphs: list[Graphs]) -> None:
    """End an NCCL group. NCCL waits for every graph that contains one of its operations, so a group
    that is freed before its graphs would never end."""
    for graph in [graph for it in graphs for graph in it]:
        graph.reset()
    group.abort()


def _run(exchange: Any, found: Tensor, mine: Tensor, *rest: Any) -> None:
    """Fill `found`. Both are exchanged as bytes, since not all libraries support all dtypes."""
    try:
        exchange(*(it.view(-1).view(torch.uint8) for it in (found, mine)), *rest).wait()
    except RuntimeError as error:
        raise CollectiveError from error


def _connected(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Create a separate process group, so that one process may hold several engines."""
    if device.type == "cuda":
        nccl = _C10D.ProcessGroupNCCL.Options()
        nccl._timeout = _TIMEOUT
        return _C10D.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = _C10D.ProcessGroupGloo._Options()
    gloo._devices = [_C10D.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    gloo._timeout = _TIMEOUT
    return _C10D.ProcessGroupGloo(store, rank, size, gloo)
