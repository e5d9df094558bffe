"""Verification of drafts: the draft tokens that the target accepts, and the token that it adds.

A token tree is verified by walking down one path. The tree's tokens are not sampled: the children
of a node are the drafter's most probable tokens there, so q is 1 for each. Sequential rejection
would accept the first child with its probability under p, or else remove it from p, normalise p,
and try the next sibling. That is equivalent to sampling one token from p and looking for it among
the children: either way child c is accepted with probability p(c), and any other token t follows
with p(t). So a token is sampled at every node as in plain decoding, and the path goes from the root
to the child that was sampled, as long as there is one. The last sampled token on the path is the
recovered token, or at a leaf the bonus token.

These samples use the noise of plain decoding at the same position. Only one node of each position
is on the path, so the output has exactly the distribution p, and equals the text of plain decoding
with the same seed.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from slipstream.kernels.columns import ALL_COLUMNS, Peaks
from slipstream.kernels.sampling import PADDING, SampleRows, SamplingNeeds
from slipstream.sampling.logits import allow_next, ban_words
from slipstream.sampling.state import SamplingState, Uses


@dataclass(frozen=True, eq=False)
class Verdict:
    """The tokens that the requests of a step get.

    Attributes:
        token_ids: [R, K+1] int64: accepted draft tokens, then one bonus or recovered token,
            then -1.
        num_tokens: [R] int64, `num_accepted` + 1.
        num_accepted: [R] int64, accepted draft tokens.
        largest: [R, K+1] float32, the largest raw logit of the row of each token: NaN or +inf if
            one of its logits is; undefined from `num_tokens` on.
        path: [R, W] int64, for trees: the row of the request from which each token comes; undefined
            from `num_tokens` on. None: the first rows, in order.
    """

    token_ids: Tensor
    num_tokens: Tensor
    num_accepted: Tensor
    largest: Tensor
    path: Tensor | None = None


def verify(
    logits: Tensor,
    rows: SampleRows,
    state: SamplingState,
    uses: frozenset[Uses],
    rates: Tensor | None = None,
) -> Verdict:
    """Verify the drafts of all requests, greedy and sampled ones in one batch.

    Greedy requests (temperature 0) accept draft tokens while they equal the argmax, coupled ones
    while they equal the target's own sample. The state is not changed here: `SamplingState.commit`
    applies the verdict. A request's verdict depends neither on other requests nor on the layout of
    the rows.

    Args:
        logits: [N, v] float32, the target's raw logits, with the columns of the state.
        rows: the request and position of each row, and the drafts.
        state: parameters, seeds and step counters of the requests.
        uses: features of these requests; only with `Uses.BAD_WORDS` the host waits for the device.
        rates: [R, K or more] float32, only for benchmarks: forced probability that a position is
            accepted, given that all before it were; None: drafts are verified.

    Returns:
        The verdict for the R requests of `rows`.
    """
    largest = None
    if Uses.BAD_WORDS in uses:
        largest = rows.peaks[0] if rows.peaks else state.columns.largest(logits)
        logits, rows = ban_words(logits, rows, state), replace(rows, peaks=None)
    if rates is not None or not rows.max_draft_tokens:
        uses -= {Uses.BLOCK, Uses.COUPLED}
    if rates is not None:
        rates = rates[:, : rows.max_draft_tokens]
    verdict = Verdict(*state.ops.verify(logits, rows, state.tensors(), needs_of(uses), rates))
    if largest is None:
        return verdict
    return replace(verdict, largest=rows.by_request(largest.squeeze(-1)))


def sample_draft(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: SamplingState,
    uses: frozenset[Uses],
    num_legal_tokens: int,
    greedy_only: bool = False,
    probs_out: Tensor | None = None,
    vocabulary: Tensor | None = None,
    confidence_out: Tensor | None = None,
    shares: bool = False,
    ahead: int | Tensor = 0,
) -> Tensor:
    """Sample one draft token for each request.

    Sampled requests apply their temperature, min_p, top_k and top_p, but no penalties or other
    logits processors: verification corrects for those. Their noise is separate from the target's,
    except that coupled requests use the target's. Greedy requests take the argmax.

    Args:
        logits: [R, V], the drafter's, any float dtype.
        slots: [R] int64.
        positions: [R] int64, positions of the tokens to be drafted, less `ahead`.
        uses: features of these requests.
        num_legal_tokens: columns from here on are padding and are never drafted.
        greedy_only: take the argmax for all requests.
        probs_out: [R, min(V, num_legal_tokens)] float32 with any row stride: filled with the
            probabilities that the tokens were sampled from; zeros for greedy requests. Given if and
            only if a request is sampled.
        vocabulary: [V] int64, the token id of each column of `logits`; None if column i is token i.
        confidence_out: [R] float32: filled with the largest probability of each row at temperature
            1, which depends neither on the request's parameters nor on the token that is drawn.
        shares: `logits` and `probs_out` have only this rank's columns of V.

    Returns:
        [R] int64, columns of `logits`.
    """
    columns = state.columns if shares else ALL_COLUMNS
    is_plain = greedy_only or Uses.SAMPLING not in uses
    if not is_plain or Uses.GRAMMAR in uses:  # else nothing depends on positions
        positions = positions + ahead
    logits = allow_next(logits, slots, positions, state, uses, vocabulary, columns)
    assert (probs_out is None) == is_plain, "probs_out belongs to batches that are sampled"
    tensors, needs = state.tensors(), needs_of(uses)
    draft = state.ops.draft_shares if shares else state.ops.draft
    assert draft is not None, "drafters share their columns with the target alone"
    return draft(
        logits, slots, positions, tensors, needs, num_legal_tokens, probs_out, confidence_out,
        vocabulary,
    )  # fmt: skip


@cache
def needs_of(uses: frozenset[Uses]) -> SamplingNeeds:
    """The part of `uses` that sampling kernels take into account."""
    return SamplingNeeds(
        sampling=Uses.SAMPLING in uses,
        top_k=Uses.TOP_K in uses,
        top_p=Uses.TOP_P in uses,
        min_p=Uses.MIN_P in uses,
        penalties=Uses.PENALTIES in uses,
        bias=Uses.BIAS in uses,
        min_tokens=Uses.MIN_TOKENS in uses,
        block=Uses.BLOCK in uses,
        coupled=Uses.COUPLED in uses,
    )


# Features that depend on the tokens between the root and a node.
_HISTORY = frozenset((Uses.PENALTIES, Uses.BAD_WORDS))


@dataclass(frozen=True, eq=False)
class TreeNodes:
    """The shape of each request's tree. Node 0 is its last known token, the root; node i is draft
    token i - 1, and its parent comes before it.

    Attributes:
        parents: [R, K + 1] int64; the root is its own parent.
        depths: [R, K + 1] int64; the root has depth 0.
        ancestors: [R, K + 1] int64; bit j tells whether node j is on the path from the root to this
            node, both included.
        depth: the largest depth.
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    depth: int

    def first(self, requests: int) -> "TreeNodes":
        parents, depths, words = self.parents, self.depths, self.ancestors
        return TreeNodes(parents[:requests], depths[:requests], words[:requests], self.depth)


@dataclass(frozen=True, eq=False)
class DraftedTrees:
    """The trees of a step, and where their rows of logits are.

    Attributes:
        slots: [R] int64, slots in the `SamplingState`.
        positions: [R] int64, number of known tokens.
        token_ids: [R, K] int64.
        num_nodes: [R] int64, number of leading `token_ids` of a request that are nodes.
        most_accepted: [R] int64, maximum number of accepted tokens, however deep the tree is.
        num_rows: number of ragged rows, which is the sum of `num_nodes` + 1; None if every request
            has K + 1 rows. Row i of a request belongs to its node i.
        allowed, peaks: see `SampleRows`.
    """

    nodes: TreeNodes
    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    num_nodes: Tensor
    most_accepted: Tensor
    num_rows: int | None
    allowed: Tensor | None = None
    peaks: Peaks | None = None


def verify_trees(
    logits: Tensor, trees: DraftedTrees, state: SamplingState, uses: frozenset[Uses]
) -> Verdict:
    """Find the path of every request through its tree. Like `verify`, this changes no state.

    Args:
        logits: [N, V] float32, the target's raw logits.

    Returns:
        A verdict with a `path`; of its `token_ids` [R, K + 1] at most depth + 1 are used.
    """
    width = trees.token_ids.shape[1] + 1
    layout = SampleRows.build(
        trees.slots,
        trees.positions,
        trees.token_ids,
        trees.num_nodes,
        torch.ones_like(trees.slots, dtype=torch.bool),
        num_rows=trees.num_rows,
    )
    # Each row is verified without a draft, so its sample equals plain decoding in all modes.
    plain = uses - {Uses.COUPLED}
    alone = verify(logits, _node_rows(trees, layout, uses), state, plain)
    node = torch.arange(width, device=logits.device)
    row = layout.first_row.unsqueeze(1) + torch.minimum(node, trees.num_nodes.unsqueeze(1))
    return _walk(trees, alone.token_ids[:, 0][row], alone.largest[:, 0][row])


def _node_rows(trees: DraftedTrees, layout: SampleRows, uses: frozenset[Uses]) -> SampleRows:
    """The rows as requests without drafts, whose texts end with the path to their node."""
    request, node = layout.request, layout.offset
    depths = trees.nodes.depths[request, node]
    row = torch.arange(len(request), device=request.device)
    paths = trees.token_ids.new_zeros((len(request), 0))
    if uses & _HISTORY:
        paths = _paths_to_nodes(trees)[request, node]
    return SampleRows(
        slots=trees.slots[request],
        positions=trees.positions[request] + depths,
        draft_tokens=paths,
        num_draft_tokens=torch.zeros_like(request),
        one_hot=torch.ones_like(request, dtype=torch.bool),
        layout=(row, depths, row),
        allowed=trees.allowed,
        peaks=trees.peaks,
    )


def _paths_to_nodes(trees: DraftedTrees) -> Tensor:
    """[R, K + 1, depth]: the draft tokens from below the root to each node, then zeros."""
    nodes, depth = trees.nodes, trees.nodes.depth
    width = nodes.depths.shape[1]
    node = torch.arange(1, width, device=nodes.depths.device)
    on_path = (nodes.ancestors.unsqueeze(-1) >> node) & 1 > 0  # [R, K + 1, K]
    place = torch.where(on_path, nodes.depths[:, None, 1:] - 1, depth)
    paths = trees.token_ids.new_zeros((*nodes.depths.shape, depth + 1))
    return paths.scatter_(2, place, trees.token_ids.unsqueeze(1).expand_as(place))[..., :depth]


def _walk(trees: DraftedTrees, sampled: Tensor, largest: Tensor) -> Verdict:
    """The path from the root, given the token that was sampled after every node, and the largest
    logit of its row, both [R, K + 1].

    A node is on the path if it and each of its ancestors equals the token that was sampled after
    its parent. Siblings have different tokens, so there is one path; node numbers rise along it.
    """
    nodes, width = trees.nodes, sampled.shape[1]
    node = torch.arange(width, device=sampled.device)
    used = node[1:] <= trees.num_nodes.unsqueeze(1)
    used &= nodes.depths[:, 1:] <= trees.most_accepted.unsqueeze(1)
    follows = used & (sampled.gather(1, nodes.parents[:, 1:]) == trees.token_ids)
    bits = torch.ones_like(node[1:]) << node[1:]
    misses = torch.where(follows, 0, bits).sum(1)  # [R], one bit a node
    on_path = nodes.ancestors & misses.unsqueeze(1) == 0
    # Nodes off the path are written into one surplus column.
    place = torch.where(on_path, on_path.cumsum(1) - 1, width)
    path = node.new_zeros((len(sampled), width + 1))
    path = path.scatter_(1, place, node.expand_as(place))[:, :width]
    num_accepted = on_path.sum(1) - 1
    token_ids = torch.where(node <= num_accepted.unsqueeze(1), sampled.gather(1, path), PADDING)
    largest = largest.gather(1, path)
    return Verdict(token_ids, num_accepted + 1, num_accepted, largest, path[:, : nodes.depth + 1])
