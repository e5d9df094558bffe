"""Sampling and verification in C++ (`csrc/sampling*.cpp`).

C++ checks dtypes (`TypeError`), shapes and strides (`ValueError`).
"""

from functools import cache

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.devices import kept
from slipstream.kernels.sampling import SampleRows, SamplingNeeds, SamplingOps, SamplingSlots


def verify(
    logits: Tensor,
    rows: SampleRows,
    state: SamplingSlots,
    needs: SamplingNeeds,
    rates: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    requests, most_drafts = rows.draft_tokens.shape
    token_ids = torch.empty((requests, most_drafts + 1), dtype=torch.int64)
    numbers = torch.empty((2, requests), dtype=torch.int64)
    largest = torch.empty((requests, most_drafts + 1), dtype=torch.float32)
    if requests:
        cpp.verify(
            _lines(logits), _rows(rows), _slots(state), _needs(needs), _dense(rates), token_ids,
            numbers, largest,
        )  # fmt: skip
    return token_ids, numbers[0], numbers[1], largest


def draft(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: SamplingSlots,
    needs: SamplingNeeds,
    num_legal_tokens: int,
    probs_out: Tensor | None,
    confidence_out: Tensor | None,
    vocabulary: Tensor | None,
) -> Tensor:
    requests, num_tokens = slots.shape[0], min(logits.shape[1], num_legal_tokens)
    out = torch.empty(requests, dtype=torch.int64)
    if not requests:
        return out
    logits = _lines(logits.float())
    if probs_out is None:
        cpp.best_tokens(logits, num_tokens, confidence_out, out)
    else:
        cpp.draft(
            logits, num_tokens, slots.contiguous(), positions.contiguous(), _slots(state),
            _needs(needs), probs_out, confidence_out,
            None if vocabulary is None else vocabulary[:num_tokens].contiguous(), out,
        )  # fmt: skip
    return out


def commit(slots: Tensor, token_ids: Tensor, num_tokens: Tensor, state: SamplingSlots) -> None:
    cpp.commit_sampling(
        slots.contiguous(), token_ids.contiguous(), num_tokens.contiguous(), _slots(state)
    )


def _lines(matrix: Tensor) -> Tensor:
    """A matrix whose rows are contiguous; there may be gaps between rows."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _rows(rows: SampleRows) -> cpp.RowTensors:
    request, offset, first_row = rows.layout or (None, None, None)
    return cpp.RowTensors(
        rows.slots.contiguous(), rows.positions.contiguous(), rows.draft_tokens.contiguous(),
        rows.num_draft_tokens.contiguous(), rows.one_hot.contiguous(), _dense(request),
        _dense(offset), _dense(first_row),
        None if rows.draft_probs is None else _lines(rows.draft_probs),
        _dense(rows.draft_vocabulary), None if rows.allowed is None else _lines(rows.allowed),
        _dense(rows.certain),
    )  # fmt: skip


@kept
def _slots(state: SamplingSlots) -> cpp.SlotTensors:
    """The C++ object of the state, which lives as long as the state does."""
    return cpp.SlotTensors(
        state.ints, state.floats, state.stop_ids, state.output_counts, state.prompt_mask,
        state.bias,
    )  # fmt: skip


@cache
def _needs(needs: SamplingNeeds) -> cpp.Needs:
    return cpp.Needs(
        needs.sampling, needs.top_k, needs.top_p, needs.min_p, needs.penalties, needs.bias,
        needs.min_tokens, needs.block, needs.coupled,
    )  # fmt: skip


SAMPLING = SamplingOps(verify=verify, draft=draft, commit=commit)
