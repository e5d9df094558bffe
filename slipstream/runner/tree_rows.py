"""Where the rows of a pass stand that are nodes of token trees."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs, TreeInputs
from slipstream.sampling.tree_verification import TreeNodes

CHAIN = -1  # a word that sees all


@dataclass(frozen=True, eq=False)
class TreeRows:
    """Some nodes of each request's tree, one row each.

    Node i is token roots + i of its request, and is kept there; its position is that of a text that
    ends with it, roots + its depth.

    Attributes:
        roots: [R] int64, which token of each request is node 0.
        first: the node of each request's first row; the others follow.
        drafted: [R] bool: the rows of other requests are known tokens, a causal chain.
    """

    nodes: TreeNodes
    roots: Tensor
    first: int
    drafted: Tensor

    def inputs(
        self, chain: PassInputs, request: Tensor | None, offset: Tensor | None
    ) -> PassInputs:
        """The inputs of rows that were laid out as a chain.

        Args:
            request, offset: [T], of each row; None where every request has as many.
        """
        if request is None or offset is None:
            most = len(chain.rows.positions) // len(self.roots)
            row = torch.arange(len(chain.rows.positions), device=self.roots.device)
            request, offset = row // most, row % most
        node = (offset + self.first).clamp_max(self.nodes.depths.shape[1] - 1)
        drafted = self.drafted[request]
        tokens = chain.rows.positions
        positions = self.roots[request] + self.nodes.depths[request, node]
        # A node has no smaller number than its depth; rows behind the last position stay there.
        positions = torch.where(drafted, torch.minimum(positions, tokens), tokens)
        ancestors = torch.where(drafted, self.nodes.ancestors[request, node], CHAIN)
        return replace(
            chain,
            rows=replace(chain.rows, positions=positions),
            sees=replace(chain.sees, tree=TreeInputs(self.roots, tokens, ancestors)),
        )
