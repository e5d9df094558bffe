"""Memory of each GPU that the other ranks' processes can write: CUDA's inter-process memory.

Ranks are processes of one machine. Each allocates the same amount with the driver, whose functions
are called directly: torch would open the memory of another GPU in that GPU's context, which costs
some hundred MB on each of them, and its allocator hands out parts of larger blocks.
"""

import ctypes
import logging
import weakref
from datetime import timedelta
from typing import Any, Final

import torch

from slipstream.kernels.inboxes import Inboxes

logger = logging.getLogger("slipstream")
ROOM: Final = 64 << 20
# Looks of a kernel at its memory, half a microsecond each: as long as NCCL's ranks wait. A rank may
# be late by the time that it takes to compile kernels; those that are lost end the waits of others.
PATIENCE: Final = 1_200_000_000
_CONNECT = timedelta(seconds=120)
_LAZY_PEER_ACCESS: Final = 1
_HANDLE_BYTES: Final = 64


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


def connect_inboxes(
    store: Any, rank: int, size: int, device: torch.device, patience: int = PATIENCE
) -> Inboxes | None:
    """The inboxes of all ranks, each of which calls this; on all of them None where a GPU does not
    reach another one's memory."""
    try:
        own, handle = _allocate(device)
        problem = ""
    except (OSError, RuntimeError) as error:
        own, handle, problem = 0, b"", str(error)
    index = torch.cuda.current_device()
    store.set(f"inbox {rank}", bytes([bool(handle), index]) + handle)
    addresses = []
    for other in range(size):
        store.wait([f"inbox {other}"], _CONNECT)
        told = store.get(f"inbox {other}")
        if other == rank or problem:
            addresses.append(own)
            continue
        try:
            addresses.append(_open(told[2:], index, told[1]) if told[0] else 0)
            problem = "" if told[0] else f"rank {other} has none"
        except RuntimeError as error:
            problem = str(error)
    store.set(f"inboxes of {rank}", "no" if problem else "yes")
    agreed = True
    for other in range(size):
        store.wait([f"inboxes of {other}"], _CONNECT)
        agreed &= store.get(f"inboxes of {other}") == b"yes"
    if agreed:
        ended = torch.zeros(1, dtype=torch.int32).pin_memory()
        made = Inboxes(rank, size, addresses, ROOM, device, ended, patience)
        weakref.finalize(made, _release, addresses, rank).atexit = False
        return made
    if problem:
        logger.info("ranks exchange all through NCCL: %s", problem)
    _release([it for it in addresses if it], addresses.index(own) if own in addresses else -1)
    return None


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"{what} failed (CUDA error {result})")


def _allocate(device: torch.device) -> tuple[int, bytes]:
    """(address, handle) of `ROOM` bytes of zeros on the current GPU."""
    torch.zeros(1, device=device)  # makes the context
    torch.cuda.synchronize()
    driver, address, handle = _driver(), ctypes.c_uint64(), _Handle()
    _check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(ROOM)), "cuMemAlloc")
    zeros = address, ctypes.c_ubyte(0), ctypes.c_size_t(ROOM)
    _check(driver.cuMemsetD8_v2(*zeros), "cuMemsetD8")
    torch.cuda.synchronize()
    _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), address), "cuIpcGetMemHandle")
    return address.value, bytes(handle.reserved)


def _open(handle: bytes, own: int, other: int) -> int:
    """The address in this process of another GPU's memory."""
    if own != other and not torch.cuda.can_device_access_peer(own, other):
        raise RuntimeError(f"GPU {own} does not reach the memory of GPU {other}")
    address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
    opened = _driver().cuIpcOpenMemHandle_v2(
        ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS)
    )
    _check(opened, "cuIpcOpenMemHandle")
    return address.value


def _release(addresses: list[int], own: int) -> None:
    driver = _driver()
    for rank, address in enumerate(addresses):
        at = ctypes.c_uint64(address)
        if rank == own:
            driver.cuMemFree_v2(at)
        else:
            driver.cuIpcCloseMemHandle(at)
