"""Sampling and verification in C++ (`csrc/sampling*.cpp`).

Tensors are handed over by their addresses: to convert one takes longer than what some of these ops
do. So dtypes, shapes and strides are checked here.
"""

from functools import cache
from weakref import WeakKeyDictionary

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.cpu.addresses import address, dense, lines
from slipstream.kernels.sampling import Needs, SampleRows, SamplingOps, SamplingSlots

_SLOTS: WeakKeyDictionary[SamplingSlots, cpp.SlotTensors] = WeakKeyDictionary()


def verify(
    logits: Tensor,
    rows: SampleRows,
    state: SamplingSlots,
    needs: Needs,
    rates: tuple[float, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    requests, most_drafts = rows.draft_tokens.shape
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty((requests, most_drafts + 1), dtype=torch.int64)
    numbers = torch.empty((2, requests), dtype=torch.int64)
    if requests:
        judged, kept = _rows(rows, num_rows, vocab_size)  # of what is kept it has the addresses
        logits = lines(logits, torch.float32)
        cpp.verify(
            logits.data_ptr(), logits.stride(0), vocab_size, judged,
            _slots(state, needs, vocab_size), _needs(needs), rates if most_drafts else (),
            token_ids.data_ptr(), numbers.data_ptr(), numbers.data_ptr() + 8 * requests,
        )  # fmt: skip
        del kept
    return token_ids, numbers[0], numbers[1]


def draft(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: SamplingSlots,
    needs: Needs,
    num_legal_tokens: int,
    probs_out: Tensor | None,
) -> Tensor:
    requests, num_tokens = slots.shape[0], min(logits.shape[1], num_legal_tokens)
    out = torch.empty(requests, dtype=torch.int64)
    if not requests:
        return out
    logits = lines(logits.float(), torch.float32)
    assert logits.shape[0] == requests
    matrix = logits.data_ptr(), logits.stride(0), num_tokens, requests
    if probs_out is None:
        cpp.best_tokens(*matrix, out.data_ptr())
        return out
    slots, positions = dense(slots, torch.int64, requests), dense(positions, torch.int64, requests)
    assert probs_out.shape == (requests, num_tokens)
    assert probs_out.dtype == torch.float32
    assert num_tokens <= 1 or probs_out.stride(1) == 1
    cpp.draft(
        *matrix, slots.data_ptr(), positions.data_ptr(), _slots(state), _needs(needs),
        probs_out.data_ptr(), probs_out.stride(0), out.data_ptr(),
    )  # fmt: skip
    return out


def commit(slots: Tensor, token_ids: Tensor, num_tokens: Tensor, state: SamplingSlots) -> None:
    requests, width = token_ids.shape
    slots = dense(slots, torch.int64, requests)
    num_tokens = dense(num_tokens, torch.int64, requests)
    token_ids = dense(token_ids, torch.int64, requests, width)
    cpp.commit_sampling(
        requests, slots.data_ptr(), token_ids.data_ptr(), width, num_tokens.data_ptr(),
        _slots(state),
    )  # fmt: skip


def _rows(rows: SampleRows, num_rows: int, vocab_size: int) -> tuple[cpp.DraftedRows, list[Tensor]]:
    """The rows, and the tensors whose addresses they have."""
    (requests, most_drafts), integers = rows.draft_tokens.shape, torch.int64
    kept = [
        dense(rows.slots, integers, requests),
        dense(rows.positions, integers, requests),
        dense(rows.draft_tokens, integers, requests, most_drafts),
        dense(rows.num_draft_tokens, integers, requests),
        dense(rows.one_hot, torch.bool, requests),
    ]
    judged = cpp.DraftedRows(num_rows, requests, most_drafts, *(it.data_ptr() for it in kept))
    if rows.layout is None:
        assert num_rows == requests * (most_drafts + 1)
    else:
        request, offset, first_row = rows.layout
        layout = [
            dense(request, integers, num_rows),
            dense(offset, integers, num_rows),
            dense(first_row, integers, requests),
        ]
        judged.set_layout(*(it.data_ptr() for it in layout))
        kept += layout
    if rows.draft_probs is not None and most_drafts:
        kept += _set_draft(judged, rows, rows.draft_probs)
    if rows.allowed is not None:
        allowed = lines(rows.allowed, torch.int32)
        assert allowed.shape == (num_rows, -(-vocab_size // 32))
        judged.set_allowed(allowed.data_ptr(), allowed.stride(0))
        kept.append(allowed)
    return judged, kept


def _set_draft(judged: cpp.DraftedRows, rows: SampleRows, probs: Tensor) -> list[Tensor]:
    """Hands over what drafts were sampled from; of rows without it all are certain."""
    requests, most_drafts, width = probs.shape
    assert (requests, most_drafts) == rows.draft_tokens.shape
    assert probs.dtype == torch.float32
    kept = [probs if probs.stride(2) == 1 or width == 1 else probs.contiguous()]
    vocabulary, certain = rows.draft_vocabulary, rows.certain
    if vocabulary is not None:
        kept.append(vocabulary := dense(vocabulary, torch.int64, width))
    if certain is not None:
        kept.append(certain := dense(certain, torch.bool, requests, most_drafts))
    judged.set_probs(
        kept[0].data_ptr(), kept[0].stride(0), kept[0].stride(1), width, address(vocabulary),
        address(certain),
    )  # fmt: skip
    return kept


def _slots(
    state: SamplingSlots, needs: Needs | None = None, vocab_size: int | None = None
) -> cpp.SlotTensors:
    """The state, checked where `needs` say that processors look at it."""
    counts, bias = state.output_counts, state.bias
    if needs is not None and needs.penalties:
        assert counts is not None
        assert state.prompt_mask is not None
        assert counts.shape[1] == state.prompt_mask.shape[1] == vocab_size
    if needs is not None and needs.bias:
        assert bias is not None
        assert bias.shape[1] == vocab_size
    handle = _SLOTS.get(state)
    if handle is None:
        handle = _SLOTS[state] = _slot_tensors(state)
    return handle


def _slot_tensors(state: SamplingSlots) -> cpp.SlotTensors:
    """Addresses, which stay what they are as long as `state` lives."""
    ints, floats, stop_ids = state.ints, state.floats, state.stop_ids
    assert ints.dtype == stop_ids.dtype == torch.int64
    assert floats.dtype == torch.float32
    assert ints.stride(1) == floats.stride(1) == 1
    assert stop_ids.is_contiguous()
    columns = 0
    for tensor in (state.output_counts, state.prompt_mask, state.bias):
        if tensor is not None:
            assert tensor.is_contiguous()
            columns = tensor.shape[1]
    assert ints.is_cpu
    assert len(ints) == len(floats) == len(stop_ids)
    return cpp.SlotTensors(
        len(ints), ints.data_ptr(), ints.stride(0), floats.data_ptr(), floats.stride(0),
        stop_ids.data_ptr(), stop_ids.shape[1], address(state.output_counts),
        address(state.prompt_mask), address(state.bias), columns,
    )  # fmt: skip


@cache
def _needs(needs: Needs) -> cpp.Needs:
    return cpp.Needs(
        needs.sampling, needs.top_k, needs.top_p, needs.min_p, needs.penalties, needs.bias,
        needs.min_tokens,
    )  # fmt: skip


SAMPLING = SamplingOps(verify=verify, draft=draft, commit=commit)
