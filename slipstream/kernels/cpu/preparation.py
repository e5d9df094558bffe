"""Batch preparation in C++ (`csrc/preparation.cpp`). Meanings and shapes: `kernels/preparation.py`.

A call is a few microseconds, most of them for the tensors that it makes: so results of a call share
memory, and what stays from call to call is looked at once.
"""

import operator
from itertools import accumulate
from weakref import WeakKeyDictionary

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.cpu.addresses import address, dense
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces
from slipstream.kernels.preparation import PlacedRows, PreparationOps, RequestTables
from slipstream.kernels.reference.preparation import timestamp

NO_TOKEN = -1
_TABLES: WeakKeyDictionary[RequestTables, cpp.Tables] = WeakKeyDictionary()


def expand_rows(
    tables: RequestTables,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    most: int,
    mask_token: int | None = None,
) -> PlacedRows:
    requests = slots.shape[0]
    rows, num_blocks = requests * most, tables.block_tables.shape[1]
    slots, starts, lengths = (_integers(it, requests) for it in (slots, starts, lengths))
    numbers = torch.empty(2 * rows + 3 * requests + 1, dtype=torch.int64)
    block_tables = torch.empty((requests, num_blocks), dtype=torch.int32)
    token_ids = torch.empty(rows, dtype=torch.int32)
    cpp.expand_rows(
        _handle(tables), requests, slots.data_ptr(), starts.data_ptr(), lengths.data_ptr(), most,
        NO_TOKEN if mask_token is None else mask_token, numbers.data_ptr(),
        block_tables.data_ptr(), token_ids.data_ptr(),
    )  # fmt: skip
    start = 2 * rows
    query_start = _part(numbers, start, requests + 1)
    context_lens = _part(numbers, start + requests + 1, requests)
    inputs = PassInputs(
        RowPlaces(query_start, _part(numbers, 0, rows), max_rows=most),
        Paging(block_tables, context_lens, _part(numbers, rows, rows)),
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
) -> PlacedRows:
    requests = slots.shape[0]
    slots, starts, lengths = (_integers(it, requests) for it in (slots, starts, lengths))
    if rereads is not None:
        rereads = _integers(rereads, requests)
    counts: list[int] = lengths.tolist()
    row_starts = [0, *accumulate(counts)]
    rows, num_blocks = row_starts[-1], tables.block_tables.shape[1]
    numbers = torch.empty(4 * rows + 3 * requests + 1, dtype=torch.int64)
    block_tables = torch.empty((requests, num_blocks), dtype=torch.int32)
    token_ids = torch.empty(rows, dtype=torch.int32)
    cpp.place_rows(
        _handle(tables), requests, slots.data_ptr(), starts.data_ptr(), lengths.data_ptr(), rows,
        address(rereads), NO_TOKEN if mask_token is None else mask_token, numbers.data_ptr(),
        block_tables.data_ptr(), token_ids.data_ptr(),
    )  # fmt: skip
    positions, places, request, offset, starts, _, context_lens, last_row = (
        numbers.split_with_sizes([rows] * 4 + [requests, 1, requests, requests])
    )
    query_start = _part(numbers, 4 * rows, requests + 1)
    inputs = PassInputs(
        RowPlaces(query_start, positions, max(counts)), Paging(block_tables, context_lens, places)
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
    requests, width = tokens.shape
    slots, known, wanted, picked = (
        _integers(it, requests) for it in (slots, known, wanted, picked)
    )
    assert tokens.dtype == torch.int64
    assert tokens.is_contiguous()
    assert 0 <= index < width
    vocabulary_size = 0
    if vocabulary is not None:
        vocabulary_size = vocabulary.shape[0]
        vocabulary = _integers(vocabulary, vocabulary_size)
    numbers = torch.empty(2 * requests, dtype=torch.int64)
    cpp.advance_drafts(
        _handle(tables), requests, slots.data_ptr(), known.data_ptr(), wanted.data_ptr(),
        picked.data_ptr(), address(vocabulary), vocabulary_size, tokens.data_ptr(), width, index,
        numbers.data_ptr(),
    )  # fmt: skip
    return _part(numbers, 0, requests), _part(numbers, requests, requests)


def write_tokens(tables: RequestTables, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    requests, width = tokens.shape
    slots, counts = _integers(slots, requests), _integers(counts, requests)
    tokens = dense(tokens, torch.int64, requests, width)
    cpp.write_tokens(
        _handle(tables), requests, slots.data_ptr(), tokens.data_ptr(), width, counts.data_ptr()
    )


def commit(
    tables: RequestTables,
    slots: Tensor,
    num_new: Tensor,
    at_end: Tensor,
    tokens: Tensor,
    num_tokens: Tensor,
    num_accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    requests, width = tokens.shape
    slots, num_new, num_tokens, num_accepted = (
        _integers(it, requests) for it in (slots, num_new, num_tokens, num_accepted)
    )
    at_end = dense(at_end, torch.bool, requests)
    tokens = dense(tokens, torch.int64, requests, width)
    gains = torch.empty(2 * requests, dtype=torch.int64)
    cpp.commit(
        _handle(tables), requests, slots.data_ptr(), num_new.data_ptr(), at_end.data_ptr(),
        tokens.data_ptr(), width, num_tokens.data_ptr(), num_accepted.data_ptr(), gains.data_ptr(),
    )  # fmt: skip
    return _part(gains, 0, requests), _part(gains, requests, requests)


def keep_path(
    tables: RequestTables,
    slots: Tensor,
    roots: Tensor,
    path: Tensor,
    counts: Tensor,
    pages: Tensor,
) -> None:
    requests, width = path.shape
    slots, roots, counts = (_integers(it, requests) for it in (slots, roots, counts))
    path = dense(path, torch.int64, requests, width)
    assert pages.is_cpu
    assert pages.is_contiguous()
    assert pages.shape[2] == tables.block_size
    token_bytes = pages.shape[3] * pages.shape[4] * pages.element_size()
    cpp.keep_path(
        _handle(tables), requests, slots.data_ptr(), roots.data_ptr(), path.data_ptr(), width,
        counts.data_ptr(), pages.data_ptr(), pages.shape[0],
        pages.shape[1] * pages.shape[2] * token_bytes, token_bytes,
    )  # fmt: skip


def _integers(tensor: Tensor, count: int) -> Tensor:
    """[count] int64, dense."""
    assert tensor.dtype == torch.int64
    assert tensor.shape == (count,)
    assert tensor.is_cpu
    return tensor.contiguous()


def _part(numbers: Tensor, start: int, size: int) -> Tensor:
    """A view of some of them: of all ways to ask for one the cheapest."""
    return numbers.as_strided((size,), (1,), start)


def _handle(tables: RequestTables) -> cpp.Tables:
    """Their addresses, which stay what they are as long as the tables do."""
    handle = _TABLES.get(tables)
    if handle is None:
        slots, columns = tables.token_ids.shape
        num_blocks = tables.block_tables.shape[1]
        token_ids, block_tables, num_tokens, num_computed = found = (
            dense(tables.token_ids, torch.int32, slots, columns),
            dense(tables.block_tables, torch.int32, slots, num_blocks),
            dense(tables.num_tokens, torch.int64, slots),
            dense(tables.num_computed, torch.int64, slots),
        )
        given = tables.token_ids, tables.block_tables, tables.num_tokens, tables.num_computed
        assert all(map(operator.is_, found, given)), "tables must be dense"
        handle = _TABLES[tables] = cpp.Tables(
            slots, token_ids.data_ptr(), columns, num_tokens.data_ptr(), num_computed.data_ptr(),
            block_tables.data_ptr(), num_blocks, tables.block_size,
        )  # fmt: skip
    return handle


def suffix_lookup(
    token_ids: Tensor, slots: Tensor, known: Tensor, width: int, shortest: int, longest: int
) -> tuple[Tensor, Tensor]:
    requests = slots.shape[0]
    assert token_ids.dtype == torch.int32
    assert token_ids.is_cpu
    assert token_ids.is_contiguous()
    slots, known = dense(slots, torch.int64, requests), dense(known, torch.int64, requests)
    tokens = torch.empty((requests, width), dtype=torch.int64)
    found = torch.empty(requests, dtype=torch.bool)
    cpp.suffix_lookup(
        token_ids.data_ptr(), *token_ids.shape, requests, slots.data_ptr(), known.data_ptr(), width,
        shortest, longest, tokens.data_ptr(), found.data_ptr(),
    )  # fmt: skip
    return tokens, found


PREPARATION = PreparationOps(
    expand_rows,
    place_rows,
    advance_drafts,
    write_tokens,
    commit,
    keep_path,
    suffix_lookup,
    timestamp,
)
