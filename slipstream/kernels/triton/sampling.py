"""Sampling and verification: the chain of kernels after the LM head.

    scan        one read of all logits, with several programs for each row (`sampling_scan.py`)
    thresholds  of top_k, top_p and min_p, if a request of the batch has some
    weigh, mass for block verification (`sampling_blocks.py`)
    draw        a sample for every row of coupled requests, if there are some
    accept      verification of every draft; for greedy and coupled requests this is all
                (`sampling_verdict.py`)
    race        the last token of sampled requests: one row per request, several programs

The host never waits for the device, and a row's bits do not depend on the other rows: chunks have
a fixed size, and every sum has one order.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from slipstream.kernels.sampling import SampleRows, SamplingNeeds, SamplingOps, SamplingSlots
from slipstream.kernels.triton.launch import cdiv, dense, next_power_of_2, options
from slipstream.kernels.triton.sampling_blocks import mass_kernel, weigh_kernel
from slipstream.kernels.triton.sampling_draft import draft_choice_kernel, draft_race_kernel
from slipstream.kernels.triton.sampling_scan import scan_kernel
from slipstream.kernels.triton.sampling_thresholds import thresholds_kernel
from slipstream.kernels.triton.sampling_verdict import (
    accept_kernel,
    commit_kernel,
    draw_kernel,
    race_kernel,
)

ALIGNMENT = 16
NO_COLUMN = 0x7FFFFFFF
_COLUMNS = WeakIdKeyDictionary()


@dataclass(frozen=True)
class SamplingTiles:
    """How rows are split, whatever their number: tokens of a chunk and of a group, and warps."""

    block: int = 2048
    group: int = 64
    groups_at_once: int = 64
    scan_warps: int = 4
    race_warps: int = 4
    threshold_warps: int = 8


TILES = SamplingTiles()


@dataclass(frozen=True, eq=False)
class Scan:
    """The results of the scan.

    Attributes:
        source: the logits to sample from, [N, V or more], processed if a request needs it.
        peaks: [N, chunks], the largest logit before processing, +inf if one is NaN; None: not
            computed.
        largest, choice, total: [N, chunks], largest logit, its token and sum of weights.
        mass: [N, chunks], the sums of weights at temperature 1; None: not computed.
        facts: [N, 4], see `row_facts`, for batches with truncations; else None.
    """

    source: Tensor
    peaks: Tensor | None
    largest: Tensor
    choice: Tensor
    total: Tensor
    mass: Tensor | None
    facts: Tensor | None
    chunks: int

    @property
    def block_s(self) -> int:
        return int(next_power_of_2(self.chunks))


def verify(
    logits: Tensor,
    rows: SampleRows,
    state: SamplingSlots,
    needs: SamplingNeeds,
    rates: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device, vocab_size = logits.device, logits.shape[1]
    requests, most_drafts = rows.draft_tokens.shape
    width = most_drafts + 1
    token_ids = torch.empty((requests, width), dtype=torch.int64, device=device)
    num_tokens = torch.empty(requests, dtype=torch.int64, device=device)
    num_accepted = torch.empty_like(num_tokens)
    largest = torch.empty((requests, width), dtype=torch.float32, device=device)
    if not requests:
        return token_ids, num_tokens, num_accepted, largest
    rows = _dense_rows(rows)
    scanned = _scan(_aligned(logits), rows, state, needs, vocab_size, with_peaks=True)
    chunks, launch = scanned.chunks, options(device)
    last = torch.empty((requests, 3), dtype=torch.int32, device=device)
    last_facts = torch.empty((requests, 4), dtype=torch.float32, device=device)
    arrivals = torch.empty(requests, dtype=torch.int32, device=device)
    probs = rows.draft_probs if most_drafts else None
    columns = None
    if probs is not None and rows.draft_vocabulary is not None:
        columns = _columns(rows.draft_vocabulary, vocab_size)
    draft_strides, prefixes, masses = _draft_strides(probs), None, None
    assert state.ints.stride(1) == state.floats.stride(1) == 1
    numbers = (state.ints, state.floats, state.ints.stride(0), state.floats.stride(0))
    one_hot, stride = rows.one_hot.view(torch.uint8), scanned.source.stride(0)
    certain = None
    if probs is not None and rows.certain is not None:
        certain = rows.certain.contiguous().view(torch.uint8)
    first_row, block_k = rows.layout and rows.layout[2], next_power_of_2(width)
    drafted = (rows.draft_tokens, rows.num_draft_tokens, one_hot, certain, probs, columns)
    place: dict[str, Any] = {"uniform_rows": rows.layout is None, "block_s": scanned.block_s}
    place |= {"truncated": scanned.facts is not None, **launch}
    if needs.block:
        prefixes = torch.empty((requests, 2, width), dtype=torch.float32, device=device)
        weigh_kernel[(requests,)](
            scanned.source, scanned.largest, scanned.total, scanned.facts, prefixes, first_row,
            rows.slots, *drafted, *numbers, stride, rows.draft_tokens.stride(0), *draft_strides,
            width, vocab_size, chunks, block_k=block_k, num_warps=4, **place,
        )  # fmt: skip
        if probs is not None and most_drafts > 1:
            masses = torch.empty((requests, width, chunks), dtype=torch.float32, device=device)
            mass_kernel[(chunks, most_drafts - 1, requests)](
                scanned.source, scanned.largest, scanned.total, scanned.facts, prefixes, masses,
                first_row, rows.slots, probs, columns, state.floats, state.floats.stride(0),
                stride, *draft_strides, width, vocab_size, block=TILES.block,
                num_warps=TILES.race_warps, **place,
            )  # fmt: skip
    drawn_scores = drawn_tokens = None
    if needs.coupled:
        drawn_scores, drawn_tokens = _draw(scanned, rows, state, vocab_size)
    accept_kernel[(requests,)](
        scanned.source, scanned.peaks, scanned.largest, scanned.choice, scanned.total,
        scanned.facts, token_ids, num_tokens, num_accepted, largest, last, last_facts, arrivals,
        prefixes, masses, drawn_scores, drawn_tokens, first_row, rows.slots, rows.positions,
        *drafted, *numbers, stride, rows.draft_tokens.stride(0), *draft_strides, width, vocab_size,
        chunks, None if rates is None else rates.contiguous(), sampled=needs.sampling,
        block_k=block_k, num_warps=4, **place,
    )  # fmt: skip
    if needs.sampling:
        scores = torch.empty((requests, 2, chunks), dtype=torch.float32, device=device)
        tokens = torch.empty((requests, 2, chunks), dtype=torch.int32, device=device)
        race_kernel[(chunks, requests)](
            scanned.source, last, last_facts, arrivals, prefixes, scores, tokens, token_ids,
            rows.slots, rows.positions, one_hot, certain, probs, columns, *numbers, stride,
            *draft_strides, width, vocab_size, coupled=needs.coupled, block=TILES.block,
            block_s=scanned.block_s,
            num_warps=TILES.race_warps, **launch,
        )  # fmt: skip
    return token_ids, num_tokens, num_accepted, largest


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
    requests, device = len(slots), logits.device
    vocab_size = min(logits.shape[1], num_legal_tokens)
    out = torch.empty(requests, dtype=torch.int64, device=device)
    if not requests:
        return out
    slots, positions = dense(slots, positions)
    logits, launch = _aligned(logits), options(device)
    sampled = probs_out is not None
    needs = SamplingNeeds(sampled, needs.top_k, needs.top_p, needs.min_p, coupled=needs.coupled)
    arrivals = torch.empty(requests, dtype=torch.int32, device=device) if sampled else None
    scanned = _scan(
        logits, _plain_rows(slots, positions), state, needs, vocab_size, arrivals,
        with_mass=confidence_out is not None,
    )  # fmt: skip
    chunks, block_s = scanned.chunks, scanned.block_s
    if probs_out is None:
        draft_choice_kernel[(requests,)](
            scanned.largest, scanned.choice, scanned.mass, confidence_out, out, vocab_size, chunks,
            block_s=block_s, num_warps=1, **launch,
        )  # fmt: skip
        return out
    assert probs_out.stride(1) == 1
    scores = torch.empty((requests, chunks), dtype=torch.float32, device=device)
    tokens = torch.empty((requests, chunks), dtype=torch.int32, device=device)
    draft_race_kernel[(chunks, requests)](
        logits, scanned.largest, scanned.choice, scanned.total, scanned.mass, scanned.facts,
        arrivals, scores, tokens, probs_out, confidence_out, out, slots, positions,
        vocabulary if needs.coupled else None, state.ints, state.floats, state.ints.stride(0),
        state.floats.stride(0), logits.stride(0), probs_out.stride(0), vocab_size,
        truncated=scanned.facts is not None, coupled=needs.coupled, block=TILES.block,
        block_s=block_s, num_warps=TILES.race_warps, **launch,
    )  # fmt: skip
    return out


def commit(slots: Tensor, token_ids: Tensor, num_tokens: Tensor, state: SamplingSlots) -> None:
    requests, width = token_ids.shape
    if not requests:
        return
    assert token_ids.stride(1) == 1
    slots, num_tokens = dense(slots, num_tokens)
    counts = state.output_counts
    commit_kernel[(requests,)](
        slots, token_ids, num_tokens, state.ints, state.ints.stride(0), counts,
        token_ids.stride(0), width, counts.shape[1] if counts is not None else 0,
        block_k=next_power_of_2(width), num_warps=1, **options(slots.device),
    )  # fmt: skip


def _scan(
    logits: Tensor,
    rows: SampleRows,
    state: SamplingSlots,
    needs: SamplingNeeds,
    vocab_size: int,
    arrivals: Tensor | None = None,
    with_mass: bool = False,
    with_peaks: bool = False,
) -> Scan:
    """Run the scan, and compute the thresholds if any row may have some."""
    num_rows, device, tiles = len(logits), logits.device, TILES
    chunks, groups = cdiv(vocab_size, tiles.block), cdiv(vocab_size, tiles.group)
    # Tensors of their own begin at aligned addresses. Parts of one would not always, and kernels
    # are compiled once more for others.
    largest = torch.empty((num_rows, chunks), dtype=torch.float32, device=device)
    total = torch.empty_like(largest)
    choice = torch.empty((num_rows, chunks), dtype=torch.int32, device=device)
    mass = torch.empty_like(total) if with_mass else None
    peaks = torch.empty_like(total) if with_peaks else None
    source, processed = logits, None
    if needs.penalties or needs.bias or needs.min_tokens or rows.allowed is not None:
        source = processed = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=device)
    group_largest = facts = None
    if needs.sampling and (needs.top_k or needs.top_p or needs.min_p):
        group_largest = torch.empty((num_rows, groups), dtype=torch.float32, device=device)
        facts = torch.empty((num_rows, 4), dtype=torch.float32, device=device)
    request, offset, _ = rows.layout or (None, None, None)
    drafts = rows.draft_tokens.shape[1]
    lengths = rows.num_draft_tokens if drafts and rows.layout is None else None
    place = {"uniform_rows": rows.layout is None, **options(device)}
    numbers = (state.ints, state.floats, state.ints.stride(0), state.floats.stride(0))
    prompt_mask = None if state.prompt_mask is None else state.prompt_mask.view(torch.uint8)
    scan_kernel[(chunks, num_rows)](
        logits, processed, peaks, largest, choice, total, mass, group_largest, arrivals, request,
        offset, rows.slots, lengths, rows.draft_tokens, rows.draft_tokens.stride(0), *numbers,
        state.stop_ids if needs.min_tokens else None, state.stop_ids.shape[1],
        state.output_counts if needs.penalties else None,
        prompt_mask if needs.penalties else None, state.bias if needs.bias else None,
        rows.allowed, logits.stride(0), 0 if rows.allowed is None else rows.allowed.stride(0),
        drafts + 1, vocab_size, groups, sampled=needs.sampling, block=tiles.block,
        group=tiles.group, num_warps=tiles.scan_warps, **place,
    )  # fmt: skip
    if facts is not None:
        selected = torch.empty((num_rows, groups), dtype=torch.int32, device=device)
        thresholds_kernel[(num_rows,)](
            source, group_largest, largest, total, selected, facts, request, offset, rows.slots,
            lengths, *numbers, source.stride(0), drafts + 1, vocab_size, groups, chunks,
            group=tiles.group, tile=tiles.groups_at_once, block_g=next_power_of_2(groups),
            block_s=next_power_of_2(chunks), num_warps=tiles.threshold_warps, **place,
        )  # fmt: skip
    return Scan(source, peaks, largest, choice, total, mass, facts, chunks)


def _draw(
    scanned: Scan, rows: SampleRows, state: SamplingSlots, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """(scores, tokens) [N, chunks]: the winners of the target's own races in the chunks of the rows
    of coupled requests."""
    num_rows, chunks, device = len(scanned.source), scanned.chunks, scanned.source.device
    scores = torch.empty((num_rows, chunks), dtype=torch.float32, device=device)
    tokens = torch.empty((num_rows, chunks), dtype=torch.int32, device=device)
    request, offset, _ = rows.layout or (None, None, None)
    draw_kernel[(chunks, num_rows)](
        scanned.source, scanned.largest, scanned.total, scanned.facts, scores, tokens, request,
        offset, rows.slots, rows.positions, rows.num_draft_tokens, state.ints, state.floats,
        state.ints.stride(0), state.floats.stride(0), scanned.source.stride(0),
        rows.max_draft_tokens + 1, vocab_size, uniform_rows=rows.layout is None,
        truncated=scanned.facts is not None, block=TILES.block, block_s=scanned.block_s,
        num_warps=TILES.race_warps, **options(device),
    )  # fmt: skip
    return scores, tokens


def _dense_rows(rows: SampleRows) -> SampleRows:
    """These rows with the strides that the kernels assume."""
    slots, positions, lengths, one_hot = dense(
        rows.slots, rows.positions, rows.num_draft_tokens, rows.one_hot
    )
    drafts, layout = rows.draft_tokens, rows.layout
    if layout is not None:
        request, offset, first_row = dense(*layout)
        layout = request, offset, first_row
    return replace(
        rows,
        layout=layout,
        slots=slots,
        positions=positions,
        draft_tokens=drafts if drafts.stride(1) == 1 else drafts.contiguous(),
        num_draft_tokens=lengths,
        one_hot=one_hot,
    )


def _plain_rows(slots: Tensor, positions: Tensor) -> SampleRows:
    """One row for each request, without drafts."""
    none = slots.new_empty((len(slots), 0))
    return SampleRows(slots, positions, none, slots, slots)


def _aligned(logits: Tensor) -> Tensor:
    """Logits whose rows begin at aligned addresses: the alignment determines how rows are loaded,
    and so the order of sums."""
    assert logits.stride(1) == 1
    return logits.clone() if logits.data_ptr() % ALIGNMENT else logits


def _draft_strides(probs: Tensor | None) -> tuple[int, int, int]:
    """Strides of requests and places, and the number of columns."""
    if probs is None:
        return 0, 0, 0
    assert probs.stride(2) == 1
    return probs.stride(0), probs.stride(1), probs.shape[2]


def _columns(vocabulary: Tensor, vocab_size: int) -> Tensor:
    """[V] int32, the column of each token in a reduced vocabulary; NO_COLUMN if it has none.

    Cached as long as the vocabulary lives, which therefore must not change.
    """
    columns: Tensor | None = _COLUMNS.get(vocabulary)  # type: ignore[no-untyped-call]
    if columns is None or len(columns) != vocab_size:
        columns = torch.full((vocab_size,), NO_COLUMN, dtype=torch.int32, device=vocabulary.device)
        order = torch.arange(len(vocabulary), dtype=torch.int32, device=vocabulary.device)
        columns.scatter_(0, vocabulary, order)
        # A result of a captured op has no values until the graph is replayed.
        if not (vocabulary.is_cuda and torch.cuda.is_current_stream_capturing()):
            _COLUMNS[vocabulary] = columns
    return columns


SAMPLING = SamplingOps(verify=verify, draft=draft, commit=commit)
