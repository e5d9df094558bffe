"""The server's memory: bounds on caches, and giving memory back when idle."""

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable

_INTERVAL = 2.0  # seconds
_ARENA_MAX, _ARENAS = -8, 2  # M_ARENA_MAX of malloc.h

# torch caches compiled matmuls twice, in two libraries: 1,024 each by default.
_MATMUL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MATMULS = 128


def keep_few_matmuls() -> None:
    """Bound torch's caches of compiled CPU matmuls; takes effect only before the first matmul.

    torch compiles one for every shape, so a server under changing load would grow by about 200 MB
    until it had seen every number of rows. Variables that are set already are left alone.
    """
    for name in _MATMUL_CACHES:
        os.environ.setdefault(name, str(_MATMULS))


def freeze_garbage_collection() -> None:
    """Exclude all objects of this moment (packages, the model) from garbage collection for good.

    A full collection visits all of them, with every thread stopped for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def share_arenas() -> None:
    """Let all threads allocate from the same few arenas of the C library.

    By default each thread has an arena of its own, and others cannot reuse memory freed there.
    """
    mallopt = _from_c_library("mallopt")
    if mallopt is not None:
        mallopt(_ARENA_MAX, _ARENAS)


def _from_c_library(name: str) -> Callable[..., object] | None:
    """A function of the C library; None if it is another library, without that function."""
    try:
        found: Callable[..., object] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found


async def return_memory(idle: Callable[[], bool], work_done: Callable[[], object]) -> None:
    """Return freed memory to the system when the server is idle; runs until cancelled.

    The allocator keeps freed memory for later. After a large body or thousands of connections that
    can be half of the memory of a small model's server.

    Args:
        idle: whether nothing runs that would wait for the allocator.
        work_done: counts that change with any work.
    """
    trim = _from_c_library("malloc_trim")
    last: object = None
    while trim is not None:
        await asyncio.sleep(_INTERVAL)
        done = work_done()
        if done != last and idle():
            await asyncio.to_thread(trim, 0)
            last = done
