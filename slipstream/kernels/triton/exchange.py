"""Exchanges between ranks through each other's memory; `kernels/inboxes.py` tells the protocol.

A kernel waits for programs of other GPUs, so all of a launch's programs have to run at once, or in
the order of their numbers, which is how GPUs start them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.inboxes import Inboxes
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.launch import cdiv, launch_dependents, wait_for_inputs

WORDS = 512  # of 4 bytes, which a program of a gather sends
GATHERED_BYTES = 256 * WORDS * 4  # at most, of each rank


@triton.jit
def _at(address, of: tl.constexpr):
    # An address below 2 ** 31 comes as 32 bits: a program at a fixed place has such memory.
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(of)), 16)


@triton.jit
def _packets(bits, epoch):
    """int16 or int32 [block], with the epoch in as many bits added to each -> int32 or int64."""
    half: tl.constexpr = bits.dtype.primitive_bitwidth
    packet: tl.constexpr = tl.int32 if half == 16 else tl.int64
    return (bits.to(packet) << half) | (epoch.to(packet) & ((1 << half) - 1))


@triton.jit
def _arrived(place, inside, epoch, channel, rank: tl.constexpr, size: tl.constexpr,
             bits: tl.constexpr):  # fmt: skip
    """Wait for packets in this rank's memory, from `place` [block] -> `bits` [block]."""
    half: tl.constexpr = bits.primitive_bitwidth
    seldom: tl.constexpr = 1024  # looks between two at `Inboxes.ended`, which is far away
    packet: tl.constexpr = tl.int32 if half == 16 else tl.int64
    flag = epoch.to(packet) & ((1 << half) - 1)
    inbox = _at(channel[rank], packet) + place
    value = tl.zeros(place.shape, packet)
    looks, waiting = 0, 1
    while waiting != 0:
        value = tl.load(inbox, mask=inside, other=0, volatile=True)
        missing = inside & ((value & ((1 << half) - 1)) != flag)
        waiting = tl.max(missing.to(tl.int32), axis=0)
        looks += 1
        if looks % seldom == 0:
            ended = _at(channel[size + 1], tl.int32)
            if looks >= channel[size + 2]:
                tl.store(ended, 1)
            if tl.load(ended, volatile=True) != 0:
                waiting = 0
    return (value >> half).to(bits)


@triton.jit
def _added_up(
    mine, first, width, column, inside, epoch, channel, rank: tl.constexpr, size: tl.constexpr
):
    """The ranks' addends [block], the others' from row `first` + rank of the memory, added up in
    float32 in the order of the ranks."""
    bits: tl.constexpr = tl.int16 if mine.dtype.primitive_bitwidth == 16 else tl.int32
    value = tl.zeros(column.shape, tl.float32)
    for source in tl.static_range(size):
        if source == rank:
            part = mine
        else:
            place = (first + source) * width + column
            part = _arrived(place, inside, epoch, channel, rank, size, bits)
            part = part.to(mine.dtype, bitcast=True)
        if source == 0:
            value = part.to(tl.float32)
        else:
            value += part.to(tl.float32)
    return value


@triton.jit
def epoch_of(row, channel, size: tl.constexpr):
    """The number of the row's exchange that begins."""
    return tl.load(_at(channel[size], tl.int32) + row)


@triton.jit
def send(bits, row, column, inside, width, channel, rank: tl.constexpr, size: tl.constexpr):
    """Write a row, int16 or int32 [block], to all other ranks -> its epoch."""
    epoch = epoch_of(row, channel, size)
    value = _packets(bits, epoch)
    place = ((row * 2 + (epoch & 1)) * size + rank) * width + column
    for distance in tl.static_range(1, size):
        inbox = channel[(rank + distance) % size]
        tl.store(_at(inbox, value.dtype) + place, value, mask=inside)
    tl.debug_barrier()  # all have read the epoch, and nothing is written after the waits
    return epoch


@triton.jit
def receive(
    row, column, inside, width, epoch, channel, source: tl.constexpr, rank: tl.constexpr,
    size: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """Wait for the row that rank `source` has sent -> `bits` (int16 or int32) [block]."""
    place = ((row * 2 + (epoch & 1)) * size + source) * width + column
    return _arrived(place, inside, epoch, channel, rank, size, bits)


# Where ranks share the columns of a sum, a row of the memory has places for two rows: shares that
# the other ranks have sent to the owner of theirs, by source, then the whole sum.


@triton.jit
def send_share(
    bits, row, column, inside, share, epoch, channel, distance: tl.constexpr, rank: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    """Write this rank's addends of the columns, [block], that the rank `distance` further on adds
    up, to that rank."""
    value = _packets(bits, epoch)
    place = ((row * 2 + (epoch & 1)) * 2 * size + rank) * share + column
    tl.store(_at(channel[(rank + distance) % size], value.dtype) + place, value, mask=inside)


@triton.jit
def sum_of_shares(
    mine, row, column, inside, share, epoch, channel, rank: tl.constexpr, size: tl.constexpr
):
    """The ranks' addends [block] of this rank's columns, added up in float32 in their order."""
    first = (row * 2 + (epoch & 1)) * 2 * size
    return _added_up(mine, first, share, column, inside, epoch, channel, rank, size)


@triton.jit
def send_sum(
    bits, row, column, inside, share, epoch, channel, rank: tl.constexpr, size: tl.constexpr
):
    """Write this rank's columns of the sum, [block], to all ranks, this one included."""
    value = _packets(bits, epoch)
    place = ((row * 2 + (epoch & 1)) * 2 * size + size + rank) * share + column
    for distance in tl.static_range(size):
        inbox = channel[(rank + distance) % size]
        tl.store(_at(inbox, value.dtype) + place, value, mask=inside)
    tl.debug_barrier()  # nothing is written after the waits


@triton.jit
def receive_sum(
    row, column, inside, share, epoch, channel, rank: tl.constexpr, size: tl.constexpr,
    bits: tl.constexpr,
):  # fmt: skip
    """Wait for the whole sum -> `bits` [block]."""
    place = ((row * 2 + (epoch & 1)) * 2 + 1) * size * share + column
    return _arrived(place, inside, epoch, channel, rank, size, bits)


@triton.jit
def count(row, epoch, channel, size: tl.constexpr):
    """The row's exchange is over."""
    tl.store(_at(channel[size], tl.int32) + row, epoch + 1)


@triton.jit
def summed_over_ranks(
    mine, row, column, inside, width, channel, rank: tl.constexpr, size: tl.constexpr
):
    """The ranks' rows [block], added up in float32 in the order of the ranks."""
    bits: tl.constexpr = tl.int16 if mine.dtype.primitive_bitwidth == 16 else tl.int32
    epoch = send(mine.to(bits, bitcast=True), row, column, inside, width, channel, rank, size)
    first = (row * 2 + (epoch & 1)) * size
    value = _added_up(mine, first, width, column, inside, epoch, channel, rank, size)
    count(row, epoch, channel, size)
    return value


@triton.jit
def _gather_kernel(
    mine, found, words, channel, rank: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Programs (block of words); mine [words], found [size, words] int32."""
    launch_dependents(pdl)
    row = tl.program_id(0)
    column = tl.arange(0, block)
    place = row * block + column
    wait_for_inputs(pdl)
    own = tl.load(mine + place, mask=place < words, other=0)
    # The whole block travels, so that no old packet is left with an epoch that comes again.
    everywhere = column < block
    epoch = send(own, row, column, everywhere, block, channel, rank, size)
    for source in tl.static_range(size):
        if source == rank:
            part = own
        else:
            part = receive(
                row, column, everywhere, block, epoch, channel, source, rank, size, tl.int32
            )
        tl.store(found + source * words + place, part, mask=place < words)
    count(row, epoch, channel, size)


def gather(mine: Tensor, inboxes: Inboxes) -> Tensor | None:
    """[...] of each rank -> [size, ...] on every rank. None: too much, or not in words of 4 bytes.

    Bits are copied; the dtype may be any.
    """
    mine = mine.contiguous()
    size = mine.numel() * mine.element_size()
    if size > GATHERED_BYTES or size % 4 or mine.data_ptr() % 4:
        return None
    channel = inboxes.channel(GATHERED_BYTES // (4 * WORDS), WORDS, 4)
    if channel is None:
        return None
    found = torch.empty((inboxes.size, *mine.shape), dtype=mine.dtype, device=mine.device)
    words = size // 4
    if words:
        _gather_kernel[(cdiv(words, WORDS),)](
            _words(mine), _words(found), words, channel.table, rank=channel.rank,
            size=channel.size, block=WORDS, num_warps=4, **launch.options(mine.device),
        )  # fmt: skip
    return found


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8).view(torch.int32)
