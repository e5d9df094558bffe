"""Ranks that exchange rows through each other's memory: processes that share some, interpreted."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import get_context

from slipstream.kernels.inboxes import FEW_ROWS, MOST_ROWS, MOST_SENT, Inboxes
from slipstream.kernels.norm import UnreducedSum, sum_parts
from slipstream.kernels.table import Norm, PostNorm, PostNormAddend
from slipstream.kernels.triton import TRITON
from slipstream.kernels.triton.exchange import gather
from tests.kernels.device import INTERPRETED, ON_GPU
from tests.kernels.interpreter import quicken

pytestmark = [*INTERPRETED, pytest.mark.skipif(ON_GPU, reason="the ranks would share a GPU")]
ROOM = 16 << 20
WIDTH = 64
CPU = torch.device("cpu")


def _inboxes(rank: int, memory: list[Tensor]) -> Inboxes:
    addresses = [it.data_ptr() for it in memory]
    ended = torch.zeros(1, dtype=torch.int32)
    return Inboxes(rank, len(memory), addresses, ROOM, CPU, ended, 1_000_000)


def _run(rank: int, memory: list[Tensor], work: Callable[[Inboxes], Any], results: Any) -> None:
    quicken()
    try:
        results.put((rank, work(_inboxes(rank, memory))))
    except Exception as error:
        results.put((rank, repr(error)))


def _on_ranks(size: int, work: Callable[[Inboxes], Any]) -> list[Any]:
    """The results of each rank's process, in the order of its inboxes."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, not by each rank
    memory = [torch.zeros(ROOM, dtype=torch.uint8).share_memory_() for _ in range(size)]
    results: Any = context.Queue()
    ranks = [
        context.Process(target=_run, args=(rank, memory, work, results)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        return [it for _, it in sorted(results.get(timeout=120) for _ in ranks)]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _unreduced(
    parts: Tensor, inboxes: Inboxes, dtype: torch.dtype, shares: bool = False
) -> UnreducedSum:
    mine = parts[inboxes.rank]
    width = mine.shape[-1]
    share = width // inboxes.size if shares else None
    channel = inboxes.channel(16, width, dtype.itemsize, share)
    assert channel is not None
    return UnreducedSum(mine, dtype, channel)


def _rounds(inboxes: Inboxes) -> list[list[bool]]:
    """Exchanges of whole rows and of shares together, since processes take long to start."""
    whole = _sums(inboxes, WIDTH, shares=False)
    return [*whole, *_sums(inboxes, 20 * inboxes.size, shares=True)]


def _sums(inboxes: Inboxes, width: int, shares: bool) -> list[list[bool]]:
    """Whether each sum and each gather had the bits of parts that stand in one tensor."""
    equal = []
    for turn in range(3):
        time.sleep(0.02 * ((turn + inboxes.rank) % inboxes.size))
        for dtype in (torch.float16, torch.float32):
            generator = torch.Generator().manual_seed(turn)
            shape = inboxes.size, 1 + turn % 3, width
            parts = torch.randn(shape, generator=generator).to(dtype)
            residual, norm = parts[0] + 1, Norm(parts[0, 0] + 2, 1e-6)
            factor = PostNorm(None, torch.full((1,), 0.75, dtype=dtype))
            post_norm, unreduced = PostNorm(norm), _unreduced(parts, inboxes, dtype, shares)
            thirds = torch.randn((*shape[:1], 3, *shape[1:]), generator=generator)
            split = _unreduced(thirds, inboxes, dtype, shares)
            sums = torch.stack([sum_parts(it, dtype) for it in thirds])
            few = parts[:, :, : 2 * turn + 2].contiguous()
            gathered = gather(few[inboxes.rank], inboxes)
            assert gathered is not None
            pairs = [
                *zip(
                    TRITON.norm(PostNormAddend(unreduced, post_norm), residual, norm),
                    TRITON.norm(PostNormAddend(parts, post_norm), residual, norm),
                    strict=True,
                ),
                (
                    TRITON.norm(PostNormAddend(unreduced, factor), residual, norm)[1],
                    TRITON.norm(PostNormAddend(parts, factor), residual, norm)[1],
                ),
                (TRITON.norm(unreduced, None, None)[1], TRITON.norm(parts, None, None)[1]),
                (TRITON.norm(split, residual, norm)[1], TRITON.norm(sums, residual, norm)[1]),
                (gathered, few),
            ]
            equal.append([torch.equal(*it) for it in pairs])
    return equal


@pytest.mark.parametrize("size", [3, *(pytest.param(it, marks=pytest.mark.full) for it in (2, 4))])
def test_sums_have_the_bits_of_parts_that_are_stacked(size: int) -> None:
    assert _on_ranks(size, _rounds) == [[[True] * 6] * 12] * size


def _wait_in_vain(inboxes: Inboxes) -> list[int]:
    """The first rank alone takes part; what `ended` was before and afterwards."""
    inboxes.patience = 1024
    before = int(inboxes.ended)
    if inboxes.rank == 0:
        TRITON.norm(_unreduced(torch.ones(2, 1, WIDTH), inboxes, torch.float32), None, None)
    return [before, int(inboxes.ended)]


def test_who_waits_in_vain_goes_on_and_says_so() -> None:
    assert _on_ranks(2, _wait_in_vain) == [[0, 1], [0, 0]]


def test_large_sums_and_what_finds_no_room_go_other_ways() -> None:
    inboxes = _inboxes(0, [torch.zeros(16), torch.zeros(16)])  # nothing is written there
    inboxes.room = 64 << 20
    for width, rows in ((5120, MOST_SENT // 10240), (WIDTH, MOST_ROWS)):
        channel = inboxes.channel_of(rows, width, torch.bfloat16)
        assert channel is not None
        assert channel.rows == rows
        smaller = inboxes.channel_of(1, width, torch.bfloat16)
        assert smaller is channel, "rows of one width are counted together"
        assert inboxes.channel_of(rows + 1, width, torch.bfloat16) is None
    several = _inboxes(0, [torch.zeros(16)] * 4)
    several.room = 64 << 20
    shared = several.channel_of(FEW_ROWS + 1, 5120, torch.bfloat16)
    assert shared is not None
    assert (shared.rows, shared.share) == (MOST_ROWS, 1280)
    whole = several.channel_of(1, 5120, torch.bfloat16)
    assert whole is not None
    assert (whole.rows, whole.share) == (FEW_ROWS, None)
    assert several.channel_of(MOST_ROWS + 1, 5120, torch.bfloat16) is None
    assert inboxes.channel(inboxes.room // WIDTH, WIDTH, 2) is None
    assert gather(torch.zeros(3, dtype=torch.bfloat16), inboxes) is None, "half a word"
    assert gather(torch.zeros(1 << 20), inboxes) is None
