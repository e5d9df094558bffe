"""Which draft tokens the target accepts, and the one token that it adds."""

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from slipstream.kernels.sampling import Needs, SampleRows
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

    Returns:
        [R] int64, columns.
    """
    logits = allow_next(logits, slots, positions, state, uses, vocabulary)
    is_plain = greedy_only or Uses.SAMPLING not in uses
    assert (probs_out is None) == is_plain, "probs_out belongs to batches that are sampled"
    tensors, needs = state.tensors(), needs_of(uses)
    return state.ops.draft(
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
