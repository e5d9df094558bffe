"""Samples draft tokens from the logits of a drafter's network."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.excerpts import Excerpt
from slipstream.runner.rows import PassRows
from slipstream.sampling.state import Uses
from slipstream.sampling.verification import sample_draft
from slipstream.speculative.chains import Chains
from slipstream.speculative.drafter import Draft, DrafterResources

# (position in the draft, [R] the token before it, as the target's id) -> its logits [R, v] float32,
# and [R] the probability that its token will be accepted, if the network predicts that. The latter
# may depend on the tokens before the position alone (`chains.py` says why).
Places = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class DraftSampling:
    """The tokens that a drafter may draft, and whether it samples them.

    Attributes:
        vocabulary: [Vd] int64, rising: the target's token id of each column of the head; None:
            column i is token i.
        num_legal_tokens: number of columns that are tokens; further columns are padding.
        greedy_only: always draft the argmax, whatever the request's temperature.
        num_ranks: number of ranks over which the columns are split equally.
    """

    vocabulary: Tensor | None
    num_legal_tokens: int
    greedy_only: bool
    num_ranks: int
    resources: DrafterResources

    def probabilities(self, batch: DeviceBatch) -> Tensor | None:
        """[R, K, v], this rank's columns, receives the draft distributions; None if no draft is
        sampled."""
        if self.greedy_only or Uses.SAMPLING not in batch.uses:
            return None
        shape = (batch.num_requests, batch.width, self.num_legal_tokens // self.num_ranks)
        return torch.empty(shape, dtype=torch.float32, device=batch.slots.device)

    def draft_chain(
        self,
        batch: DeviceBatch,
        known: Tensor,
        starts: Tensor,
        wanted: Tensor,
        most: int,
        forward: Callable[[PassRows, int], Tensor],
        excerpt: Excerpt,
    ) -> tuple[Draft, Tensor]:
        """Draft autoregressively: one pass for each of K draft tokens, or fewer if all chains end
        early (`Chains`). The tokens are written after the known tokens of the excerpt.

        Args:
            known, starts: [R] int64, numbers of known tokens, and of tokens that the drafter has
                computed.
            wanted: [R] int64, number of tokens to draft; a request with 0 has no rows.
            most: maximum number of a request's known tokens that the first pass computes.
            forward: computes the rows for draft token `index`, and returns the logits [R, V] of
                each request's last row. From index 1 on, a request whose chain goes on has one row.

        Returns:
            The draft, and [R] int64, the number of passes in which each request had rows.
        """
        state, slots = self.resources.state, batch.slots
        tokens = slots.new_zeros((batch.num_requests, batch.width))
        probs = self.probabilities(batch)
        chains = Chains(batch, self.resources, wanted)
        placed, starts = excerpt.places(known), excerpt.places(starts)
        lengths = batch.where_drafts(wanted, placed - starts, 0)
        for index in range(batch.width):
            most = 1 if index else most
            logits = forward(batch.rows(starts, lengths, most, excerpt=excerpt), index)
            probs_out = None if probs is None else probs[:, index]
            confidences = chains.out(index)
            picked = self.sample(logits, slots, known, index, batch, probs_out, confidences)
            goes_on = chains.take(index)
            starts, lengths = state.ops.advance_drafts(
                *(excerpt.tables, excerpt.rows, placed, chains.num_passes),
                *(picked, self.vocabulary, tokens, index),
            )
            if not goes_on:
                break
        draft = self.draft(batch, tokens, wanted, probs, written=excerpt.skipped is None)
        return chains.finish(draft), chains.num_passes

    def draft_places(self, batch: DeviceBatch, wanted: Tensor, places: Places) -> Draft:
        """Draft autoregressively with a network that has no cache, such as heads for each position.

        Args:
            wanted: [R] int64, how many tokens to draft for each request.
        """
        state, slots = self.resources.state, batch.slots
        known = state.num_tokens.index_select(0, slots)
        last = state.token_ids[slots, (known - 1).clamp_min(0)]
        tokens = slots.new_zeros((batch.num_requests, batch.width))
        probs, chains = self.probabilities(batch), Chains(batch, self.resources, wanted)
        for index in range(batch.width):
            logits, confidences = places(index, last)
            probs_out, out = None if probs is None else probs[:, index], chains.out(index)
            picked = self.sample(logits, slots, known, index, batch, probs_out, out)
            if out is not None and confidences is not None:
                out.copy_(confidences)
            last = self.token_ids(picked)
            tokens[:, index] = last
            if not chains.take(index):
                break
        return chains.finish(self.draft(batch, tokens, wanted, probs))

    def draft_at_once(self, batch: DeviceBatch, wanted: Tensor, logits: Tensor) -> Draft:
        """The draft from the logits [R * K, V] of each request's last rows (`RowLayout.tails`),
        without the positions after the end of a chain (`Chains`)."""
        slots, probs = batch.draft_slots, self.probabilities(batch)
        chains = Chains(batch, self.resources, wanted, at_once=True)
        picked = self.sample(
            logits,
            slots,
            self.resources.state.num_tokens.index_select(0, slots),
            batch.draft_places,
            batch,
            None if probs is None else probs.flatten(0, 1),
            chains.confidences_out(),
        )
        tokens = self.token_ids(picked).view(-1, batch.width)
        chains.take_all()
        return chains.finish(self.draft(batch, tokens, wanted, probs))

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        known: Tensor,
        ahead: int | Tensor,
        batch: DeviceBatch,
        probs_out: Tensor | None,
        confidence_out: Tensor | None,
    ) -> Tensor:
        """Logits [n, V] -> draft tokens [n], as columns and not as ids, for the positions `known`
        + `ahead`; see `sample_draft`."""
        return sample_draft(
            logits,
            slots,
            known,
            self.resources.sampling,
            batch.uses,
            self.num_legal_tokens,
            greedy_only=self.greedy_only,
            probs_out=probs_out,
            vocabulary=self.vocabulary,
            confidence_out=confidence_out,
            shares=self.num_ranks > 1,
            ahead=ahead,
        )

    def token_ids(self, columns: Tensor) -> Tensor:
        """Columns of the head -> token ids of the target."""
        return columns if self.vocabulary is None else self.vocabulary[columns]

    def draft(
        self,
        batch: DeviceBatch,
        tokens: Tensor,
        wanted: Tensor,
        probs: Tensor | None,
        written: bool = False,
    ) -> Draft:
        """The draft of these tokens [R, K] (the target's ids), which were sampled from `probs`."""
        one_hot = batch.ones
        if probs is not None:
            one_hot = self.resources.sampling.temperature[batch.slots] == 0
        shares = self.num_ranks > 1
        return Draft(tokens, wanted, one_hot, probs, self.vocabulary, written, shares=shares)
