"""The number of tokens of each request that a draft model has computed, and catching up.

A draft model reads only token ids, so it may fall behind the target and catch up in one pass over
the token ids in the device state. With a window it reads only the tokens within it, and has its own
blocks for each slot. These are not shared between requests, so the prefix cache works as if there
were no drafter.

A draft model computes a prompt when the request gets its first draft tokens, unless its blocks are
shared with later requests: a block is shared only when the draft model's part is in it, too.
"""

import torch
from torch import Tensor

from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.excerpts import Excerpt, ExcerptSizes, whole
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.rows import PassRows
from slipstream.speculative.drafter import Drafter, DrafterResources


class ContextDrafter(Drafter):
    """Drafts with a language model, and counts the leading tokens that it has computed.

    After a step, `_computed[slot]` is at most the number of tokens that the target has computed.

    Args:
        most_missing: maximum number of known tokens that the first pass of a round can compute; if
            more are missing, a pass before the round computes them.
        left_by: maximum number of tokens that are missing after a round with drafts; None: one more
            than it drafted.
        window: sizes of the excerpts to which rounds attend; None: they attend to whole texts.
    """

    def __init__(
        self,
        runner: ModelRunner,
        resources: DrafterResources,
        max_model_len: int,
        most_missing: int,
        left_by: int | None,
        window: ExcerptSizes | None,
    ) -> None:
        super().__init__(resources.state)
        self._runner, self._resources, self._window = runner, resources, window
        self._joins_late = window is not None or not resources.shares_prefixes
        self._max_model_len, self._most_missing = max_model_len, most_missing
        self._left_by = left_by
        self._computed = torch.zeros_like(self._state.num_computed)
        # On the host: an upper bound of the missing tokens of a slot when the next step begins.
        self._missing = [0] * self._state.num_slots

    def _excerpt(self, slots: Tensor) -> Excerpt:
        """The tokens to which rounds attend, for the requests in these slots."""
        if self._window is None:
            return whole(self._state, slots)
        known = self._state.num_tokens[slots]
        return self._window.excerpt(self._state, slots, known, self._window.ring)

    def cached_tokens(self, slots: Tensor) -> Tensor:
        computed = self._computed if self._window is None else self._state.num_computed
        return computed.index_select(0, slots)

    def prepare(self, batch: Batch) -> None:
        """Compute missing tokens of requests that miss more than a round can compute itself."""
        lagging: list[int] = []
        left = self._state.max_model_len if self._joins_late else 1  # missing after a prompt
        for item in batch.requests:
            slot = item.request.slot
            if item.admitted:
                computed = min(item.start, self._max_model_len) if self._window is None else 0
                self._computed[slot] = computed
                self._missing[slot] = left
            if item.is_prompt_chunk:  # `read_prompts` will catch up
                self._missing[slot] = left
            elif item.request.guide is not None:
                if self._is_behind_grammar(item):
                    lagging.append(slot)
            elif not item.num_draft_tokens:
                self._missing[slot] += 1
            else:
                if self._missing[slot] > self._most_missing:
                    lagging.append(slot)
                self._missing[slot] = self._left_by or item.num_draft_tokens + 1
        # The first pass of an exact round may have any number of rows.
        if lagging and self._resources.captured:
            self._catch_up(lagging, self._most_missing)

    def _is_behind_grammar(self, item: ScheduledRequest) -> bool:
        """Whether a request with a grammar misses more than a round can compute. The grammar may
        have replaced draft tokens, whose replacements were never computed. Such steps are not
        launched ahead, so the host's counts are up to date; exact batches can compute any number.
        """
        if not item.num_draft_tokens or not self._resources.captured:
            return False
        if self._window is not None:  # `_catch_up` compares the counts on the device
            return True
        if item.admitted:
            return False
        return item.request.num_tokens - item.request.drafter_computed > self._most_missing

    def _settle(self, batch: DeviceBatch, gained: Tensor) -> None:
        """Lower the counts to the tokens that were accepted.

        Args:
            gained: [R] int64, tokens that became known since the round began.
        """
        slots, state = batch.slots, self._state
        counts = self._computed.index_select(0, slots), state.num_computed.index_select(0, slots)
        computed = torch.minimum(*counts)
        if batch.kept is not None:
            computed = torch.minimum(computed, state.num_tokens[slots] - gained + batch.kept)
        self._computed.index_copy_(0, slots, computed)

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        """Compute the prompt chunks of a step; see `Drafter.read_prompts`. If prompts are computed
        late, the request's first round does that instead."""
        if self._joins_late:
            return
        slots = [
            item.request.slot
            for item in batch.requests
            if item.is_prompt_chunk and item.request.num_speculative_tokens
        ]
        if slots:
            self._catch_up(slots)

    def _catch_up(self, host_slots: list[int], least: int = 1) -> None:
        """Compute the tokens that the target has computed and the draft model lacks, if a request
        lacks `least` or more. With a window, tokens outside of it are skipped."""
        slots = torch.tensor(host_slots, device=self._state.device)
        excerpt, computed = self._excerpt(slots), self._computed[slots]
        ends = self._state.num_computed[slots].clamp(max=self._max_model_len)
        starts = excerpt.places(computed)
        lengths = (excerpt.places(ends) - starts).clamp(min=0)
        if (lengths >= least).any():
            adapted = bool((self._state.draft_adapters[slots] >= 0).any())
            places = slots, starts, lengths
            rows = PassRows(*places, excerpt=excerpt, adapted=adapted, num_read=1)
            self._runner.forward(rows)
            self._computed[slots] = torch.maximum(computed, ends)
