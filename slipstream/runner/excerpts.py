"""Excerpts of requests for drafters: their first tokens and their last ones, as one short context.

A draft model with a window attends to the last tokens of a text and to its first ones, without
which the attention of many language models has nowhere to put what it does not need (Xiao et al.
2023, "StreamingLLM"); a head to the last ones alone. Both are whole blocks, so what it sees is a
block table with the blocks between left out:

    token    0 .... first | ......... | ............ known ..
             first tokens |  skipped  | the window, drafts
    place    0 .... first |             ............ known - skipped ..

Kernels read such a table as any other; rows have the place of their token for what they may see,
and the token's own position for rotary embeddings. All of it is work on tensors of fixed shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.preparation import RequestTables
from slipstream.runner.device_state import DeviceState

FIRST_TOKENS = 4  # that are kept at least, as in the paper


@dataclass(frozen=True, eq=False)
class Excerpt:
    """What passes of one round see of each request of a batch.

    Attributes:
        tables: over the excerpts, a row for each request of the batch.
        rows: [R] int64, which row of `tables` is whose.
        skipped: [R] int64, tokens that are left out, whole blocks; None: the tables are those of
            the whole texts.
        first: tokens before those that are left out.
        last_position: no row stands behind it.
    """

    tables: RequestTables
    rows: Tensor
    skipped: Tensor | None = None
    first: int = 0
    last_position: int = 0

    def places(self, tokens: Tensor) -> Tensor:
        """[R] -> [R], where tokens stand in the excerpts; those that are left out stand where the
        first one behind them does."""
        if self.skipped is None:
            return tokens
        return torch.maximum(tokens - self.skipped, tokens.clamp_max(self.first))

    def inputs(self, placed: PassInputs, skipped: Tensor) -> PassInputs:
        """The inputs of rows that were placed in the excerpts.

        Args:
            skipped: [T] or broadcast to it, `skipped` of each row's request.
        """
        places = placed.rows.positions
        positions = (places + skipped).clamp_max(self.last_position)
        positions = torch.where(places < self.first, places, positions)
        return replace(placed, rows=replace(placed.rows, positions=positions, places=places))


# The blocks [R, C] of requests in `slots` [R] that stand `numbers` [R, C] blocks from their start.
BlockLookup = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ExcerptSizes:
    """How much of a request an excerpt has.

    Attributes:
        window: the last tokens that are seen, and at most block_size - 1 before them.
        ahead: tokens behind the known ones that passes may write.
        first_tokens: how many of the first are seen, in whole blocks.
    """

    window: int
    ahead: int
    block_size: int
    first_tokens: int = FIRST_TOKENS

    @property
    def first_blocks(self) -> int:
        return -(-self.first_tokens // self.block_size)

    @property
    def window_blocks(self) -> int:
        """Blocks that the window and the tokens ahead touch at most, wherever they begin."""
        return -(-(self.window + self.ahead) // self.block_size) + 1

    @property
    def num_blocks(self) -> int:
        return self.first_blocks + self.window_blocks

    def pieces(self, known: int, start: int, end: int) -> list[tuple[int, int]]:
        """What of the tokens start .. end an excerpt of so many known tokens has."""
        first = self.first_blocks * self.block_size
        seen_from = max((known - self.window) // self.block_size * self.block_size, first)
        parts = (start, min(end, first)), (max(start, seen_from), end)
        return [part for part in parts if part[0] < part[1]]

    def excerpt(
        self, state: DeviceState, slots: Tensor, known: Tensor, blocks: BlockLookup | None = None
    ) -> Excerpt:
        """The excerpts of requests whose first `known` tokens [R] are known.

        Args:
            blocks: where the drafter keeps its blocks; None: where the target does.
        """
        size, first = self.block_size, self.first_blocks
        left_out = (known - self.window).div(size, rounding_mode="floor").sub(first).clamp_min(0)
        column = torch.arange(self.num_blocks, device=slots.device)
        numbers = torch.where(column < first, column, column + left_out.unsqueeze(1))
        if blocks is None:
            last_block = -(-state.max_model_len // size) - 1
            own = state.block_tables[slots.unsqueeze(1), numbers.clamp_max(last_block)]
        else:
            own = blocks(slots, numbers).to(torch.int32)
        skipped = left_out * size
        place = torch.arange(self.num_blocks * size + 1, device=slots.device)
        tokens = torch.where(place < first * size, place, place + skipped.unsqueeze(1))
        tokens = tokens.clamp_max(state.token_ids.shape[1] - 1)
        token_ids, known = state.token_ids[slots.unsqueeze(1), tokens], known - skipped
        return Excerpt(
            RequestTables(token_ids, known, known, own, size),
            torch.arange(len(slots), device=slots.device),
            skipped,
            first * size,
            state.tables.last_position,
        )

    def ring(self, slots: Tensor, numbers: Tensor) -> Tensor:
        """A `BlockLookup` over a cache that has `num_blocks` blocks for every slot: the first
        tokens have theirs, the others take turns."""
        first = self.first_blocks
        own = torch.where(numbers < first, numbers, first + (numbers - first) % self.window_blocks)
        return slots.unsqueeze(1) * self.num_blocks + own


def whole(state: DeviceState, slots: Tensor) -> Excerpt:
    """The whole texts of requests."""
    return Excerpt(state.tables, slots)
