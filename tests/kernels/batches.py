"""Ragged batches over a paged cache, for tests of the attention ops."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs
from tests.pass_inputs import changed, pass_inputs


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention layer and its cache."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Requests:
    """`rows[r]` new rows of each request, after `computed[r]` tokens of its context."""

    computed: Sequence[int]
    rows: Sequence[int]


def attention_inputs(requests: Requests, block_size: int, seed: int = 0) -> PassInputs:
    """Tables of blocks in random order; entries after a request's last block name no block."""
    ends = [start + rows for start, rows in zip(requests.computed, requests.rows, strict=True)]
    needed = [-(-end // block_size) for end in ends]
    free = torch.randperm(num_blocks(requests, block_size), generator=seeded(seed)).tolist()
    tables = torch.full((len(ends), max(needed) + 1), 1 << 30, dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    for request, (start, end) in enumerate(zip(requests.computed, ends, strict=True)):
        own = [free.pop() for _ in range(needed[request])]
        tables[request, : len(own)] = torch.tensor(own, dtype=torch.int32)
        for position in range(start, end):
            positions.append(position)
            slots.append(own[position // block_size] * block_size + position % block_size)
    return pass_inputs(
        query_start=torch.tensor([0, *requests.rows]).cumsum(0),
        context_lens=torch.tensor(ends),
        block_tables=tables,
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
    )


def num_blocks(requests: Requests, block_size: int) -> int:
    """Blocks of a cache that has room for two requests more than these."""
    ends = [start + rows for start, rows in zip(requests.computed, requests.rows, strict=True)]
    return sum(-(-end // block_size) for end in ends) + 2


def filled_cache(
    inputs: PassInputs, requests: Requests, shape: Shape, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Random numbers where the requests' tokens are, NaN everywhere else."""
    generator = seeded(seed)
    sizes = (num_blocks(requests, shape.block_size), shape.block_size)
    cache = [torch.full((*sizes, shape.kv_heads, shape.head_dim), torch.nan) for _ in range(2)]
    for table, length in zip(
        inputs.paging.block_tables, inputs.paging.context_lens.tolist(), strict=True
    ):
        for position in range(length):
            block, place = int(table[position // shape.block_size]), position % shape.block_size
            for pages in cache:
                pages[block, place] = torch.randn(
                    shape.kv_heads, shape.head_dim, generator=generator
                )
    keys, values = (pages.to(shape.dtype) for pages in cache)
    return keys, values


def only(inputs: PassInputs, request: int) -> tuple[PassInputs, slice]:
    """The inputs of one request alone, and its rows."""
    first, last = inputs.rows.query_start[request : request + 2].tolist()
    rows = slice(first, last)
    alone = changed(
        inputs,
        query_start=torch.tensor([0, last - first], device=inputs.rows.query_start.device),
        context_lens=inputs.paging.context_lens[request : request + 1],
        block_tables=inputs.paging.block_tables[request : request + 1],
        positions=inputs.rows.positions[rows],
        slots=inputs.paging.slots[rows],
    )
    return alone, rows


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
