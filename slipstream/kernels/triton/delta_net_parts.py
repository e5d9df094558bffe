"""Functions that the kernels of gated delta nets share. The rows of a request are counted from its
first pending one, which follows the rows that its state includes: see `delta_net.py`."""

import triton
import triton.language as tl


@triton.jit
def moves_of(moves, request):
    """(first row of the pass, number of all rows, of waiting rows, of committed rows, of committed
    rows that the checkpoint includes, slot, place of the checkpoint) of a request.

    All are 0 if the request has no rows in this pass, and a checkpoint of 0 rows is not saved.
    """
    query_start, positions, slots, num_known, pending, save_at, saved = moves
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    waiting = tl.load(pending + request).to(tl.int32)
    taken = waiting + tl.load(num_known + request).to(tl.int32)
    start = tl.load(positions + first, mask=rows > 0, other=0).to(tl.int32)
    save = tl.load(save_at + request).to(tl.int32) - (start - waiting)
    save = tl.where((save > 0) & (save <= taken), save, 0)
    total = tl.where(rows > 0, waiting + rows, 0)
    slot = tl.load(slots + request).to(tl.int64)
    return first, total, waiting, taken, save, slot, tl.load(saved + request).to(tl.int64)
