"""Excerpts of requests for drafters: their first and last tokens, as one short context.

A draft model with a window attends to the last tokens of a text and to the first ones, which serve
as attention sinks (Xiao et al. 2023, "StreamingLLM"); a head attends only to the last ones. Both
parts are whole blocks, so an excerpt is a block table without the blocks in between:

    token    0 .... first | ......... | ............ known ..
             first tokens |  skipped  | the window, drafts
    place    0 .... first |             ............ known - skipped ..

Kernels read such a table like any other. Which tokens a row attends to depends on its place in the
excerpt, and its rotary embedding on its position in the text. All tensors have fixed shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.preparation import RequestTables
from slipstream.runner.device_state import DeviceState

FIRST_TOKENS = 4  # least number of first tokens, as in the paper


@dataclass(frozen=True, eq=False)
class Excerpt:
    """The context to which the passes of one round attend, for each request of a batch.

    Attributes:
        tables: tables with the block tables of the excerpts, a row for each request of the batch.
        rows: [R] int64, the row of each request in `tables`.
        skipped: [R] int64, number of tokens that are omitted, in whole blocks; None: texts are not
            shortened.
        first: number of tokens before the omitted ones.
        last_position: the largest position of a row.
    """

    tables: RequestTables
    rows: Tensor
    skipped: Tensor | None = None
    first: int = 0
    last_position: int = 0

    def places(self, tokens: Tensor) -> Tensor:
        """Indices of tokens [R] -> their places in the excerpts [R]; an omitted token has the place
        of the first token after the gap."""
        if self.skipped is None:
            return tokens
        return torch.maximum(tokens - self.skipped, tokens.clamp_max(self.first))

    def inputs(self, placed: PassInputs, skipped: Tensor) -> PassInputs:
        """The inputs of rows that were placed in the excerpts, with their positions in the texts.

        Args:
            skipped: [T] or a shape that broadcasts to it, `skipped` of each row's request.
        """
        places = placed.rows.positions
        positions = (places + skipped).clamp_max(self.last_position)
        positions = torch.where(places < self.first, places, positions)
        return replace(placed, rows=replace(placed.rows, positions=positions, places=places))


# (slots [R], numbers [R, C]) -> the blocks [R, C] with these numbers, counted from the start.
BlockLookup = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ExcerptSizes:
    """The sizes of an excerpt.

    Attributes:
        window: number of last tokens in the excerpt, which may have up to block_size - 1 more.
        ahead: number of tokens after the known ones that passes may write.
        first_tokens: number of first tokens in the excerpt, rounded up to whole blocks.
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
        """Maximum number of blocks that the window and the tokens ahead overlap."""
        return -(-(self.window + self.ahead) // self.block_size) + 1

    @property
    def num_blocks(self) -> int:
        return self.first_blocks + self.window_blocks

    def pieces(self, known: int, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of tokens from `start` to `end` that an excerpt of `known` tokens has."""
        first = self.first_blocks * self.block_size
        seen_from = max((known - self.window) // self.block_size * self.block_size, first)
        parts = (start, min(end, first)), (max(start, seen_from), end)
        return [part for part in parts if part[0] < part[1]]

    def excerpt(
        self, state: DeviceState, slots: Tensor, known: Tensor, blocks: BlockLookup | None = None
    ) -> Excerpt:
        """The excerpts of requests whose first `known` tokens [R] are known.

        Args:
            blocks: finds the drafter's blocks; None: the drafter uses the target's.
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
        """A `BlockLookup` for a cache of `num_blocks` blocks per slot: the first tokens have fixed
        blocks, and the others use the rest as a ring buffer."""
        first = self.first_blocks
        own = torch.where(numbers < first, numbers, first + (numbers - first) % self.window_blocks)
        return slots.unsqueeze(1) * self.num_blocks + own


def whole(state: DeviceState, slots: Tensor) -> Excerpt:
    """Excerpts without a gap."""
    return Excerpt(state.tables, slots)
