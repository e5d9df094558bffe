"""Embeddings, positions and masks of the rows of a pass that belong to images."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.core.spans import Span, end_of_spans
from slipstream.kernels.devices import send
from slipstream.layers.stack import StreamAddends
from slipstream.models.decoder import Decoder
from slipstream.models.vision.tower import SpanEmbeddings
from slipstream.runner.rows import PromptRows, RowLayout


def with_offsets(layout: RowLayout, offsets: Tensor) -> RowLayout:
    """Shift the position ids of rows after images by each request's offset, [R] int64."""
    rows = layout.inputs.rows
    positions = rows.positions + layout.of_requests(offsets)
    places = rows.in_context
    # Wrong for rows before the end of an image; `with_axes` replaces these.
    rows = replace(rows, positions=positions, places=places)
    return replace(layout, inputs=replace(layout.inputs, rows=rows))


def with_axes(
    network: Decoder, layout: RowLayout, prompts: Sequence[PromptRows | None]
) -> RowLayout:
    """Set the M-RoPE positions of each request's rows up to the end of its last image."""
    found: list[Tensor] = []
    index: list[Tensor] = []
    for first_row, prompt in zip(layout.row_starts, prompts, strict=False):
        if prompt is not None:
            end = min(prompt.end, end_of_spans(prompt.spans))
            found.append(rope_axes(prompt.spans, prompt.first, end))
            index.append(torch.arange(first_row, first_row + end - prompt.first))
    inputs = layout.inputs
    device = inputs.rows.positions.device
    composed = network.ropes.compose(send(torch.cat(found, dim=1), device))
    positions = inputs.rows.positions.index_copy(0, send(torch.cat(index), device), composed)
    return replace(layout, inputs=replace(inputs, rows=replace(inputs.rows, positions=positions)))


def with_bidirectional_spans(layout: RowLayout, prompts: Sequence[PromptRows | None]) -> RowLayout:
    """Let all rows of an image attend to each other, for spans with bidirectional attention."""
    ends: list[Tensor] = []
    index: list[Tensor] = []
    for first_row, prompt in zip(layout.row_starts, prompts, strict=False):
        if prompt is None:
            continue
        for span, first, end in prompt.pieces:
            if span.whole:
                index.append(torch.arange(first, end) + (first_row - prompt.first))
                ends.append(torch.full((end - first,), span.end - 1))
    if not index:
        return layout
    inputs = layout.inputs
    places = inputs.rows.in_context
    to = places.device
    last = places.index_copy(0, send(torch.cat(index), to), send(torch.cat(ends), to))
    return replace(layout, inputs=replace(inputs, sees=replace(inputs.sees, last_seen=last)))


def embed(
    network: Decoder, layout: RowLayout, prompts: Sequence[PromptRows | None]
) -> tuple[Tensor, Tensor | None, StreamAddends | None]:
    """The network's token ids [T], its input embeddings [T, hidden_size], and addends to the
    outputs of its first layers. The latter two are None if no row belongs to an image."""
    token_ids = layout.token_ids
    if not prompts:
        return token_ids, None, None
    index: list[Tensor] = []
    rows: list[Tensor] = []
    added: list[Tensor] = []
    for first_row, prompt in zip(layout.row_starts, prompts, strict=False):
        if prompt is None:
            continue
        for span, first, end in prompt.pieces:
            assert isinstance(span.embedded, SpanEmbeddings)
            places, own = _replaced(span, first - span.start, end - span.start)
            index.append(places + (span.start + first_row - prompt.first))
            rows.append(span.embedded.rows[own])
            added.append(span.embedded.added[:, own])
    if not index:
        return token_ids, None, None
    embedded = network.embed(token_ids)
    device, dtype = embedded.device, embedded.dtype
    places = send(torch.cat(index), device)
    if network.config.layer_inputs is not None:
        token_ids = token_ids.index_fill(0, places, network.config.layer_inputs.of_images)
    embedded = embedded.index_copy(0, places, send(_joined(rows, 0), device).to(dtype))
    values = _joined(added, 1)
    if not len(values):
        return token_ids, embedded, None
    return token_ids, embedded, StreamAddends(places, send(values, device).to(dtype))


def _replaced(span: Span, first: int, end: int) -> tuple[Tensor, slice | Tensor]:
    """Which of an image's tokens `first` to before `end` get embeddings, and which ones."""
    places = torch.arange(first, end)
    if not span.row_ends:
        return places, slice(first, end)
    across = span.grid[1] + 1
    places = places[places % across < span.grid[1]]
    return places, places - places // across


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat` that does not copy a single part, which may have tens of megabytes."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def rope_axes(spans: Sequence[Span], first: int, end: int) -> Tensor:
    """M-RoPE positions of a prompt's tokens, [3, end - first] int64: time, row and column.

    Text tokens advance all three axes by one. All tokens of an image have one time position; text
    continues at the image's start plus its longer side.
    """
    axes = torch.arange(first, end).repeat(3, 1)
    offset = 0
    for span in spans:
        inside = axes[:, max(span.start - first, 0) : max(span.end - first, 0)]
        if inside.shape[1]:
            place = torch.arange(max(first, span.start), min(end, span.end)) - span.start
            start, columns = span.start + offset, span.grid[1]
            inside[0] = start
            inside[1] = start + place // columns
            inside[2] = start + place % columns
        change = max(span.grid) - span.length
        axes[:, max(span.end - first, 0) :] += change
        offset += change
    return axes
