"""Ranks that exchange rows through each other's memory: processes that share some, interpreted."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import get_context

from slipstream.kernels.inboxes import Inboxes
from slipstream.kernels.norm import Spread
from slipstream.kernels.table import Behind, JoiningAddend, Norm
from slipstream.kernels.triton import TRITON
from slipstream.kernels.triton.exchange import gather
from tests.kernels.device import INTERPRETED, ON_GPU

pytestmark = [*INTERPRETED, pytest.mark.skipif(ON_GPU, reason="the ranks would share a GPU")]
ROOM = 8 << 20
CPU = torch.device("cpu")


def _connected(rank: int, memory: list[Tensor], patience: int = 1_000_000) -> Inboxes:
    addresses = [it.data_ptr() for it in memory]
    ended = torch.zeros(1, dtype=torch.int32)
    return Inboxes(rank, len(memory), addresses, ROOM, CPU, ended, patience)


def _run(rank: int, memory: list[Tensor], work: Callable[..., Any], results: Any) -> None:
    results.put((rank, work(_connected(rank, memory))))


def _on_ranks(size: int, work: Callable[[Inboxes], Any]) -> list[Any]:
    """What each rank's process makes of its inboxes, in their order."""
    context = get_context("spawn")
    memory = [torch.zeros(ROOM, dtype=torch.uint8).share_memory_() for _ in range(size)]
    results: Any = context.SimpleQueue()
    ranks = [
        context.Process(target=_run, args=(rank, memory, work, results)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        return [it for _, it in sorted(results.get() for _ in ranks)]
    finally:
        for process in ranks:
            process.join()


def _parts(size: int, turn: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(turn)
    return torch.randn(size, rows, width, generator=generator).to(dtype)


def _no_stack(mine: Tensor) -> Tensor:
    raise AssertionError("rows come through the inboxes")


def _rounds(inboxes: Inboxes) -> list[list[bool]]:
    """Whether each sum and each gather had the bits of parts that stand in one tensor."""
    equal = []
    for turn in range(5):
        time.sleep(0.02 * ((turn + inboxes.rank) % inboxes.size))
        for dtype in (torch.float16, torch.float32):
            rows, width = 1 + turn % 3, 64
            parts = _parts(inboxes.size, turn, rows, width, dtype)
            residual, norm = parts[0] + 1, Norm(parts[0, 0] + 2, 1e-6)
            channel = inboxes.channel(4, width, parts.element_size())
            assert channel is not None
            spread = Spread(parts[inboxes.rank], channel, _no_stack)
            joined = JoiningAddend(spread, Behind(norm))
            expected = TRITON.norm(JoiningAddend(parts, Behind(norm)), residual, norm)
            found = TRITON.norm(joined, residual, norm)
            alone = TRITON.norm(spread, None, None)[1], TRITON.norm(parts, None, None)[1]
            gathered = gather(parts[inboxes.rank, :, : 2 * turn + 2].contiguous(), inboxes)
            assert gathered is not None
            pairs = *zip(found, expected, strict=True), alone
            equal.append([torch.equal(*it) for it in pairs])
            equal[-1].append(torch.equal(gathered, parts[:, :, : 2 * turn + 2]))
    return equal


@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_parts_that_are_stacked(size: int) -> None:
    found = _on_ranks(size, _rounds)
    assert found == [[[True] * 4] * 10] * size
