"""A step on the host: the scheduler's plan, and the results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from slipstream.core.request import Request

NUM_BINS = 16  # ranges of confidence, each with its own acceptance rate
FACTOR_PARTS = 8  # `Trim.factor` counts in units of 1 / FACTOR_PARTS


@dataclass(frozen=True)
class ChainStops:
    """Where a chain of draft tokens may end before its planned length.

    The survival of a draft position is the product of the estimated acceptance rates of the tokens
    up to it. The rate of a token is looked up by the drafter's confidence, which is the largest
    probability of the drafter's distribution at that position. Confidence does not depend on the
    token that was sampled there, so ending a chain by it does not bias the output.

    Attributes:
        rates: probability that a draft token is accepted, given that all before it were, by the
            confidence: entry i of n is for confidences of at least i / n.
        least_to_draft: the chain ends after a position whose survival is below this.
        least_to_verify: positions from the first one whose survival is below this are not verified.
    """

    rates: tuple[float, ...]
    least_to_draft: float
    least_to_verify: float


@dataclass(frozen=True)
class Trim:
    """One request's share in choosing which draft tokens of a step are verified.

    The target's pass has room for a fixed number of draft tokens of all requests together. The
    device takes those with the largest survival, by the drafter's confidences
    (`PreparationOps.trim_drafts`).

    Attributes:
        num_rows: rows for draft tokens that this request adds to that number.
        factor: factor of the rates for this request, in units of 1 / FACTOR_PARTS.
        rates: see `ChainStops`; equal for all requests of a step.
    """

    num_rows: int
    factor: int
    rates: tuple[float, ...]


class Split(NamedTuple):
    """The maximum number of draft tokens of one request by the drafters of a combination.

    Attributes:
        looked_up: from look-ups; 0: they are not asked.
        drafted: from the last drafter, for requests for which nothing was looked up.
    """

    looked_up: int
    drafted: int


@dataclass(frozen=True)
class DraftPlan:
    """How many tokens are drafted for one request in one step.

    Attributes:
        num_tokens: the maximum number of draft tokens.
        stops: where its chain may end earlier; None: only if the drafter has no proposal.
        trim: how the tokens to verify are chosen; None: all are verified.
        split: limits for the drafters of a combination; None: there are none.
    """

    num_tokens: int
    stops: ChainStops | None = None
    trim: Trim | None = None
    split: Split | None = None

    @property
    def drafted(self) -> int:
        """The maximum number of draft tokens that were not looked up."""
        return self.num_tokens if self.split is None else self.split.drafted

    def cut(self, most: int) -> "DraftPlan":
        return self if self.num_tokens <= most else replace(self, num_tokens=most)

    def drafting(self, count: int) -> "DraftPlan":
        """A plan of `count` tokens, in which as much is looked up as in this one."""
        if self.split is None:
            return DraftPlan(count)
        most = max(count, self.split.looked_up)
        return DraftPlan(most, split=Split(self.split.looked_up, count))


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step.

    Attributes:
        start: tokens in the target's KV cache when the step begins. If the step was planned before
            the results of the last one arrived, this is a lower bound, without accepted drafts.
        num_new_tokens: known tokens to compute (a prompt chunk, or the one last token).
        num_draft_tokens: maximum number of draft tokens to verify; 0 unless this step reaches the
            last known token.
        stops, trim, split: see `DraftPlan`.
        block_table: the request's KV blocks, covering start + num_new_tokens + num_draft_tokens.
        window_table: the blocks for layers with a sliding window, if those have their own blocks;
            the null block stands for tokens that no row of the step attends to.
        resumed: the place of the checkpoint from which its recurrent states are restored, if it is
            admitted with a cached prefix; else -1.
        saved: the place where this step writes a checkpoint of its states, if it may reach the
            edge of a block; else -1.
        admitted: it gets its slot in this step, because it is new or was preempted.
        adapter: the slot of the request's adapter, or -1.
        rank: the rank that runs the request, with data parallel ranks; else 0.
        reaches_end: the last row of this step's known tokens predicts a new token.
    """

    request: Request
    start: int
    num_new_tokens: int
    num_draft_tokens: int
    block_table: Sequence[int]
    admitted: bool
    reaches_end: bool
    window_table: Sequence[int] = ()
    resumed: int = -1
    saved: int = -1
    stops: ChainStops | None = None
    trim: Trim | None = None
    split: Split | None = None
    adapter: int = -1
    rank: int = 0

    @property
    def is_prompt_chunk(self) -> bool:
        return self.num_new_tokens > 1 or not self.reaches_end

    @property
    def reads_prompt(self) -> bool:
        """Whether the logits of its prompt tokens in this step are read."""
        return self.is_prompt_chunk and self.request.params.prompt_logprobs is not None


@dataclass(frozen=True)
class LastCheckpoint:
    """A checkpoint of a request that has ended or was preempted, at an edge among its last accepted
    draft tokens, which its states do not include yet.

    Attributes:
        slot: the slot that the request had.
        count: how many of these tokens the checkpoint includes.
        place: the place of the checkpoint.
        rank: see `ScheduledRequest`.
    """

    slot: int
    count: int
    place: int
    rank: int = 0


@dataclass(frozen=True)
class Batch:
    """The requests of one step, in order.

    Attributes:
        checkpoints: are written before anything else, since new requests may resume from them, and
            get the slots.
    """

    requests: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()
    checkpoints: tuple[LastCheckpoint, ...] = ()

    @property
    def admitted(self) -> list[ScheduledRequest]:
        """The requests that get their slots in this step."""
        return [item for item in self.requests if item.admitted]

    @cached_property
    def is_decode(self) -> bool:
        """Whether all requests decode: no prompt chunk, and no request is admitted."""
        for item in self.requests:
            if item.admitted or item.num_new_tokens > 1 or not item.reaches_end:
                return False
        return True


@dataclass(frozen=True)
class Committed:
    """The result of a step for one scheduled request, read back from the device.

    Attributes:
        token_ids: accepted draft tokens, then one bonus or recovered token; empty for a prompt
            chunk that does not reach the end.
        num_draft_tokens: draft tokens that were verified.
        num_accepted: how many of them were accepted.
        drafter_computed: leading tokens whose keys and values the drafter has in the shared blocks.
        num_positions: number of different positions of the draft tokens of a tree, at most its
            depth; None for a chain.
        nodes: of a tree, the numbers of the accepted draft tokens, from 1.
        looked_up: a combination's draft is from a look-up.
        confidences: the drafter's confidence for each draft token, trimmed ones included; empty if
            the drafter has none, or they are not needed.
        broken: the logits after these tokens are not finite, or all 0: none was sampled from them.
    """

    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted: int
    drafter_computed: int
    num_positions: int | None = None
    broken: bool = False
    confidences: tuple[float, ...] = ()
    nodes: tuple[int, ...] = ()
    looked_up: bool = False


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step.

    Attributes:
        draft: time of drafting.
        target: time of the target's pass, up to its logits.
        verify: time of sampling, verification, the commit, and `Drafter.observe`.
        rest: all other time since the last step, which is the host's work; for a step that admits
            requests or computes prompts, only since its own launch.
        host: time of the host's work if it overlaps with the device's (the step was launched
            ahead): a lower bound of the step's time. 0 if the device waits for the host.
    """

    draft: float
    target: float
    verify: float
    rest: float
    host: float = 0.0

    @property
    def device(self) -> float:
        """Seconds of all parts except `rest`."""
        return self.draft + self.target + self.verify


@dataclass(frozen=True)
class StepReport:
    """The results of a step.

    Attributes:
        committed: result of each scheduled request, before stop conditions are applied.
        live: whether each scheduled request was still unfinished. If not (the step was launched
            ahead), its result is discarded.
        padded: the step ran as a CUDA graph, padded to a bucket of requests and draft tokens.
        num_rows: rows that the target's pass computed, padding included.
    """

    batch: Batch
    committed: Sequence[Committed]
    live: Sequence[bool]
    times: StepTimes
    padded: bool
    num_rows: int
