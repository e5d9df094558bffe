"""Batch preparation in C++ (`csrc/preparation.cpp`). Meanings and shapes: `kernels/preparation.py`.

A call takes a few microseconds, most of them for making tensors. So the results of a call share
memory, and C++ objects are kept from call to call. C++ checks dtypes (`TypeError`), shapes and
strides (`ValueError`).
"""

from collections.abc import Sequence
from itertools import accumulate

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.devices import kept
from slipstream.kernels.pass_inputs import RowPlaces
from slipstream.kernels.preparation import PlacedRows, RequestTables
from slipstream.kernels.reference import preparation as reference
from slipstream.kernels.reference.preparation import ReferencePreparation

NO_TOKEN = -1


def expand_rows(
    tables: RequestTables,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    most: int,
    mask_token: int | None = None,
    num_rows: int | None = None,
) -> PlacedRows:
    if num_rows is not None:  # only in captured steps, which CPUs run in tests alone
        return reference.expand_rows(tables, slots, starts, lengths, most, mask_token, num_rows)
    requests = slots.shape[0]
    rows, num_blocks = requests * most, tables.block_tables.shape[1]
    start = (1 + tables.num_tables) * rows
    numbers = torch.empty(start + 3 * requests + 1, dtype=torch.int64)
    block_tables = torch.empty((requests, num_blocks), dtype=torch.int32)
    token_ids = torch.empty(rows, dtype=torch.int32)
    cpp.expand_rows(
        _handle(tables), slots.contiguous(), starts.contiguous(), lengths.contiguous(), most,
        NO_TOKEN if mask_token is None else mask_token, numbers, block_tables, token_ids,
    )  # fmt: skip
    query_start = _part(numbers, start, requests + 1)
    context_lens = _part(numbers, start + requests + 1, requests)
    inputs = tables.inputs(
        RowPlaces(query_start, _part(numbers, 0, rows), max_rows=most),
        block_tables,
        context_lens,
        _part(numbers, rows, tables.num_tables * rows),
    )
    first_row = _part(numbers, start, requests)
    last_row = _part(numbers, start + 2 * requests + 1, requests)
    return PlacedRows(token_ids, inputs, first_row, last_row)


def place_rows(
    tables: RequestTables,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rereads: Tensor | None = None,
    mask_token: int | None = None,
    counts: Sequence[int] = (),
) -> PlacedRows:
    requests = slots.shape[0]
    counts = counts or lengths.tolist()
    row_starts = [0, *accumulate(counts)]
    rows, num_blocks = row_starts[-1], tables.block_tables.shape[1]
    num_places = tables.num_tables * rows
    start = num_places + 3 * rows
    numbers = torch.empty(start + 3 * requests + 1, dtype=torch.int64)
    block_tables = torch.empty((requests, num_blocks), dtype=torch.int32)
    token_ids = torch.empty(rows, dtype=torch.int32)
    cpp.place_rows(
        _handle(tables), slots.contiguous(), starts.contiguous(), lengths.contiguous(),
        None if rereads is None else rereads.contiguous(),
        NO_TOKEN if mask_token is None else mask_token, numbers, block_tables, token_ids,
    )  # fmt: skip
    positions, places, request, offset, starts, _, context_lens, last_row = (
        numbers.split_with_sizes([rows, num_places, rows, rows, requests, 1, requests, requests])
    )
    query_start = _part(numbers, start, requests + 1)
    inputs = tables.inputs(
        RowPlaces(query_start, positions, max(counts)), block_tables, context_lens, places
    )
    return PlacedRows(token_ids, inputs, starts, last_row, request, offset, row_starts)


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
    requests = slots.shape[0]
    numbers = torch.empty(2 * requests, dtype=torch.int64)
    cpp.advance_drafts(
        _handle(tables), slots.contiguous(), known.contiguous(), wanted.contiguous(),
        picked.contiguous(), None if vocabulary is None else vocabulary.contiguous(), tokens, index,
        numbers,
    )  # fmt: skip
    return _part(numbers, 0, requests), _part(numbers, requests, requests)


def write_tokens(tables: RequestTables, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    cpp.write_tokens(_handle(tables), slots.contiguous(), tokens.contiguous(), counts.contiguous())


def commit(
    tables: RequestTables,
    slots: Tensor,
    num_new: Tensor,
    at_end: Tensor,
    tokens: Tensor,
    num_tokens: Tensor,
    num_accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    requests = slots.shape[0]
    gains = torch.empty(2 * requests, dtype=torch.int64)
    cpp.commit(
        _handle(tables), slots.contiguous(), num_new.contiguous(), at_end.contiguous(),
        tokens.contiguous(), num_tokens.contiguous(), num_accepted.contiguous(), gains,
    )  # fmt: skip
    return _part(gains, 0, requests), _part(gains, requests, requests)


def pack_results(
    tokens: Tensor,
    largest: Tensor,
    more: Tensor | None,
    counts: Sequence[Tensor],
    times: Sequence[Tensor | int],
) -> Tensor:
    requests, width = tokens.shape
    extra = 0 if more is None else more.shape[1]
    out = torch.empty((requests, 2 * width + extra + len(counts) + len(times)), dtype=torch.int64)
    cpp.pack_results(
        tokens.contiguous(), largest.contiguous(), None if more is None else more.contiguous(),
        *[count.contiguous() for count in counts], *times, out,
    )  # fmt: skip
    return out


def keep_path(
    tables: RequestTables,
    slots: Tensor,
    roots: Tensor,
    path: Tensor,
    counts: Tensor,
    pages: Tensor,
    windowed: bool = False,
) -> None:
    cpp.keep_path(
        _handle(tables), slots.contiguous(), roots.contiguous(), path.contiguous(),
        counts.contiguous(), pages, windowed,
    )  # fmt: skip


def _part(numbers: Tensor, start: int, size: int) -> Tensor:
    """A view of some of the numbers, made in the cheapest way that torch has."""
    return numbers.as_strided((size,), (1,), start)


@kept
def _handle(tables: RequestTables) -> cpp.Tables:
    """The C++ object of the tables, which lives as long as they do."""
    return cpp.Tables(
        tables.token_ids, tables.num_tokens, tables.num_computed, tables.block_tables,
        tables.block_size, tables.window_column,
    )  # fmt: skip


class CppPreparation(ReferencePreparation):
    """The C++ backend. CPUs capture no steps, so they need no kernel that trims drafts."""

    expand_rows = staticmethod(expand_rows)
    place_rows = staticmethod(place_rows)
    advance_drafts = staticmethod(advance_drafts)
    write_tokens = staticmethod(write_tokens)
    commit = staticmethod(commit)
    pack_results = staticmethod(pack_results)
    keep_path = staticmethod(keep_path)


PREPARATION = CppPreparation()
