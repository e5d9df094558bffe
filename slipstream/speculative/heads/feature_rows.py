"""Base class of heads such as EAGLE: a small network over rows of (feature, next token).

The row of token t reads token t and the target's feature of token t - 1, and predicts token t + 1.
Its keys and values are stored in the slot of token t, so the content of a block depends only on its
prefix; token 0 has no row. A round is one pass over the rows of committed tokens that the head has
not computed yet, whose last row gives draft token 1; and then K - 1 passes of a single row per
request, which read the network's output for the previous row instead of a feature.

Until the next draft, the features of committed tokens wait in a buffer per slot, at most K + 1 of
them. If nothing is drafted until a buffer is full, one pass computes the rows of all requests whose
buffers are half full.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.cache.spec import LayerCache, ModelCache
from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.kernels.devices import upload
from slipstream.kernels.pass_inputs import CAUSAL, PassInputs, Visibility
from slipstream.runner.captured_passes import MOST_ROWS, CapturedPasses
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.excerpts import Excerpt, ExcerptSizes, whole
from slipstream.runner.model_runner import Forward
from slipstream.runner.rows import PassRows, RowLayout, lay_out
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, Drafter, DrafterResources
from slipstream.speculative.heads.loading import HeadNetwork
from slipstream.speculative.heads.method import Head

FIRST_ROW = 1  # the first token that has a row
_FROM_FIRST_ROW = Visibility(first_seen=FIRST_ROW)


class FeatureNetwork(HeadNetwork):
    """The network of such a drafter."""

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """The features [T, F] of rows of a target pass, from hidden [T, target width] after its
        final norm, and the streams of the layers that this head reads, of equal shape."""
        return hidden

    def __call__(
        self, token_ids: Tensor, features: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """token_ids [T], features [T, F] -> the lm_head's input [T, H], the next features."""
        raise NotImplementedError


class FeatureRowsDrafter(Drafter):
    """Drafts a chain autoregressively.

    `_computed[slot]` counts the leading tokens whose rows this network has computed, token 0
    included. `_features[slot, i]` is the feature for the row of token `_computed[slot] + i`; the
    last entry of a slot is where features are written that are not kept.

    Args:
        most_accepted: maximum number of draft tokens of a step that can be accepted; None: all.
    """

    def __init__(
        self, head: Head[Any, Any], resources: DrafterResources, most_accepted: int | None = None
    ) -> None:
        super().__init__(resources.state)
        self._network: FeatureNetwork = head.network
        self._network.share(resources.target.embedding, resources.target.head)
        self._drafting, self._resources = head.sampling(resources), resources
        state, layout = resources.state, head.layout
        assert layout is not None, "its rows have keys and values"
        self._cache = ModelCache(layout, resources.cache_sizes)
        for pages in (pages for layer in self._cache.layers for pages in layer):
            pages.zero_()  # a masked slot may be read, and must hold numbers
        self._max_model_len = head.max_model_len or state.max_model_len
        self._computed = torch.full_like(state.num_computed, FIRST_ROW)
        self._most = (most_accepted or resources.num_speculative_tokens) + 1  # rows that wait
        self._window: ExcerptSizes | None = None
        if head.window is not None:  # it is at least as long as the rows that wait
            ahead = resources.num_speculative_tokens
            # Heads draft worse if they attend to distant first tokens (docs/drafters.md).
            size = max(head.window, self._most)
            self._window = ExcerptSizes(size, ahead, state.block_size, first_tokens=0)
        shape = (state.num_slots, self._most + 1, self._network.feature_size)
        self._features = torch.zeros(shape, dtype=head.dtype, device=state.device)
        self._drafted: DeviceBatch | None = None  # its requests have all drafted, and none waits
        # On the host: an upper bound of the rows of a slot that wait when the next step begins.
        self._waiting = [0] * state.num_slots
        self._captured: CapturedPasses | None = None
        if resources.record is not None:
            sizes = state.num_slots, resources.record
            self._captured = CapturedPasses(self._prompt_pass, *sizes)

    def prepare(self, batch: Batch) -> None:
        undrafted = [item.request.slot for item in batch.requests if self._waits(item)]
        if any([self._waiting[slot] > self._most for slot in undrafted]):
            # A pass for several requests takes hardly longer than one for a single request.
            slots = [slot for slot in undrafted if 2 * (self._waiting[slot] - 1) >= self._most]
            for slot in slots:
                self._waiting[slot] = 1
            adapted = any(it.request.adapts_drafts for it in batch.requests)
            self._flush(upload(slots, self._state.device), adapted)

    def propose(self, batch: DeviceBatch) -> Draft:
        """One pass over the rows that wait, then one row per request and draft token."""
        slots, wanted = batch.slots, batch.num_featured_drafts
        known = self._state.num_tokens.index_select(0, slots)
        starts = self._computed.index_select(0, slots)
        features = self._features.index_select(0, slots)

        def forward(rows: PassRows, index: int) -> Tensor:
            nonlocal features
            logits, features = self._forward(rows, features, index, self._network.head)
            return logits

        places = known, starts, wanted, self._most
        draft, _ = self._drafting.draft_chain(batch, *places, forward, self._excerpt(slots))
        self._computed.index_copy_(0, slots, batch.where_drafts(wanted, known, starts))
        self._drafted = batch if batch.all_draft and batch.judges_all else None
        return draft

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """Buffer the features of accepted tokens; `read_prompts` handles those of prompts."""
        slots = batch.slots
        width = min(batch.width + 1, self._most) + batch.most_rereads
        if batch is self._drafted:
            # The target's rows begin with the first one that is not computed here. Those after the
            # accepted ones are overwritten before they are read.
            features = self._features_of(batch, verdict, forward, width)
            self._features[:, :width].index_copy_(0, slots, features)
            return
        decodes = batch.at_end & (batch.num_new_tokens == 1)
        counts = torch.where(decodes, 1 + verdict.num_accepted + batch.rereads, 0)
        place = torch.arange(width, device=slots.device)
        before = self._state.num_computed[slots] - batch.num_new_tokens - verdict.num_accepted
        first = before - batch.rereads + FIRST_ROW - self._computed[slots]
        index = first.unsqueeze(1) + place
        kept = (place < counts.unsqueeze(1)) & (index >= 0) & (index < self._most)
        features = self._features_of(batch, verdict, forward, width)
        self._features[slots.unsqueeze(1), torch.where(kept, index, self._most)] = features

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        """Compute the rows of prompt chunks. A chunk's last feature is buffered, since it belongs
        to the row of the next token."""
        # Later requests that share these blocks may see another window, so they need all rows.
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
            if self._captured is not None:  # graphs have block tables of one width
                longest = max(longest, MOST_ROWS)
            excerpt = self._excerpt(slots, window_ends, longest)
            counts = [chunk.length for chunk in chunks]
            adapted = any(chunk.item.request.adapts_drafts for chunk in chunks)
            places = slots, excerpt.places(starts), lengths
            placed = PassRows(*places, excerpt=excerpt, counts=counts, adapted=adapted)
            layout = self._lay_out(placed)
            scaled = self._resources.target.config.embedding_scale is not None
            if forward.embedded is not None and not scaled:  # heads take those of tokens unscaled
                embedded = torch.cat([chunk.rows(forward.embedded) for chunk in chunks])
                embedded = embedded.to(self._features.dtype)
                layout = replace(layout, inputs=replace(layout.inputs, embedded=embedded))
            given = layout.inputs, layout.token_ids, torch.cat(rows)
            if self._captured is None or self._captured.run(*given) is None:
                self._prompt_pass(*given)
        self._features[slots, 0] = projected[last]
        self._computed[slots] = ends

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._computed.index_select(0, slots)

    def _waits(self, item: ScheduledRequest) -> bool:
        """Update the number of rows that wait after this step. Returns whether rows that waited
        before it still wait; they must be computed if the buffer would overflow."""
        request, slot = item.request, item.request.slot
        if item.admitted:
            self._computed[slot] = max(FIRST_ROW, min(item.start, self._max_model_len))
            # The feature of the last cached token, which this step computes again.
            self._waiting[slot] = 1
        if item.is_prompt_chunk:
            self._waiting[slot] = 1
            return False
        if item.num_draft_tokens:
            self._waiting[slot] = min(item.num_draft_tokens + 1, self._most)
            return False
        never = not request.num_speculative_tokens or request.num_tokens >= self._max_model_len
        most = self._most if never else self._most + 1
        self._waiting[slot] = min(self._waiting[slot] + 1, most)
        return not never

    def _flush(self, slots: Tensor, adapted: bool) -> None:
        """Compute the rows that wait, without drafting."""
        starts = self._computed[slots]
        lengths = (self._state.num_tokens[slots] - starts).clamp(0, self._most)
        excerpt = self._excerpt(slots)
        places = slots, excerpt.places(starts), lengths, self._most
        rows = PassRows(*places, excerpt=excerpt, adapted=adapted)
        self._forward(rows, self._features[slots, : self._most])
        self._computed[slots] = starts + lengths

    def _excerpt(
        self, slots: Tensor, ends: Tensor | None = None, ahead: int | None = None
    ) -> Excerpt:
        """The part of the context to which passes attend, for the requests in these slots.

        Args:
            ends: [R] int64, the ends of their windows; None: after the known tokens.
            ahead: maximum number of tokens after that end; None: the number of draft tokens.
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
        """Run the network over rows with features [R, W, F], or [R, F] if no request has more than
        one row. For each request's last row, returns `read` of the head's input [R, H], and the
        next feature [R, F]. `draft`: see `_pass`."""
        layout = self._lay_out(rows)
        if layout.is_empty:  # no request drafts
            width = self._network.head.width
            nothing = features.new_zeros(len(features), features.shape[-1])
            return read(features.new_zeros(len(features), width)), nothing
        taken = layout.of_requests(features) if features.dim() == 2 else layout.spread(features)
        hidden, following = self._pass(layout.inputs, layout.token_ids, taken, draft)
        return layout.over_last(read, hidden), layout.last(following)

    def _lay_out(self, rows: PassRows) -> RowLayout:
        """The layout of the rows, with their adapters if the network has slots for adapters."""
        layout = lay_out(self._state, rows)
        if not rows.adapted or self._network.adapters is None:
            return layout
        return layout.with_adapters(self._state.draft_adapters[rows.slots])

    def _pass(
        self, inputs: PassInputs, token_ids: Tensor, features: Tensor, draft: int
    ) -> tuple[Tensor, Tensor]:
        """Run the network. `draft` is the index of the draft token that the last rows predict; only
        networks that differ between draft tokens use it."""
        sees = _FROM_FIRST_ROW
        if inputs.sees is not CAUSAL:
            sees = replace(inputs.sees, first_seen=FIRST_ROW)
        return self._network(token_ids, features, inputs.seeing(sees), self._cache.layers)

    def _prompt_pass(
        self, inputs: PassInputs, token_ids: Tensor, features: Tensor
    ) -> Sequence[Tensor]:
        """Run the network over rows of prompts, for their keys and values alone."""
        self._pass(inputs, token_ids, features, 0)
        return ()

    def _features_of(
        self, batch: DeviceBatch, verdict: Verdict, forward: Forward, width: int
    ) -> Tensor:
        """[R, width, F], the features of each request's first `width` rows of the target's pass,
        which are those of known and accepted tokens."""
        hidden, streams, layout = forward.hidden, forward.streams, forward.layout
        if len(hidden) <= batch.num_requests * width:  # no prompt chunk: each row is wanted
            return layout.heads(self._project(hidden, streams), width)
        hidden, *streams = (layout.heads(it, width).flatten(0, 1) for it in (hidden, *streams))
        return self._project(hidden, streams).view(batch.num_requests, width, -1)

    def _project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        dtype = self._features.dtype
        return self._network.project(hidden.to(dtype), [stream.to(dtype) for stream in streams])


class _Chunk:
    """The rows of a prompt chunk in the target's pass and in the drafter's.

    Attributes:
        start, end: the tokens whose rows it has.
        pieces: the ranges of those that are computed, `length` tokens in all.
        last_row: its last row in the target's pass.
        window_end: the end of the window of its first row.
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
        first_token = end - (end_row - first_row)  # `start` - 1 if that token is computed again
        # The row of token t takes the feature of token t - 1.
        self._first_feature = first_row - 1 - first_token
        self._kept = first_row - 1  # stands for the feature that the chunk before has left

    def rows(self, values: Tensor) -> Tensor:
        """values [T, H] of the target's rows -> [length, H], those of the tokens in `pieces`."""
        first = self._first_feature + 1
        return torch.cat(
            [values[:0], *(values[first + it : first + end] for it, end in self.pieces)]
        )

    def features(self, projected: Tensor, kept: Tensor) -> Tensor:
        """[length, F], from the features of the pass and the last of the chunk before, [1, F]."""
        parts = [kept[:0]]
        for first, end in self.pieces:
            row = self._first_feature + first
            if row == self._kept:
                parts.append(kept)
                row += 1
            parts.append(projected[row : self._first_feature + end])
        return torch.cat(parts)
