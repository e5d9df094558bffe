"""Batch preparation, with one launch per op; see `kernels/preparation.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from slipstream.core.batch import FACTOR_PARTS
from slipstream.kernels.pass_inputs import RowPlaces
from slipstream.kernels.preparation import PlacedRows, RequestTables
from slipstream.kernels.reference.preparation import ReferencePreparation
from slipstream.kernels.reference.preparation import timestamp as timestamp_of_host
from slipstream.kernels.triton.launch import (
    cdiv,
    dense,
    launch_dependents,
    next_power_of_2,
    options,
    wait_for_inputs,
)
from slipstream.kernels.triton.results import pack_results

TABLE_BLOCK = 1024
PART = tl.constexpr(1 / FACTOR_PARTS)


@triton.jit
def _packed_rows(lengths, request, requests, most, num_rows, block_r: tl.constexpr):
    """(first row, number of rows) of a request. Rows beyond the sum of lengths are padding of the
    last requests, to at most `most` rows each."""
    other = tl.arange(0, block_r)
    length = tl.load(lengths + other, mask=other < requests, other=0)
    room = tl.where(other < requests, most - length, 0)
    # The padding of this request and of those before it.
    left = num_rows - tl.sum(length) - tl.sum(tl.where(other > request, room, 0))
    own = tl.load(lengths + request)
    first = tl.sum(tl.where(other < request, length, 0)) + tl.maximum(left - (most - own), 0)
    return first, own + tl.minimum(tl.maximum(left, 0), most - own)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    slots, starts, lengths, all_tokens, all_tables, tokens, positions, places, tables, query_start,
    contexts, last_rows, first_rows, row_requests, row_offsets, requests, most, num_rows,
    tokens_stride, tables_stride, num_blocks, last_position, block_size, num_tokens, mask_token,
    window_column: tl.constexpr, block_m: tl.constexpr, block_b: tl.constexpr,
    block_r: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (request, part): part 0 places the rows, the others copy the block table.

    If `num_tokens` is None, no row is masked. Cache slots by the block table at `window_column`
    follow those by the first one. With `first_rows` the rows are packed.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + request)
    own_table = all_tables + slot * tables_stride
    if part > 0:
        column = (part - 1) * block_b + tl.arange(0, block_b)
        own = column < num_blocks
        blocks = tl.load(own_table + column, mask=own, other=0)
        tl.store(tables + request * num_blocks + column, blocks, mask=own)
    else:
        start, length = tl.load(starts + request), tl.load(lengths + request)
        offset = tl.arange(0, block_m)
        if first_rows is None:
            first, inside = request * most, offset < most
        else:
            first, count = _packed_rows(lengths, request, requests, most, num_rows, block_r)
            inside = offset < count
        position = tl.minimum(start + offset, last_position)
        block = tl.load(own_table + position // block_size, mask=inside, other=0)
        place = block.to(tl.int64) * block_size + position % block_size
        token = tl.load(all_tokens + slot * tokens_stride + position, mask=inside, other=0)
        if num_tokens is not None:
            token = tl.where(position >= tl.load(num_tokens + slot), mask_token, token)
        row = first + offset
        tl.store(tokens + row, token, mask=inside)
        tl.store(positions + row, position, mask=inside)
        tl.store(places + row, tl.where(offset < length, place, -1), mask=inside)
        if window_column > 0:
            own_table += window_column
            block = tl.load(own_table + position // block_size, mask=inside, other=0)
            place = block.to(tl.int64) * block_size + position % block_size
            places += num_rows
            tl.store(places + row, tl.where(offset < length, place, -1), mask=inside)
        tl.store(query_start + request, first)
        tl.store(query_start + requests, num_rows)
        tl.store(contexts + request, tl.where(length > 0, start + length, 0))
        if first_rows is not None:
            tl.store(row_requests + row, request, mask=inside)
            tl.store(row_offsets + row, offset, mask=inside)
            first = tl.minimum(first, num_rows - 1)
            tl.store(first_rows + request, first)
        tl.store(last_rows + request, first + tl.maximum(length - 1, 0))


def expand_rows(
    tables: RequestTables,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    most: int,
    mask_token: int | None = None,
    num_rows: int | None = None,
) -> PlacedRows:
    device, requests = slots.device, len(slots)
    slots, starts, lengths = dense(slots, starts, lengths)
    num_blocks, packed = tables.block_tables.shape[1], num_rows is not None
    count = requests * most if num_rows is None else num_rows
    token_ids = torch.empty(count, dtype=torch.int32, device=device)
    own = 1 + tables.num_tables
    numbers = torch.empty((own + 2 * packed, count), dtype=torch.int64, device=device)
    positions, places = numbers[0], numbers[1:own].view(-1)
    first_row = request = offset = None
    if packed:
        first_row = torch.empty(requests, dtype=torch.int64, device=device)
        request, offset = numbers[own:]
    own_tables = torch.empty((requests, num_blocks), dtype=torch.int32, device=device)
    query_start = torch.empty(requests + 1, dtype=torch.int64, device=device)
    contexts, last_rows = torch.empty((2, requests), dtype=torch.int64, device=device)
    _expand_kernel[(requests, 1 + cdiv(num_blocks, TABLE_BLOCK))](
        slots, starts, lengths, tables.token_ids, tables.block_tables, token_ids, positions, places,
        own_tables, query_start, contexts, last_rows, first_row, request, offset, requests, most,
        count, tables.token_ids.stride(0), tables.block_tables.stride(0), num_blocks,
        tables.last_position, tables.block_size,
        None if mask_token is None else tables.num_tokens, mask_token or 0, tables.window_column,
        block_m=next_power_of_2(most), block_b=TABLE_BLOCK,
        block_r=next_power_of_2(requests) if packed else 1, num_warps=4, **options(device),
    )  # fmt: skip
    inputs = tables.inputs(RowPlaces(query_start, positions, most), own_tables, contexts, places)
    first_row = query_start[:-1] if first_row is None else first_row
    return PlacedRows(token_ids, inputs, first_row, last_rows, request, offset)


@triton.jit
def _advance_kernel(
    slots, known, wanted, picked, vocabulary, tokens, all_tokens, starts, lengths, requests, index,
    tokens_stride, row_stride, last_place, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request = tl.program_id(0) * block + tl.arange(0, block)
    inside = request < requests
    token = tl.load(picked + request, mask=inside, other=0)
    if vocabulary is not None:
        token = tl.load(vocabulary + token, mask=inside, other=0)
    start = tl.load(known + request, mask=inside, other=0) + index
    slot = tl.load(slots + request, mask=inside, other=0)
    more = tl.load(wanted + request, mask=inside, other=0) > index + 1
    tl.store(tokens + request * tokens_stride + index, token, mask=inside)
    place = all_tokens + slot * row_stride + tl.minimum(start, last_place)
    tl.store(place, token.to(tl.int32), mask=inside)
    tl.store(starts + request, start, mask=inside)
    tl.store(lengths + request, more.to(tl.int64), mask=inside)


def advance_drafts(
    tables: RequestTables,
    slots: Tensor,
    known: Tensor,
    wanted: Tensor,
    picked: Tensor,
    vocabulary: Tensor | None,
    tokens: Tensor,
    index: int,
) -> tuple[Tensor, Tensor]:
    starts, lengths = torch.empty((2, len(slots)), dtype=torch.int64, device=slots.device)
    slots, known, wanted, picked = dense(slots, known, wanted, picked)
    block = 32
    _advance_kernel[(cdiv(len(slots), block),)](
        slots, known, wanted, picked, vocabulary, tokens, tables.token_ids, starts, lengths,
        len(slots), index, tokens.stride(0), tables.token_ids.stride(0), tables.last_position + 1,
        block=block, num_warps=1, **options(slots.device),
    )  # fmt: skip
    return starts, lengths


@triton.jit
def _chances(confidences, rates, bins, factor, inside):
    confidence = tl.load(confidences, mask=inside, other=0.0)
    is_known = (confidence >= 0) & (confidence < 1)
    place = tl.minimum((tl.where(is_known, confidence, 1.0) * bins).to(tl.int32), bins - 1)
    return tl.minimum(tl.load(rates + place) * factor, 1.0)


@triton.jit(do_not_specialize=["num_rows"])
def _trim_kernel(
    confidences, wanted, factors, rates, known, kept, requests, width, num_rows, bins,
    request_stride, place_stride, block_r: tl.constexpr, block_k: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (request): the ranks of its tokens, each computed by counting those before it."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request = tl.program_id(0)
    others, places = tl.arange(0, block_r), tl.arange(0, block_k)
    there = others < requests
    spare = num_rows - tl.sum(tl.load(known + others, mask=there, other=0))
    limits = tl.load(wanted + others, mask=there, other=0)
    scales = tl.load(factors + others, mask=there, other=0).to(tl.float32) * PART
    own_scale = tl.load(factors + request).to(tl.float32) * PART
    own, survival = tl.zeros((block_k,), tl.float32), tl.full((), 1.0, tl.float32)
    for place in range(width):
        cell = confidences + request * request_stride + place * place_stride
        survival *= _chances(cell, rates, bins, own_scale, True)
        own = tl.where(places == place, survival, own)
    ranks = tl.zeros((block_k,), tl.int32)
    survivals = tl.full((block_r,), 1.0, tl.float32)
    for place in range(width):
        cells = confidences + others * request_stride + place * place_stride
        survivals *= _chances(cells, rates, bins, scales, there)
        sooner = (place < places)[:, None] | ((place == places)[:, None] & (others < request)[None])
        theirs, mine = survivals[None, :], own[:, None]
        first = (theirs > mine) | ((theirs == mine) & sooner)
        ranks += tl.sum((first & (place < limits)[None, :]).to(tl.int32), axis=1)
    stays = (ranks < spare) & (places < tl.load(wanted + request))
    tl.store(kept + request, tl.sum(stays.to(tl.int64)))


def trim_drafts(
    confidences: Tensor,
    wanted: Tensor,
    factors: Tensor,
    rates: Tensor,
    known: Tensor,
    num_rows: int,
) -> Tensor:
    requests, width = confidences.shape
    kept = torch.empty_like(wanted)
    wanted, factors, known = dense(wanted, factors, known)
    _trim_kernel[(requests,)](
        confidences, wanted, factors, rates, known, kept, requests, width, num_rows, len(rates),
        *confidences.stride(), block_r=next_power_of_2(requests),
        block_k=next_power_of_2(width), **options(confidences.device),
    )  # fmt: skip
    return kept


@triton.jit
def _commit_kernel(
    slots, num_new, at_end, tokens, counts, num_accepted, all_tokens, num_tokens, num_computed,
    gained, accepted, row_stride, last_place, width: tl.constexpr, block_w: tl.constexpr,
    counting: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (request). Without `counting` only tokens are written."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    count = tl.load(counts + request)
    if counting:
        ends = tl.load(at_end + request).to(tl.int64)
        count *= ends
    known = tl.load(num_tokens + slot)
    column = tl.arange(0, block_w)
    inside = (column < width) & (column < count)
    token = tl.load(tokens + request * width + column, mask=inside, other=0)
    place = all_tokens + slot * row_stride + tl.minimum(known + column, last_place)
    tl.store(place, token.to(tl.int32), mask=inside)
    if counting:
        new = tl.load(num_accepted + request) * ends
        tl.store(gained + request, count)
        tl.store(accepted + request, new)
        # Several padding requests may share a slot: they store the values that it already has.
        tl.store(num_tokens + slot, known + count)
        new += tl.load(num_new + request)
        tl.store(num_computed + slot, tl.load(num_computed + slot) + new)


def write_tokens(tables: RequestTables, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    if tokens.numel():
        _commit(tables, slots, None, None, tokens, counts, None, None, None)


def commit(
    tables: RequestTables,
    slots: Tensor,
    num_new: Tensor,
    at_end: Tensor,
    tokens: Tensor,
    num_tokens: Tensor,
    num_accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    gained, accepted = torch.empty((2, len(slots)), dtype=torch.int64, device=slots.device)
    _commit(tables, slots, num_new, at_end, tokens, num_tokens, num_accepted, gained, accepted)
    return gained, accepted


def _commit(
    tables: RequestTables,
    slots: Tensor,
    num_new: Tensor | None,
    at_end: Tensor | None,
    tokens: Tensor,
    counts: Tensor,
    num_accepted: Tensor | None,
    gained: Tensor | None,
    accepted: Tensor | None,
) -> None:
    width = tokens.shape[1]
    slots, tokens, counts = dense(slots, tokens, counts)
    if num_new is not None and at_end is not None and num_accepted is not None:
        num_new, at_end, num_accepted = dense(num_new, at_end, num_accepted)
    _commit_kernel[(len(slots),)](
        slots, num_new, at_end, tokens, counts, num_accepted, tables.token_ids,
        tables.num_tokens, tables.num_computed, gained, accepted, tables.token_ids.stride(0),
        tables.last_position + 1, width=width, block_w=next_power_of_2(width),
        counting=gained is not None, num_warps=1, **options(slots.device),
    )  # fmt: skip


@triton.jit
def _keep_path_kernel(
    slots, roots, path, counts, all_tables, pages, tables_stride, path_stride, page_stride, width,
    block_size, numbers, block_w: tl.constexpr, block_n: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (request, page, part of a token's numbers)."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request, page = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, block_w)
    count = tl.load(counts + request)
    inside = (index < width) & (index <= count)
    node = tl.load(path + request * path_stride + index, mask=inside, other=0)
    moves = inside & (node != index)
    if tl.max(moves.to(tl.int32), axis=0) > 0:
        root = tl.load(roots + request)
        table = all_tables + tl.load(slots + request) * tables_stride
        source, target = root + node, root + index
        from_block = tl.load(table + source // block_size, mask=moves, other=0).to(tl.int64)
        to_block = tl.load(table + target // block_size, mask=moves, other=0).to(tl.int64)
        place = from_block * block_size + source % block_size
        goal = to_block * block_size + target % block_size
        number = tl.program_id(2) * block_n + tl.arange(0, block_n)
        moved = moves[:, None] & (number < numbers)[None, :]
        own = pages + page.to(tl.int64) * page_stride + number[None, :]
        value = tl.load(own + (place * numbers)[:, None], mask=moved, other=0.0)
        tl.debug_barrier()  # the place of one token may be the destination of another
        tl.store(own + (goal * numbers)[:, None], value, mask=moved)


def keep_path(
    tables: RequestTables,
    slots: Tensor,
    roots: Tensor,
    path: Tensor,
    counts: Tensor,
    pages: Tensor,
    windowed: bool = False,
) -> None:
    assert pages.is_contiguous()
    assert path.stride(1) == 1
    slots, roots, counts = dense(slots, roots, counts)
    own_tables = tables.block_tables[:, tables.window_column if windowed else 0 :]
    numbers, width = pages.shape[3] * pages.shape[4], path.shape[1]
    block_n = min(256, next_power_of_2(numbers))
    _keep_path_kernel[(len(slots), len(pages), cdiv(numbers, block_n))](
        slots, roots, path, counts, own_tables, pages, tables.block_tables.stride(0),
        path.stride(0), pages.stride(0), width, tables.block_size, numbers,
        block_w=next_power_of_2(width), block_n=block_n, num_warps=4,
        **options(slots.device),
    )  # fmt: skip


@triton.jit
def _timestamp_kernel(out):
    tl.store(out, globaltimer())


def timestamp(device: torch.device) -> Tensor | int:
    """Read the GPU's clock, so that the parts of a captured graph can be timed."""
    if device.type == "cpu":  # the interpreter has no clock
        return timestamp_of_host(device)
    out = torch.empty((), dtype=torch.int64, device=device)
    _timestamp_kernel[(1,)](out, num_warps=1)
    return out


class TritonPreparation(ReferencePreparation):
    """The Triton backend."""

    expand_rows = staticmethod(expand_rows)
    advance_drafts = staticmethod(advance_drafts)
    trim_drafts = staticmethod(trim_drafts)
    write_tokens = staticmethod(write_tokens)
    commit = staticmethod(commit)
    keep_path = staticmethod(keep_path)
    pack_results = staticmethod(pack_results)
    timestamp = staticmethod(timestamp)


PREPARATION = TritonPreparation()
