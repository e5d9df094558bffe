"""Batch preparation in plain torch; see `kernels/preparation.py`."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from time import perf_counter_ns

import torch
from torch import Tensor

from slipstream.core.batch import FACTOR_PARTS
from slipstream.kernels.devices import send
from slipstream.kernels.pass_inputs import RowPlaces
from slipstream.kernels.preparation import PlacedRows, PreparationOps, RequestTables


def expand_rows(
    tables: RequestTables,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    most: int,
    mask_token: int | None = None,
    num_rows: int | None = None,
) -> PlacedRows:
    if num_rows is None:
        query_start = torch.arange(len(slots) + 1, device=slots.device) * most
        row = torch.arange(len(slots) * most, device=slots.device)
        request, offset = row // most, row % most
    else:
        query_start = _packed_starts(lengths, most, num_rows)
        row = torch.arange(num_rows, device=slots.device)
        request = torch.searchsorted(query_start[1:], row, right=True)
        offset = row - query_start[request]
    positions = (starts[request] + offset).clamp_max(tables.last_position)
    row_slots = slots[request]
    places = torch.where(offset < lengths[request], _all_places(tables, row_slots, positions), -1)
    inputs = tables.inputs(
        RowPlaces(query_start, positions, max_rows=most),
        tables.block_tables[slots],
        torch.where(lengths > 0, starts + lengths, 0),
        places.flatten(),
    )
    first_row = query_start[:-1].clamp_max(len(row) - 1)  # of requests without rows, any
    last_row = first_row + (lengths - 1).clamp_min(0)
    token_ids = tables.token_ids[row_slots, positions]
    if mask_token is not None:
        token_ids = token_ids.masked_fill(positions >= tables.num_tokens[row_slots], mask_token)
    if num_rows is None:
        return PlacedRows(token_ids, inputs, first_row, last_row)
    return PlacedRows(token_ids, inputs, first_row, last_row, request, offset)


def _packed_starts(lengths: Tensor, most: int, num_rows: int) -> Tensor:
    """[R + 1] int64: the first row of each request, then `num_rows`. Rows beyond the sum of
    `lengths` [R] fill up the last requests, to at most `most` rows each."""
    left = num_rows - lengths.sum()
    room = (most - lengths).flip(0).cumsum(0).flip(0)  # of a request and of those after it
    starts = lengths.cumsum(0) - lengths + (left - room).clamp_min(0)
    return torch.cat((starts, torch.full_like(starts[:1], num_rows)))


def place_rows(
    tables: RequestTables,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rereads: Tensor | None = None,
    mask_token: int | None = None,
    counts: Sequence[int] = (),
) -> PlacedRows:
    row_starts = [0, *accumulate(counts or lengths.tolist())]
    query_start = send(torch.tensor(row_starts), slots.device)
    request = torch.repeat_interleave(lengths, output_size=row_starts[-1])
    offset = torch.arange(row_starts[-1], device=slots.device) - query_start[request]
    row_slots, positions = slots[request], starts[request] + offset
    places = _all_places(tables, row_slots, positions)
    if rereads is not None:
        places = torch.where(offset < rereads[request], -1, places)
    most = max(end - start for start, end in pairwise(row_starts))
    inputs = tables.inputs(
        RowPlaces(query_start, positions, max_rows=most),
        tables.block_tables[slots],
        starts + lengths,
        places.flatten(),
    )
    last_row = (query_start[1:] - 1).clamp_min(0)
    token_ids = tables.token_ids[row_slots, positions]
    if mask_token is not None:
        token_ids = token_ids.masked_fill(positions >= tables.num_tokens[row_slots], mask_token)
    return PlacedRows(token_ids, inputs, query_start[:-1], last_row, request, offset, row_starts)


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
    token = picked if vocabulary is None else vocabulary[picked]
    tokens[:, index] = token
    starts = known + index
    _write(tables, slots, starts, token)
    return starts, (wanted > index + 1).to(torch.int64)


def trim_drafts(
    confidences: Tensor,
    wanted: Tensor,
    factors: Tensor,
    rates: Tensor,
    known: Tensor,
    num_rows: int,
) -> Tensor:
    last = len(rates) - 1
    inside = (confidences >= 0) & (confidences < 1)
    bins = torch.where(inside, confidences, 0).mul(len(rates)).long().clamp_max(last)
    chances = rates[torch.where(inside, bins, last)] * (factors.unsqueeze(1) / FACTOR_PARTS)
    survivals = [torch.ones_like(rates[:1])]
    for chance in chances.clamp_max(1).unbind(1):
        survivals.append(survivals[-1] * chance)
    by_place = torch.stack(survivals[1:])  # [K, R]
    place = torch.arange(len(by_place), device=wanted.device).unsqueeze(1)
    by_place = by_place.masked_fill(place >= wanted, -1)
    order = by_place.flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    spare = num_rows - known.sum()
    return ((rank < spare).view_as(by_place) & (place < wanted)).sum(0)


def write_tokens(tables: RequestTables, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    column = torch.arange(tokens.shape[1], device=tokens.device)
    place = torch.minimum(column, (counts - 1).clamp_min(0).unsqueeze(1))
    positions = tables.num_tokens[slots].unsqueeze(1) + place
    _write(tables, slots.unsqueeze(1), positions, tokens.gather(1, place))


def commit(
    tables: RequestTables,
    slots: Tensor,
    num_new: Tensor,
    at_end: Tensor,
    tokens: Tensor,
    num_tokens: Tensor,
    num_accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    gained, accepted = num_tokens * at_end, num_accepted * at_end
    write_tokens(tables, slots, tokens, gained)
    tables.num_tokens.index_add_(0, slots, gained)
    tables.num_computed.index_add_(0, slots, num_new + accepted)
    return gained, accepted


def pack_results(
    tokens: Tensor,
    largest: Tensor,
    more: Tensor | None,
    counts: Sequence[Tensor],
    times: Sequence[Tensor | int],
) -> Tensor:
    stamps = [it for it in times if isinstance(it, Tensor)]
    row = torch.stack(stamps) if stamps else send(torch.tensor(times), tokens.device)
    parts = [tokens, largest, *(() if more is None else (more,))]
    return torch.cat(
        (*map(_bits, parts), torch.stack([*counts], 1), row.expand(len(tokens), -1)), 1
    )


def _bits(numbers: Tensor) -> Tensor:
    """float32 -> int64, which `cat` would convert to more slowly; int64 as it is."""
    return numbers.view(torch.int32).long() if numbers.dtype == torch.float32 else numbers


def keep_path(
    tables: RequestTables,
    slots: Tensor,
    roots: Tensor,
    path: Tensor,
    counts: Tensor,
    pages: Tensor,
    windowed: bool = False,
) -> None:
    index = torch.arange(path.shape[1], device=path.device)
    moves = (index <= counts.unsqueeze(1)) & (path != index)
    tokens = roots.unsqueeze(1) + torch.stack((path, index.expand_as(path)))  # from, to
    request = torch.arange(len(slots), device=slots.device).unsqueeze(1).expand_as(path)[moves]
    source, target = tokens[0][moves], tokens[1][moves]
    flat = pages.flatten(1, 2)
    column = tables.window_column if windowed else 0
    flat[:, _places(tables, slots[request], target, column)] = flat[
        :, _places(tables, slots[request], source, column)
    ]


def _all_places(tables: RequestTables, slots: Tensor, tokens: Tensor) -> Tensor:
    """[num_tables, n]: `_places` by each block table."""
    columns = (0, tables.window_column)[: tables.num_tables]
    return torch.stack([_places(tables, slots, tokens, column) for column in columns])


def _places(tables: RequestTables, slots: Tensor, tokens: Tensor, column: int) -> Tensor:
    """[n]: cache slots of tokens [n] of the requests in slots [n], by the block table that
    begins at `column`."""
    blocks = tables.block_tables[slots, column + tokens // tables.block_size].long()
    return blocks * tables.block_size + tokens % tables.block_size


def _write(tables: RequestTables, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """Write ids at positions; ids beyond the last position go to a column that is never read."""
    last = tables.last_position + 1
    tables.token_ids[slots, positions.clamp_max(last)] = tokens.to(torch.int32)


def timestamp(device: torch.device) -> Tensor | int:
    if device.type != "cpu":
        return torch.zeros((), dtype=torch.int64, device=device)
    return perf_counter_ns()


class ReferencePreparation(PreparationOps):
    """Plain torch; base class of backends that have kernels for some ops only."""

    expand_rows = staticmethod(expand_rows)
    place_rows = staticmethod(place_rows)
    advance_drafts = staticmethod(advance_drafts)
    trim_drafts = staticmethod(trim_drafts)
    write_tokens = staticmethod(write_tokens)
    commit = staticmethod(commit)
    pack_results = staticmethod(pack_results)
    keep_path = staticmethod(keep_path)
    timestamp = staticmethod(timestamp)


PREPARATION = ReferencePreparation()
