"""Grows trees of draft tokens level by level, from a head's predictions at each node.

Static and dynamic trees are computed with tensors of fixed shapes. The nodes that the head reads
are the *frontier*. They are numbered from 1, level by level; while the tree grows, the head's cache
entries of node i are in the slot of draft token i.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.devices import upload
from slipstream.sampling.verification import TreeNodes
from slipstream.speculative.trees.shapes import DynamicTree, StaticTree, TokenTree

ROOT = 1  # the word that holds node 0


@dataclass(frozen=True, eq=False)
class Level:
    """The nodes that the head reads next, all of one depth.

    Attributes:
        depth: depth of the nodes, at least 1.
        first: number of the first node.
        token_ids: [R, B] int64, column indices of the head.
        parents: [R, B] int64, the index of each node's parent in the previous level.
    """

    depth: int
    first: int
    token_ids: Tensor
    parents: Tensor


class Growth(Protocol):
    """The trees of one round.

    Attributes:
        reach: number of likeliest tokens needed for each node.
        scored: whether their log probabilities are needed.
    """

    reach: int
    scored: bool

    def add(self, token_ids: Tensor, scores: Tensor | None) -> Level | None:
        """Add the likeliest tokens after each node of the last level, at first of the root.

        Args:
            token_ids: [R, B, reach] int64, the likeliest first.
            scores: [R, B, reach] float32, their log probabilities; None unless `scored`.

        Returns:
            The level that the head reads next; None when the tree is complete.
        """

    def frontier(self) -> TreeNodes:
        """The structure of the nodes that the head has read or reads next."""

    def finish(self) -> tuple[Tensor, TreeNodes]:
        """(token_ids [R, K], trees); the first n draft tokens of each form a tree for every n."""


def growth_of(tree: TokenTree, device: torch.device) -> Callable[[Tensor, int], Growth]:
    """Return a function that starts a round's trees, given draft tokens per request [R] and K."""
    if isinstance(tree, StaticTree):
        return partial(StaticGrowth, StaticTable(tree, device))
    return partial(DynamicGrowth, tree)


class StaticTable:
    """The nodes of a static tree as tensors; each node takes the token of the rank in its path."""

    def __init__(self, tree: StaticTree, device: torch.device) -> None:
        parents, depths, words = tree.parents, [0], [ROOT]
        for node, parent in enumerate(parents[1:], 1):
            depths.append(depths[parent] + 1)
            words.append(words[parent] | 1 << node)
        self.levels = [tree.level(depth) for depth in range(tree.depth + 1)]
        ranks = [0, *(path[-1] for path in tree.paths)]
        self.reach = tree.reach
        before = [0] + [self.levels[depth - 1][0] for depth in depths[1:]]
        rows = [parent - first for parent, first in zip(parents, before, strict=True)]
        places = [row * self.reach + rank for row, rank in zip(rows, ranks, strict=True)]
        # For each node: what continues it in the tree, and in the level before; the place of its
        # token among those of the level before; and its word.
        self.parents, self.depths, self.rows, self.places, self.words = upload(
            [parents, depths, rows, places, words], device
        ).unbind(0)


class StaticGrowth:
    """Grows a static tree, whose node numbers are final from the beginning."""

    scored = False

    def __init__(self, table: StaticTable, wanted: Tensor, width: int) -> None:
        self._table, self._requests, self._width = table, len(wanted), width
        self.reach = table.reach
        self._tokens: list[Tensor] = []
        starts = [first for first, _ in table.levels]
        self._ends = [*(min(start - 1, width) for start in starts[2:]), width]
        self._depth = sum(start <= width for start in starts) - 1

    def add(self, token_ids: Tensor, scores: Tensor | None) -> Level | None:
        first = self._table.levels[len(self._tokens) + 1][0]
        nodes = slice(first, self._ends[len(self._tokens)] + 1)
        picked = token_ids.flatten(1)[:, self._table.places[nodes]]
        self._tokens.append(picked)
        if len(self._tokens) == self._depth:
            return None
        parents = self._table.rows[nodes].expand(self._requests, -1)
        return Level(len(self._tokens), first, picked, parents)

    def frontier(self) -> TreeNodes:
        table, shape = self._table, (self._requests, self._width + 1)
        parents, depths, words = (
            numbers[: self._width + 1].expand(shape)
            for numbers in (table.parents, table.depths, table.words)
        )
        return TreeNodes(parents, depths, words, self._depth)

    def finish(self) -> tuple[Tensor, TreeNodes]:
        return torch.cat(self._tokens, 1), self.frontier()


class DynamicGrowth:
    """Grows a dynamic tree of the likeliest candidates (EAGLE-2, arXiv 2406.16858, section 3).

    On each level, the `top_k` likeliest nodes are expanded, or in a smaller tree only as many as
    leave slots for all levels; finally the candidates of all levels are ranked. A candidate's score
    is the log of the product of the drafter's probabilities along its path, so that no candidate
    ranks before its parent.
    """

    scored = True

    def __init__(self, tree: DynamicTree, wanted: Tensor, width: int) -> None:
        self._tree, self._wanted, self._width = tree, wanted, width
        self.reach = tree.top_k
        self._breadth = min(tree.top_k, max(1, width // max(1, tree.depth - 1)))
        # For each candidate: its token, score and depth, and the frontier node that it continues.
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._depths: list[Tensor] = []
        self._parents: list[Tensor] = []
        # For each frontier node, the root first: which candidate it is, and its word and depth.
        zero = wanted.new_zeros((len(wanted), 1))
        self._candidates: list[Tensor] = []
        self._words, self._frontier_depths = [zero + ROOT], [zero]
        self._level_scores = torch.zeros_like(zero, dtype=torch.float32)
        self._num_candidates = 0

    def add(self, token_ids: Tensor, scores: Tensor | None) -> Level | None:
        assert scores is not None
        breadth, depth = self._breadth, len(self._tokens) + 1
        # Rounding may leave a probability a little above 1, and a child before its parent.
        total = self._level_scores.unsqueeze(2) + scores.float().clamp_max(0.0)
        if depth > 1:  # nodes beyond the draft tokens' slots have not been read
            read = ((depth - 1) * breadth <= self._wanted)[:, None, None]
            total = torch.where(read, total, -torch.inf)
        tokens, total = token_ids.flatten(1), total.flatten(1)
        row = torch.arange(tokens.shape[1], device=tokens.device) // self.reach
        parents = (row + max(0, (depth - 2) * breadth + 1)).expand_as(tokens)
        self._tokens.append(tokens)
        self._scores.append(total)
        self._parents.append(parents)
        self._depths.append(torch.full_like(tokens, depth))
        best = total.topk(breadth, 1)
        offset, self._num_candidates = self._num_candidates, self._num_candidates + len(row)
        first = (depth - 1) * breadth + 1
        if depth == self._tree.depth or first + breadth - 1 > self._width:
            return None
        self._candidates.append(best.indices + offset)
        self._level_scores = best.values
        node = torch.arange(first, first + breadth, device=tokens.device)
        own = torch.ones_like(node) << node
        above = torch.cat(self._words, 1).gather(1, parents.gather(1, best.indices))
        self._words.append(above | own)
        self._frontier_depths.append(torch.full_like(best.indices, depth))
        return Level(depth, first, tokens.gather(1, best.indices), row[best.indices])

    def frontier(self) -> TreeNodes:
        words = torch.cat(self._words, 1)
        depths = torch.cat(self._frontier_depths, 1)
        # Nobody walks through it: whose child a node is does not matter.
        return TreeNodes(torch.zeros_like(words), depths, words, len(self._words) - 1)

    def finish(self) -> tuple[Tensor, TreeNodes]:
        scores, tokens, depths, parents = (
            torch.cat(parts, 1)
            for parts in (self._scores, self._tokens, self._depths, self._parents)
        )
        # Stable: of equal scores the parent's is the first.
        order = scores.sort(dim=1, descending=True, stable=True).indices
        place = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
        number = torch.zeros_like(order).scatter_(1, order, place)  # of each candidate as a node
        zero = number[:, :1] * 0
        of_frontier = torch.cat((zero, *(number.gather(1, it) for it in self._candidates)), 1)
        chosen = order[:, : self._width]
        above = of_frontier.gather(1, parents.gather(1, chosen)).clamp_max(self._width)
        above = torch.cat((zero, above), 1)
        levels = torch.cat((zero, depths.gather(1, chosen)), 1)
        depth = len(self._tokens)
        nodes = TreeNodes(above, levels, _words(above, depth), depth)
        return tokens.gather(1, chosen), nodes


def _words(parents: Tensor, depth: int) -> Tensor:
    """The ancestor bit masks of every node, [R, K + 1]."""
    node = torch.arange(parents.shape[1], device=parents.device)
    own = (torch.ones_like(node) << node).expand_as(parents)
    words = own
    for _ in range(depth):
        words = own | words.gather(1, parents)
    return words
