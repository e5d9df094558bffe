"""Exchanges between ranks through each other's memory.

In an exchange a rank writes its numbers into the memory of every other rank, and then waits until
theirs have arrived in its own. A number is sent in a *packet* of twice its size, whose other half
is the *epoch*, the count of exchanges. Packets are written and read atomically: a number has
arrived when its packet has the expected epoch, so no memory fences are needed. (NCCL's protocol LL
does the same with 8 bytes.)

Several ranks would send every addend of a sum to every rank. Instead each may add up a *share* of
the columns and send these sums to all: an exchange of two sends, of half the bytes for four ranks.

There are two places for each number, used in turn by the parity of the epoch. In epoch e a rank
overwrites the number of epoch e - 2. That is never too early: it has finished e - 1, so it has
received the reader's numbers of e - 1, which the reader wrote after it had finished e - 2. Epochs
are counted on the device, where kernels read them, so replays of captured graphs go on counting.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST_ROWS = 512  # of one sum, since the programs of all of them wait at the same time
MOST_SENT = MOST_ROWS * 5120 * 2  # bytes that a rank sends for one sum, without epochs
FEW_ROWS = 8  # of a sum that is not worth a second wait, though ranks could share it
LINE = 256  # bytes; what lies in the memory begins at a multiple of it


@dataclass(frozen=True, eq=False)
class Channel:
    """A part of the memory for exchanges of up to `rows` rows of one width.

    Attributes:
        share: columns of a sum that each rank adds up, and to which it adds its residual, before
            ranks gather the sum: the residual has to be equal on all ranks. None: every rank has
            all addends of all others. With more than two ranks less is sent in shares.
        table: size + 3 numbers for kernels: the address of the channel in the memory of each rank,
            that of this rank's epochs [rows] int32, of `Inboxes.ended`, and `Inboxes.patience`. At
            an address of memory stand packets [rows, 2, size, width], by parity and by the rank
            that wrote them; with a share [rows, 2, 2, size, share], whose third axis has what is
            added up here, and the sum.
    """

    rows: int
    rank: int
    size: int
    share: int | None
    table: tuple[int, ...]


@dataclass(eq=False)
class Inboxes:
    """One rank's view of all memory. All ranks ask for the same channels in the same order.

    Attributes:
        addresses: of the memory of each rank, as this process sees it; it was filled with zeros.
        room: its size in bytes, on each rank.
        device: of this rank.
        ended: [1] int32 that host and device share. If it is not 0, waits end at once, with
            arbitrary numbers; a kernel whose wait times out sets it.
        patience: how often a kernel polls before it gives up; a poll takes about half a
            microsecond.
    """

    rank: int
    size: int
    addresses: list[int]
    room: int
    device: torch.device
    ended: Tensor
    patience: int
    _channels: dict[tuple[int, int, int, int | None], Channel | None] = field(default_factory=dict)
    _epochs: list[Tensor] = field(default_factory=list)
    _used: int = 0

    def channel(self, rows: int, width: int, item: int, share: int | None = None) -> Channel | None:
        """The channel for up to `rows` rows of `width` numbers of `item` bytes, in shares of
        `share`; the same arguments have the same one. None: there is no room for it."""
        key = rows, width, item, share
        if key not in self._channels:
            self._channels[key] = self._new_channel(*key)
        return self._channels[key]

    def channel_of(self, rows: int, width: int, dtype: torch.dtype) -> Channel | None:
        """The channel for a sum over ranks, [rows, width]. None: it is too large, so that other
        ways take less time, or its numbers do not have 16 or 32 bits."""
        item = dtype.itemsize
        if item not in (2, 4) or not rows * width:
            return None
        most, share = MOST_ROWS, None
        if self.size <= 2 or width % self.size:
            most = min(most, MOST_SENT // (max(1, self.size - 1) * width * item))
        elif rows <= FEW_ROWS:
            most = FEW_ROWS
        else:
            share = width // self.size
        return self.channel(most, width, item, share) if rows <= most else None

    def _new_channel(self, rows: int, width: int, item: int, share: int | None) -> Channel | None:
        # Each replay would set its epochs back to 1.
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        assert not capturing, "a call is run once before it is captured, which makes its channels"
        copies = self.size if share is None else 2
        needed = math.ceil(rows * 2 * copies * width * 2 * item / LINE) * LINE
        if self._used + needed > self.room:
            return None
        places = [address + self._used for address in self.addresses]
        self._used += needed
        epochs = torch.ones(rows, dtype=torch.int32, device=self.device)
        self._epochs.append(epochs)
        counted = epochs.data_ptr(), self.ended.data_ptr(), self.patience
        return Channel(rows, self.rank, self.size, share, (*places, *counted))
