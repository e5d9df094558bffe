"""Rows of drafts that are made in one pass: which of them there are, and what they see.

Parallel drafters learn from rows of known tokens and, behind every token, from chains of mask rows.
Row i of a chain stands i places behind its token. Not all chains are learned from: of those that
have a row i - 1, a random share has a row i too (COD, conditional drop of tokens: PARD, arXiv
2504.18583; P-EAGLE, arXiv 2602.01469).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_SHARE = 0.2  # of the chains, at any depth


@dataclass(frozen=True, eq=False)
class ParallelRows:
    """The rows of one sequence, the same for every sequence of a batch.

    Attributes:
        anchor: [Q] int64, the token that a row's chain stands behind; of a known token itself.
        depth: [Q] int64, its place in the chain; 0 for known tokens, which come first.
    """

    anchor: Tensor
    depth: Tensor

    @property
    def positions(self) -> Tensor:
        """[Q], where the rows stand."""
        return self.anchor + self.depth

    @property
    def mask(self) -> Tensor:
        """[Q, Q] bool: a row sees the known tokens up to its anchor and its chain to itself."""
        known = self.depth == 0
        before = known & (self.anchor <= self.anchor.unsqueeze(1))
        own = (self.anchor == self.anchor.unsqueeze(1)) & (self.depth <= self.depth.unsqueeze(1))
        return before | (own & ~known)


def dropped_rows(
    first: int, length: int, places: int, rate: float, generator: torch.Generator
) -> ParallelRows:
    """Known tokens from `first` on, and chains of at most `places` - 1 mask rows behind them.

    A share rate^i of the tokens, but at least `LEAST_SHARE`, keeps a row i.
    """
    tokens = torch.arange(first, length)
    anchors, depths = [tokens], [torch.zeros_like(tokens)]
    kept = tokens
    for depth in range(1, places):
        kept = kept[kept + depth < length]
        wanted = max(rate**depth, LEAST_SHARE) * len(tokens)
        chosen = torch.randperm(len(kept), generator=generator)[: max(1, round(wanted))]
        kept = kept[chosen.sort().values]
        anchors.append(kept)
        depths.append(torch.full_like(kept, depth))
    return ParallelRows(torch.cat(anchors), torch.cat(depths))


def sampled_rows(first: int, length: int, places: int, step: int) -> tuple[ParallelRows, Tensor]:
    """Known tokens, and whole chains behind every `step`-th of them; those tokens [A]."""
    tokens = torch.arange(first, length)
    ends = torch.arange(first, length - places + 1, step)
    depths = torch.arange(1, places)
    anchor = torch.cat((tokens, ends.repeat_interleave(places - 1)))
    depth = torch.cat((torch.zeros_like(tokens), depths.repeat(len(ends))))
    return ParallelRows(anchor, depth), ends


def shifted(rows: Tensor, shape: tuple[int, int], places: int) -> Tensor:
    """[B * S] of a batch: of every row the one so many places further on; 0 behind the end."""
    moved = torch.zeros_like(rows).view(shape)
    if places < shape[1]:
        moved[:, : shape[1] - places] = rows.view(shape)[:, places:]
    return moved.flatten()
