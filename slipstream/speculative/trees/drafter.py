"""Drafting in trees with a head over rows of (feature, next token): see `heads/feature_rows.py`.

A round begins with a pass over the rows of committed tokens, followed by one pass for each further
level of the tree, over the nodes that have children. A node's feature is the network's output for
its parent. The node attends to the known tokens and its ancestors, and its keys and values are
written to a draft token's slot. Accepted tokens are recomputed from the target's features, so no
cache entries have to be moved.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.excerpts import Excerpt
from slipstream.runner.model_runner import Forward
from slipstream.runner.rows import TreeRows
from slipstream.sampling.logits import allow_next
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, DrafterResources
from slipstream.speculative.heads.feature_rows import FeatureRowsDrafter
from slipstream.speculative.heads.method import Head
from slipstream.speculative.trees.growth import Level, growth_of
from slipstream.speculative.trees.shapes import TokenTree


class TreeDrafter(FeatureRowsDrafter):
    """Drafts the likeliest tokens after every node. They are not sampled, so q is 1 for each."""

    def __init__(self, head: Head[Any, Any], tree: TokenTree, resources: DrafterResources) -> None:
        super().__init__(head, resources, most_accepted=tree.depth)
        self._write = self._state.ops.write_tokens
        self._begin_growth = growth_of(tree, self._state.device)

    def propose(self, batch: DeviceBatch) -> Draft:
        """Run one pass over the pending rows, then one for each level whose nodes have children."""
        state, slots = self._state, batch.slots
        known = state.num_tokens[slots]
        wanted = batch.num_featured_drafts
        growth = self._begin_growth(wanted, batch.width)
        starts = self._computed[slots]
        excerpt = self._excerpt(slots)
        lengths = torch.where(wanted > 0, known - starts, 0)
        rows = batch.rows(excerpt.places(starts), lengths, self._most, excerpt=excerpt)
        hidden, following = self._forward(rows, self._features[slots, : self._most])
        logits = self._next_logits(hidden, batch, known)
        level = growth.add(*self._likeliest(logits.unsqueeze(1), growth.reach, growth.scored))
        following = following.unsqueeze(1)
        tentative = slots.new_empty((batch.num_requests, 0))
        while level is not None:
            tentative = torch.cat((tentative, self._drafting.token_ids(level.token_ids)), 1)
            written = wanted.clamp_max(tentative.shape[1])
            self._write(excerpt.tables, excerpt.rows, tentative, written)
            root = excerpt.places(known) - 1
            tree = TreeRows(growth.frontier(), root, level.first, wanted > 0)
            hidden, following = self._read(batch, level, tree, excerpt, wanted, following)
            logits = self._logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
            level = growth.add(*self._likeliest(logits, growth.reach, growth.scored))
        computed = torch.where(wanted > 0, known, starts)
        self._computed.index_copy_(0, slots, computed)
        columns, nodes = growth.finish()
        return Draft(
            token_ids=self._drafting.token_ids(columns),
            num_tokens=wanted,
            one_hot=torch.ones_like(batch.at_end),
            tree=nodes,
        )

    def _read(
        self,
        batch: DeviceBatch,
        level: Level,
        tree: TreeRows,
        excerpt: Excerpt,
        wanted: Tensor,
        features: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the pass over a level with the features [R, W, F] of the previous level; returns the
        lm_head's input [R, B, H] and the next features [R, B, F]."""
        width, first = level.token_ids.shape[1], level.first
        lengths = (wanted - (first - 1)).clamp(0, width)
        starts = tree.roots + first
        rows = batch.rows(starts, lengths, width, tree=tree, excerpt=excerpt)
        layout = self._lay_out(rows)
        index = level.parents.unsqueeze(-1).expand(-1, -1, features.shape[-1])
        features = features.gather(1, index)
        if layout.is_empty:
            return features.new_zeros((*features.shape[:2], self._network.head.width)), features
        given = layout.inputs, layout.token_ids, layout.spread(features)
        hidden, following = self._pass(*given, level.depth)
        return layout.collect(hidden, width), layout.collect(following, width)

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> logits [n, v], without padded columns."""
        return self._network.head(hidden)[:, : self._drafting.num_legal_tokens]

    def _next_logits(self, hidden: Tensor, batch: DeviceBatch, known: Tensor) -> Tensor:
        """The logits of the roots, from hidden [R, H]; tokens that grammars forbid are masked."""
        sampling, vocabulary = self._resources.sampling, self._drafting.vocabulary
        logits = self._logits(hidden)
        given = batch.slots, known, sampling, batch.uses, vocabulary
        return allow_next(logits, *given, self._network.head.columns)

    def _likeliest(self, logits: Tensor, reach: int, scored: bool) -> tuple[Tensor, Tensor | None]:
        """logits [R, B, v] -> the likeliest columns of each row [R, B, reach], and if `scored`
        their log probabilities."""
        columns, shape = self._network.head.columns, logits.shape[:2]
        logits = logits.flatten(0, 1)
        if reach == 1 and not scored:
            return columns.best(logits).view(*shape, 1), None
        values, best = columns.top(logits, reach)
        scores = None
        if scored:
            scores = (values.float() - columns.log_total(logits.float())).view(*shape, reach)
        return best.view(*shape, reach), scores

    def _features_of(
        self, batch: DeviceBatch, verdict: Verdict, forward: Forward, width: int
    ) -> Tensor:
        """The features [R, width, F] of the rows on the accepted path."""
        if verdict.path is None:
            return super()._features_of(batch, verdict, forward, width)
        place = torch.arange(width, device=batch.slots.device)
        # Rows that are read again come before the root; nothing is drafted after them.
        before = batch.rereads.unsqueeze(1)
        index = (place - before).clamp(0, verdict.path.shape[1] - 1)
        row = torch.where(place < before, place, before + verdict.path.gather(1, index))
        row = (
            (forward.layout.first_row.unsqueeze(1) + row)
            .clamp_max(len(forward.hidden) - 1)
            .flatten()
        )
        streams = [stream[row] for stream in forward.streams]
        features = self._project(forward.hidden[row], streams)
        return features.view(-1, width, features.shape[-1])
