"""Which draft tokens the target accepts, and the one token that it adds.

Of drafts that are token trees the target takes one path. A tree's tokens are no samples: the
children of a node are the drafter's likeliest tokens there, certain each (q is 1). To accept a
child with its probability under p, else to remove it from p, scale p to 1 and go on to its next
sibling, is the same as to sample a token from p and to look for it among the children: either way
child c is taken with p(c), and any other token t with p(t). So every node is judged as in plain
decoding, a token is sampled behind each, and the path leads from the root to the child that was
sampled, as long as there is one. The last token sampled on the path is the recovered token, or the
bonus token at a leaf.

The noise of these samples is that of plain decoding at the same position. Only one node of a
position lies on the path, so what leaves has exactly the distribution p; and it is the very text
that plain decoding with the same seed gives.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from slipstream.kernels.columns import ALL_COLUMNS
from slipstream.kernels.sampling import PADDING, Needs, SampleRows
from slipstream.sampling.logits import allow_next, ban_words
from slipstream.sampling.state import SamplingState, Uses


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a step gave its requests.

    Attributes:
        token_ids: [R, K+1] int64: accepted draft tokens, then one bonus or recovered token,
            then -1.
        num_tokens: [R] int64, `num_accepted` + 1.
        num_accepted: [R] int64, accepted draft tokens.
        path: [R, W] int64, which of a request's rows gave each token, where drafts are trees; what
            stands behind `num_tokens` means nothing. None: its first rows, in their order.
    """

    token_ids: Tensor
    num_tokens: Tensor
    num_accepted: Tensor
    path: Tensor | None = None


def verify(
    logits: Tensor,
    rows: SampleRows,
    state: SamplingState,
    uses: frozenset[Uses],
    rates: Tensor | None = None,
) -> Verdict:
    """Judge every request's draft, greedy and sampled requests side by side.

    Greedy requests (temperature 0) accept while the draft token is the argmax, coupled ones while
    it is the target's own sample. Nothing here changes the state: `SamplingState.commit` takes the
    verdict over. What a request gets does not depend on the others, nor on whether rows are ragged
    or uniform.

    Args:
        logits: [N, v] float32, the target's raw logits, of the state's columns.
        rows: whose rows these are, and the drafts.
        state: parameters, seeds and step counters of the requests.
        uses: of these requests; with `Uses.BAD_WORDS` the host waits for the device, else never.
        rates: [R, K or more] float32, for benchmarks only: the chance that each position is
            accepted when all before it were, whatever the target says; None: the target decides.

    Returns:
        The verdict for the R requests of `rows`.
    """
    if Uses.BAD_WORDS in uses:
        logits = ban_words(logits, rows, state)
    if rates is not None or not rows.max_draft_tokens:
        uses -= {Uses.BLOCK, Uses.COUPLED}
    if rates is not None:
        rates = rates[:, : rows.max_draft_tokens]
    return Verdict(*state.ops.verify(logits, rows, state.tensors(), needs_of(uses), rates))


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
) -> Tensor:
    """Sample one draft token for each request.

    Requests with a temperature are sampled from their temperature, min_p, top_k and top_p (but
    without processors: the target corrects for those) with noise of their own, coupled ones with
    the target's; greedy ones take the argmax.

    Args:
        logits: [R, V] of the drafter, any float dtype.
        slots: [R] int64.
        positions: [R] int64, of the tokens to be drafted.
        uses: of these requests.
        num_legal_tokens: ids from here on are padding and are never drafted.
        greedy_only: the argmax for all requests.
        probs_out: [R, min(V, num_legal_tokens)] float32, of any row stride: receives the very
            numbers that the tokens were sampled from; zeros for greedy requests. It is given when
            any request is sampled, and only then.
        vocabulary: [V] int64, the token ids of the columns of `logits`; None for those from 0 on.
        confidence_out: [R] float32: receives the largest probability of each row at temperature 1,
            which depends neither on the request's parameters nor on the token that is drawn.
        shares: logits and probs_out have this rank's columns alone, of V.

    Returns:
        [R] int64, columns.
    """
    columns = state.columns if shares else ALL_COLUMNS
    logits = allow_next(logits, slots, positions, state, uses, vocabulary, columns)
    is_plain = greedy_only or Uses.SAMPLING not in uses
    assert (probs_out is None) == is_plain, "probs_out belongs to batches that are sampled"
    tensors, needs = state.tensors(), needs_of(uses)
    draft = state.ops.draft_shares if shares else state.ops.draft
    assert draft is not None, "drafters share their columns with the target alone"
    return draft(
        logits, slots, positions, tensors, needs, num_legal_tokens, probs_out, confidence_out,
        vocabulary,
    )  # fmt: skip


@cache
def needs_of(uses: frozenset[Uses]) -> Needs:
    """The part of `uses` that ops of sampling serve."""
    return Needs(
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


# What looks at the tokens between the root and a node.
_HISTORY = frozenset((Uses.PENALTIES, Uses.BAD_WORDS))


@dataclass(frozen=True, eq=False)
class TreeNodes:
    """The shape of each request's tree. Node 0 is its last known token, the root; node i is draft
    token i - 1, and its parent comes before it.

    Attributes:
        parents: [R, K + 1] int64; the root is its own.
        depths: [R, K + 1] int64, 0 of the root.
        ancestors: [R, K + 1] int64, bit j says whether node j lies on the path from the root to a
            node, both included.
        depth: the largest.
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    depth: int

    def first(self, requests: int) -> "TreeNodes":
        """The trees of so many requests."""
        parents, depths, words = self.parents, self.depths, self.ancestors
        return TreeNodes(parents[:requests], depths[:requests], words[:requests], self.depth)


@dataclass(frozen=True, eq=False)
class DraftedTrees:
    """The trees of a step, and where their rows of logits are.

    Attributes:
        slots: [R] int64, slots in the `SamplingState`.
        positions: [R] int64, number of known tokens.
        token_ids: [R, K] int64.
        num_nodes: [R] int64, how many of them there are: the first ones.
        most_accepted: [R] int64, how many may be accepted, however deep the tree is.
        num_rows: the sum of `num_nodes` and R, for ragged rows; None for K + 1 rows a request. Row
            i of a request is that of its node i.
        allowed: [N, ceil(V / 32)] int32 or None, see `SampleRows`.
    """

    nodes: TreeNodes
    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    num_nodes: Tensor
    most_accepted: Tensor
    num_rows: int | None
    allowed: Tensor | None = None


def verify_trees(
    logits: Tensor,
    trees: DraftedTrees,
    state: SamplingState,
    uses: frozenset[Uses],
) -> Verdict:
    """The path through every request's tree; see `verification.verify` for what is left as it is.

    Args:
        logits: [N, V] float32, the target's raw logits.

    Returns:
        `token_ids` [R, K + 1] of which depth + 1 are used at most, and the `path`.
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
    # Every row is without a draft: its sample is that of plain decoding, in all modes.
    plain = uses - {Uses.COUPLED}
    sampled = verify(logits, _node_rows(trees, layout, uses), state, plain).token_ids[:, 0]
    node = torch.arange(width, device=logits.device)
    row = layout.first_row.unsqueeze(1) + torch.minimum(node, trees.num_nodes.unsqueeze(1))
    return _walk(trees, sampled[row])


def _node_rows(trees: DraftedTrees, layout: SampleRows, uses: frozenset[Uses]) -> SampleRows:
    """Every row as a request without a draft, behind the tokens between the root and its node."""
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


def _walk(trees: DraftedTrees, sampled: Tensor) -> Verdict:
    """From the token behind every node, sampled [R, K + 1], to the path that they make.

    A node is on it when each of its ancestors, itself included, is what was sampled behind its
    parent. Siblings differ, so there is one path, and its nodes rise.
    """
    nodes, width = trees.nodes, sampled.shape[1]
    node = torch.arange(width, device=sampled.device)
    used = node[1:] <= trees.num_nodes.unsqueeze(1)
    used &= nodes.depths[:, 1:] <= trees.most_accepted.unsqueeze(1)
    follows = used & (sampled.gather(1, nodes.parents[:, 1:]) == trees.token_ids)
    bits = torch.ones_like(node[1:]) << node[1:]
    misses = torch.where(follows, 0, bits).sum(1)  # [R], a word of nodes
    on_path = nodes.ancestors & misses.unsqueeze(1) == 0
    # The last column takes what is off the path.
    place = torch.where(on_path, on_path.cumsum(1) - 1, width)
    path = node.new_zeros((len(sampled), width + 1))
    path = path.scatter_(1, place, node.expand_as(place))[:, :width]
    num_accepted = on_path.sum(1) - 1
    token_ids = torch.where(node <= num_accepted.unsqueeze(1), sampled.gather(1, path), PADDING)
    return Verdict(token_ids, num_accepted + 1, num_accepted, path[:, : nodes.depth + 1])
