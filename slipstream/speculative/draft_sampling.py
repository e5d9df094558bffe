"""How the logits of a drafter's network become draft tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.excerpts import Excerpt
from slipstream.runner.rows import PassRows
from slipstream.sampling.state import Uses
from slipstream.sampling.verification import sample_draft
from slipstream.speculative.chains import Chains
from slipstream.speculative.drafter import Draft, DrafterResources

# Of a place and the token before it, [R] (the target's ids): the logits there [R, v] float32, and
# the chances [R] that its token is accepted, if the network tells them. Those follow from the
# tokens before the place alone (`chains.py` says why).
Places = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class DraftSampling:
    """Over which tokens a drafter drafts, and whether it samples them.

    Attributes:
        vocabulary: [Vd] int64, rising: the target's token ids of the head's columns; None when they
            are the ids from 0 on.
        num_legal_tokens: columns from here on are padding.
        greedy_only: the argmax, whatever the request's temperature.
        num_ranks: that share the columns, as many each.
    """

    vocabulary: Tensor | None
    num_legal_tokens: int
    greedy_only: bool
    num_ranks: int = 1

    def probabilities(self, batch: DeviceBatch) -> Tensor | None:
        """[R, K, v], this rank's columns, to be filled with what the drafts are sampled from, if
        any is."""
        if self.greedy_only or Uses.SAMPLING not in batch.uses:
            return None
        shape = (batch.num_requests, batch.width, self.num_legal_tokens // self.num_ranks)
        return torch.empty(shape, dtype=torch.float32, device=batch.slots.device)

    def draft_chain(
        self,
        batch: DeviceBatch,
        resources: DrafterResources,
        known: Tensor,
        starts: Tensor,
        wanted: Tensor,
        most: int,
        forward: Callable[[PassRows, int], Tensor],
        excerpt: Excerpt,
    ) -> tuple[Draft, Tensor]:
        """K draft tokens from K passes, which are written behind the known tokens of the excerpt;
        fewer where all chains end before (`Chains`), and each in as many passes as it goes on for.

        Args:
            known, starts: [R] int64, known tokens, and those that the drafter has computed.
            wanted: [R] int64, draft tokens; a request that wants none has no rows.
            most: known tokens of a request that the first pass reads at most.
            forward: computes the rows of draft token `index` and returns the logits [R, V] behind
                each request's last; from index 1 on requests whose chains go on have one row.

        Returns:
            The draft, and [R] int64, the passes that each request had rows in.
        """
        state, slots = resources.state, batch.slots
        tokens = slots.new_zeros((batch.num_requests, batch.width))
        probs = self.probabilities(batch)
        chains = Chains(batch, resources, wanted)
        placed, starts = excerpt.places(known), excerpt.places(starts)
        lengths = torch.where(wanted > 0, placed - starts, 0)
        for index in range(batch.width):
            most = 1 if index else most
            logits = forward(batch.rows(starts, lengths, most, excerpt=excerpt), index)
            probs_out = None if probs is None else probs[:, index]
            confidences = chains.out(index)
            picked = self.sample(
                logits, slots, known + index, batch, resources, probs_out, confidences
            )
            goes_on = chains.take(index)
            starts, lengths = state.ops.advance_drafts(
                *(excerpt.tables, excerpt.rows, placed, chains.num_passes),
                *(picked, self.vocabulary, tokens, index),
            )
            if not goes_on:
                break
        draft = self.draft(batch, resources, tokens, wanted, probs)
        draft = replace(draft, written=excerpt.skipped is None)
        return chains.finish(draft), chains.num_passes

    def draft_places(
        self, batch: DeviceBatch, resources: DrafterResources, wanted: Tensor, places: Places
    ) -> Draft:
        """K draft tokens one after the other, from a network that has no rows of its own for them.

        Args:
            wanted: [R] int64, draft tokens of each request.
        """
        state, slots = resources.state, batch.slots
        known = state.num_tokens[slots]
        last = state.token_ids[slots, (known - 1).clamp_min(0)]
        tokens = slots.new_zeros((batch.num_requests, batch.width))
        probs, chains = self.probabilities(batch), Chains(batch, resources, wanted)
        for index in range(batch.width):
            logits, confidences = places(index, last)
            probs_out, out = None if probs is None else probs[:, index], chains.out(index)
            picked = self.sample(logits, slots, known + index, batch, resources, probs_out, out)
            if out is not None and confidences is not None:
                out.copy_(confidences)
            last = self.token_ids(picked)
            tokens[:, index] = last
            if not chains.take(index):
                break
        return chains.finish(self.draft(batch, resources, tokens, wanted, probs))

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        batch: DeviceBatch,
        resources: DrafterResources,
        probs_out: Tensor | None,
        confidence_out: Tensor | None,
    ) -> Tensor:
        """Draft tokens [n] (columns, not ids) of logits [n, V]; see `sample_draft`."""
        return sample_draft(
            logits,
            slots,
            positions,
            resources.sampling,
            batch.uses,
            self.num_legal_tokens,
            greedy_only=self.greedy_only,
            probs_out=probs_out,
            vocabulary=self.vocabulary,
            confidence_out=confidence_out,
            shares=self.num_ranks > 1,
        )

    def token_ids(self, columns: Tensor) -> Tensor:
        """The target's ids of columns of the head."""
        return columns if self.vocabulary is None else self.vocabulary[columns]

    def draft(
        self,
        batch: DeviceBatch,
        resources: DrafterResources,
        tokens: Tensor,
        wanted: Tensor,
        probs: Tensor | None,
    ) -> Draft:
        """The draft of these tokens [R, K] (the target's ids), which were sampled from `probs`."""
        one_hot = resources.sampling.temperature[batch.slots] == 0
        if self.greedy_only:
            one_hot = torch.ones_like(one_hot)
        shares = self.num_ranks > 1
        return Draft(tokens, wanted, one_hot, probs, self.vocabulary, shares=shares)
