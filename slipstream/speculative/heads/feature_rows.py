"""A base for drafters that run a small network over rows of (feature, next token).

The row of token t takes the token itself and the target's feature at t - 1, and predicts token
t + 1. Its keys and values stand in the slot of token t, so that a prefix alone determines its
blocks; token 0 has no row. A round is one pass over the rows of committed tokens that are new to
the drafter, whose last row gives draft token 1, and then K - 1 passes of a single row per request,
which takes what the network gave for the row before in place of a feature.

Rows of committed tokens wait as features in a buffer per slot until the next draft, at most K + 1
of them; where nothing is drafted for so long that the buffer is full, one pass computes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.cache.spec import LayerCache, ModelCache
from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.kernels.devices import upload
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.excerpts import Excerpt, ExcerptSizes, whole
from slipstream.runner.model_runner import Forward
from slipstream.runner.rows import PassRows, RowLayout, lay_out
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, Drafter, DrafterResources
from slipstream.speculative.heads.method import Head

FIRST_ROW = 1  # the first token that has one


class FeatureNetwork(Protocol):
    """The network of such a drafter.

    Attributes:
        feature_size: F, of what is kept of a token.
        head: over the tokens that are drafted.
    """

    @property
    def feature_size(self) -> int: ...

    @property
    def head(self) -> LanguageModelHead: ...

    def share(self, embedding: Embedding, head: LanguageModelHead) -> None:
        """Take from the target what this network lacks."""

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """[T, F], the features of rows of the target's pass (`Forward`)."""

    def __call__(
        self, token_ids: Tensor, features: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """token_ids [T], features [T, F] -> what enters the head [T, H], next features [T, F]."""


class FeatureRowsDrafter(Drafter):
    """Drafts in a chain.

    Args:
        most_accepted: draft tokens of a step that can be accepted; None: all.

    `_computed[slot]` counts the leading tokens whose rows this network has computed, token 0
    among them. `_features[slot, i]` is the feature for the row of token `_computed[slot] + i`; the
    last place of a slot takes what is dropped.
    """

    def __init__(
        self, head: Head[Any, Any], resources: DrafterResources, most_accepted: int | None = None
    ) -> None:
        super().__init__(resources.state)
        self._network: FeatureNetwork = head.network
        self._network.share(resources.target.embedding, resources.target.head)
        self._drafting, self._resources = head.sampling, resources
        state, layout = resources.state, head.layout
        assert layout is not None, "its rows have keys and values"
        self._cache = ModelCache(layout, resources.cache_sizes)
        for pages in (pages for layer in self._cache.layers for pages in layer):
            pages.zero_()  # a masked slot may be read, and must hold numbers
        self._max_model_len = head.max_model_len or state.max_model_len
        self._computed = torch.full_like(state.num_computed, FIRST_ROW)
        self._most = (most_accepted or resources.num_speculative_tokens) + 1  # rows that wait
        self._window: ExcerptSizes | None = None
        if head.window is not None:  # which holds all rows that wait
            ahead = resources.num_speculative_tokens
            # First tokens that are far away do heads harm (docs/drafters.md).
            size = max(head.window, self._most)
            self._window = ExcerptSizes(size, ahead, state.block_size, first_tokens=0)
        shape = (state.num_slots, self._most + 1, self._network.feature_size)
        self._features = torch.zeros(shape, dtype=layout.dtype, device=state.device)
        # On the host: no more rows of a slot wait when the next step begins.
        self._waiting = [0] * state.num_slots

    def prepare(self, batch: Batch) -> None:
        full = [item.request.slot for item in batch.requests if self._fills(item)]
        if full:
            self._flush(upload(full, self._state.device))

    def propose(self, batch: DeviceBatch) -> Draft:
        """One pass over the rows that wait, then single rows."""
        slots, wanted = batch.slots, batch.num_featured_drafts
        known, starts = self._state.num_tokens[slots], self._computed[slots]
        features = self._features[slots, : self._most]

        def forward(rows: PassRows, index: int) -> Tensor:
            nonlocal features
            logits, last = self._forward(rows, features, index, self._network.head)
            features = last.unsqueeze(1)
            return logits

        draft, _ = self._drafting.draft_chain(
            *(batch, self._resources, known, starts, wanted, self._most, forward),
            self._excerpt(slots),
        )
        computed = torch.where(wanted > 0, known, starts)
        self._computed.index_copy_(0, slots, computed)
        return draft

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """Keep the features of the rows that were accepted; those of prompt chunks wait for
        `read_prompts`."""
        slots = batch.slots
        decodes = batch.at_end & (batch.num_new_tokens == 1)
        counts = torch.where(decodes, 1 + verdict.num_accepted + batch.rereads, 0)
        width = min(batch.width + 1, self._most) + batch.most_rereads
        place = torch.arange(width, device=slots.device)
        before = self._state.num_computed[slots] - batch.num_new_tokens - verdict.num_accepted
        first = before - batch.rereads + FIRST_ROW - self._computed[slots]
        index = first.unsqueeze(1) + place
        kept = (place < counts.unsqueeze(1)) & (index >= 0) & (index < self._most)
        features = self._features_of(batch, verdict, forward, width)
        self._features[slots.unsqueeze(1), torch.where(kept, index, self._most)] = features

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        """The rows of prompt chunks, as far as their features are there: a chunk's last feature
        waits for the row of the token behind it."""
        # Who finds these blocks may have another window to fill.
        seen = None if self._resources.shares_prefixes else self._window
        chunks = [
            _Chunk(item, first, end, self._max_model_len, seen)
            for item, (first, end) in zip(
                batch.requests, pairwise(forward.layout.row_starts), strict=True
            )
            if item.is_prompt_chunk and item.request.num_speculative_tokens
        ]
        if not chunks:
            return
        slots, starts, ends, lengths, last, window_ends = upload(
            [
                [chunk.item.request.slot for chunk in chunks],
                [chunk.start for chunk in chunks],
                [chunk.end for chunk in chunks],
                [chunk.length for chunk in chunks],
                [chunk.last_row for chunk in chunks],
                [chunk.window_end for chunk in chunks],
            ],
            self._state.device,
        )
        projected = self._project(forward.hidden, forward.streams)
        kept = self._features[slots, :1]
        rows = [chunk.features(projected, kept[index]) for index, chunk in enumerate(chunks)]
        if any(chunk.length for chunk in chunks):
            longest = max(chunk.length for chunk in chunks)
            excerpt = self._excerpt(slots, window_ends, longest)
            placed = PassRows(slots, excerpt.places(starts), lengths, excerpt=excerpt)
            layout = lay_out(self._state, placed)
            scaled = self._resources.target.config.embedding_scale is not None
            if forward.embedded is not None and not scaled:  # heads take those of tokens unscaled
                embedded = torch.cat([chunk.rows(forward.embedded) for chunk in chunks])
                embedded = embedded.to(self._features.dtype)
                layout = replace(layout, inputs=replace(layout.inputs, embedded=embedded))
            self._pass(layout, torch.cat(rows), 0)
        self._features[slots, 0] = projected[last]
        self._computed[slots] = ends

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._computed[slots]

    def _fills(self, item: ScheduledRequest) -> bool:
        """Count the rows that wait behind this step; whether they have to be computed before."""
        request, slot = item.request, item.request.slot
        if item.admitted:
            self._computed[slot] = max(FIRST_ROW, min(item.start, self._max_model_len))
            self._waiting[slot] = 1  # for a feature that the step computes once more
        if item.is_prompt_chunk:
            self._waiting[slot] = 1
            return False
        if item.num_draft_tokens:
            self._waiting[slot] = min(item.num_draft_tokens + 1, self._most)
            return False
        never = not request.num_speculative_tokens or request.num_tokens >= self._max_model_len
        full = self._waiting[slot] == self._most and not never
        self._waiting[slot] = 1 if full else min(self._waiting[slot] + 1, self._most)
        return full

    def _flush(self, slots: Tensor) -> None:
        """Compute the rows that wait, without a draft."""
        starts = self._computed[slots]
        lengths = (self._state.num_tokens[slots] - starts).clamp(0, self._most)
        excerpt = self._excerpt(slots)
        rows = PassRows(slots, excerpt.places(starts), lengths, self._most, excerpt=excerpt)
        self._forward(rows, self._features[slots, : self._most])
        self._computed[slots] = starts + lengths

    def _excerpt(
        self, slots: Tensor, ends: Tensor | None = None, ahead: int | None = None
    ) -> Excerpt:
        """What passes see of the requests in these slots.

        Args:
            ends: [R] int64, where their windows end; None: with the known tokens.
            ahead: tokens from there on at most; None: those of drafts.
        """
        if self._window is None:
            return whole(self._state, slots)
        window = self._window if ahead is None else replace(self._window, ahead=ahead)
        known = self._state.num_tokens[slots] if ends is None else ends
        return window.excerpt(self._state, slots, known)

    def _forward(
        self,
        rows: PassRows,
        features: Tensor,
        draft: int = 0,
        read: Callable[[Tensor], Tensor] = lambda hidden: hidden,
    ) -> tuple[Tensor, Tensor]:
        """features [R, W, F], of each request's rows -> of each request's last row what `read`
        makes of the head's input [R, H], and the next feature [R, F]; `draft` as `_pass` has it."""
        layout = lay_out(self._state, rows)
        if layout.is_empty:  # no request drafts
            width = self._network.head.width
            return read(features.new_zeros(len(features), width)), torch.zeros_like(features[:, 0])
        hidden, following = self._pass(layout, layout.spread(features), draft)
        return layout.over_last(read, hidden), layout.last(following)

    def _pass(self, layout: RowLayout, features: Tensor, draft: int) -> tuple[Tensor, Tensor]:
        """What the last rows of such a pass give is draft token `draft`, from 0 on; a network
        that is the same for all of them need not ask."""
        del draft
        sees = replace(layout.inputs.sees, first_seen=FIRST_ROW)
        inputs = replace(layout.inputs, sees=sees)
        return self._network(layout.token_ids, features, inputs, self._cache.layers)

    def _features_of(
        self, batch: DeviceBatch, verdict: Verdict, forward: Forward, width: int
    ) -> Tensor:
        """[R, width, F], of the rows of the target's pass that hold known tokens, and what the
        verdict added to them: each request's first."""
        hidden, streams, layout = forward.hidden, forward.streams, forward.layout
        if len(hidden) <= batch.num_requests * width:  # no prompt chunk: each row is wanted
            return layout.heads(self._project(hidden, streams), width)
        hidden, *streams = (layout.heads(it, width).flatten(0, 1) for it in (hidden, *streams))
        return self._project(hidden, streams).view(batch.num_requests, width, -1)

    def _project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        dtype = self._features.dtype
        return self._network.project(hidden.to(dtype), [stream.to(dtype) for stream in streams])


class _Chunk:
    """A prompt chunk: which rows of the target's pass, and which of the drafter's.

    Attributes:
        start, end: the tokens whose rows it has.
        pieces: those that are computed, `length` in all.
        last_row: of the target's.
        window_end: where the window ends that the first row sees.
    """

    def __init__(
        self,
        item: ScheduledRequest,
        first_row: int,
        end_row: int,
        max_model_len: int,
        seen: ExcerptSizes | None,
    ) -> None:
        self.item = item
        end = item.start + item.num_new_tokens
        self.start = max(FIRST_ROW, min(item.start, max_model_len))
        self.end = max(self.start, min(end, max_model_len))
        self.pieces = [(self.start, self.end)] if self.start < self.end else []
        self.window_end = self.start if seen is None else item.request.num_tokens
        if seen is not None:
            self.pieces = seen.pieces(item.request.num_tokens, self.start, self.end)
        self.length = sum(last - first for first, last in self.pieces)
        self.last_row = end_row - 1
        first_token = end - (end_row - first_row)  # one before `start` where it is read again
        # The row of token t takes the feature of token t - 1.
        self._first_feature = first_row - 1 - first_token
        self._kept = first_row - 1  # what a row before the first stands for

    def rows(self, values: Tensor) -> Tensor:
        """values [T, H], of the rows of the target's pass -> [length, H], of the same tokens."""
        first = self._first_feature + 1
        return torch.cat(
            [values[:0], *(values[first + it : first + end] for it, end in self.pieces)]
        )

    def features(self, projected: Tensor, kept: Tensor) -> Tensor:
        """[length, F] from those of the pass; `kept` [1, F] was the last of the chunk before."""
        parts = [kept[:0]]
        for first, end in self.pieces:
            row = self._first_feature + first
            if row == self._kept:
                parts.append(kept)
                row += 1
            parts.append(projected[row : self._first_feature + end])
        return torch.cat(parts)
