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
ROOM: Final = 128 << 20
# How often a kernel polls its memory, half a microsecond each: about as long as NCCL waits. A rank
# may be late because it compiles kernels; if a rank is lost, all waits for it are ended.
PATIENCE: Final = 1_200_000_000
_CONNECT = timedelta(seconds=120)
_LAZY_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class PeerMemoryError(RuntimeError):
    """The driver cannot share memory between these processes."""


class PeerMemory:
    """This rank's memory, and that of the others as they are opened.

    Attributes:
        addresses: by rank, as this process sees them; 0: not opened.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.addresses, self._rank = [0] * size, rank
        self._context = ctypes.c_void_p()
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PeerMemoryError(str(error)) from error

    def allocate(self) -> bytes:
        """Allocate `ROOM` bytes of zeros on the current GPU -> its index, and what others need to
        open them."""
        torch.cuda.synchronize()  # makes the context
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        address, handle, room = ctypes.c_uint64(), _Handle(), ctypes.c_size_t(ROOM)
        self._call("cuMemAlloc_v2", ctypes.byref(address), room)
        self.addresses[self._rank] = address.value
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), room)
        torch.cuda.synchronize()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes([torch.cuda.current_device()]) + bytes(handle.reserved)

    def open(self, rank: int, shared: bytes) -> None:
        """Open another rank's memory, by what `allocate` gave there."""
        own, other = torch.cuda.current_device(), shared[0]
        if own != other and not torch.cuda.can_device_access_peer(own, other):
            raise PeerMemoryError(f"GPU {own} does not reach the memory of GPU {other}")
        address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(shared[1:])
        access = ctypes.c_uint(_LAZY_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, access)
        self.addresses[rank] = address.value

    def release(self) -> None:
        """Close the others' memory and free this rank's, from whatever thread."""
        if not self._context:  # nothing was allocated
            return
        self._driver.cuCtxPushCurrent_v2(self._context)
        for rank, address in enumerate(self.addresses):
            if address:
                name = "cuMemFree_v2" if rank == self._rank else "cuIpcCloseMemHandle"
                getattr(self._driver, name)(ctypes.c_uint64(address))
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result:
            raise PeerMemoryError(f"{name} failed with CUDA error {result}")


def connect_inboxes(
    store: Any, rank: int, size: int, device: torch.device, patience: int = PATIENCE
) -> Inboxes | None:
    """The inboxes of all ranks, each of which calls this, on its current GPU; None on all of them
    where one cannot open another one's memory."""
    memory: PeerMemory | None = None
    problem, shared = "", b""
    try:
        memory = PeerMemory(rank, size)
        shared = memory.allocate()
    except PeerMemoryError as error:
        problem = str(error)
    for other, theirs in enumerate(_exchanged(store, "memory", rank, size, shared)):
        try:
            if not problem and not theirs:
                problem = f"rank {other} has none to share"
            elif not problem and memory is not None and other != rank:
                memory.open(other, theirs)
        except PeerMemoryError as error:
            problem = str(error)
    problems = _exchanged(store, "problem", rank, size, problem.encode())
    if memory is not None and not any(problems):
        ended = torch.zeros(1, dtype=torch.int32).pin_memory()
        inboxes = Inboxes(rank, size, memory.addresses, ROOM, device, ended, patience)
        weakref.finalize(inboxes, memory.release).atexit = False
        return inboxes
    first = next(it.decode() for it in problems if it)
    logger.info("Ranks exchange everything through NCCL: %s.", first)
    if memory is not None:
        memory.release()
    return None


def _exchanged(store: Any, what: str, rank: int, size: int, mine: bytes) -> list[bytes]:
    """What each rank brings, through the store, whose values may not be empty."""
    store.set(f"{what} {rank}", b"." + mine)
    names = [f"{what} {other}" for other in range(size)]
    store.wait(names, _CONNECT)
    return [store.get(name)[1:] for name in names]
