"""Memory of a server: what a burst needed goes back to the machine once nothing runs."""

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable

_INTERVAL = 2.0  # seconds
_ARENA_MAX, _ARENAS = -8, 2  # M_ARENA_MAX of malloc.h


# torch keeps compiled matmuls twice, by these variables of its two libraries: 1024 of each.
_MATMUL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MATMULS = 128


def keep_few_matmuls() -> None:
    """Bound what torch keeps of its own matmuls on a CPU; has effect before the first one only.

    It compiles one for every shape, so that a server under changing load would grow by about
    200 MB until it had met every number of rows. Whoever sets the variables is not overruled.
    """
    for name in _MATMUL_CACHES:
        os.environ.setdefault(name, str(_MATMULS))


def leave_out_of_collections() -> None:
    """Let the collector of garbage pass by what is there now: packages and the model, for good.

    A full collection looks at all of them, with every thread stopped for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def _trim() -> Callable[[int], object] | None:
    """The C library's own way to give back what was freed; None where it has none."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return found


def share_memory() -> None:
    """Let all threads take memory from the same few places.

    By default every thread gets its own, and what one of them freed is of no use to the others.
    """
    try:
        ctypes.CDLL(None).mallopt(_ARENA_MAX, _ARENAS)
    except (OSError, AttributeError):  # another C library, with ways of its own
        return


async def give_back_memory(idle: Callable[[], bool], work_done: Callable[[], object]) -> None:
    """Runs until cancelled: a while after work, give back what it left behind.

    The allocator keeps freed memory for later, each thread its own. After a large body or thousands
    of connections that can be half of all the memory of a small model's server.

    Args:
        idle: whether nothing runs, so that nobody waits for the allocator.
        work_done: counts that change with whatever was done.
    """
    trim = _trim()
    last: object = None
    while trim is not None:
        await asyncio.sleep(_INTERVAL)
        done = work_done()
        if done != last and idle():
            await asyncio.to_thread(trim, 0)
            last = done
