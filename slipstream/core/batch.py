"""What one step works on, as the host sees it: the scheduler's plan and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.request import Request

NUM_BINS = 16  # ranges of confidence that chances are told for
FACTOR_PARTS = 8  # what factors on chances are counted in


@dataclass(frozen=True)
class ChainStops:
    """When a chain of draft tokens ends before its plan does.

    A place survives with the product of the chances of the tokens up to it. What these are for a
    token follows from the drafter's confidence at its place, the largest probability there, which
    does not depend on the token that is sampled: so a choice by it biases nothing.

    Attributes:
        rates: the chance that a draft token is accepted where all before it were, by confidence:
            place i of n is for confidences from i / n on.
        least_to_draft: below this survival no further token is drafted behind a place.
        least_to_verify: below this survival a place is not verified, nor what stands behind it.
    """

    rates: tuple[float, ...]
    least_to_draft: float
    least_to_verify: float


@dataclass(frozen=True)
class Trim:
    """A request's part in rows that the device gives to the draft tokens of the whole step that are
    the most likely to survive, by the drafter's confidences (see `TrimDraftsOp`).

    Attributes:
        num_rows: what it adds to the rows that are given out.
        factor: on the chances that confidences mean, in parts of `FACTOR_PARTS`.
        rates: the chance that a draft token is accepted where all before it were, by confidence:
            place i of n is for confidences from i / n on. Equal for all requests of a step.
    """

    num_rows: int
    factor: int
    rates: tuple[float, ...]


@dataclass(frozen=True)
class DraftPlan:
    """How much is drafted for one request in one step.

    Attributes:
        num_tokens: at most.
        stops: when its chain ends earlier; None: only where the drafter has no guess.
        trim: which of its tokens are verified; None: all.
    """

    num_tokens: int
    stops: ChainStops | None = None
    trim: Trim | None = None


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step.

    Attributes:
        start: tokens already in the target's KV cache, as far as the host knows: where a step is
            planned before the last one's results are here, the first row may stand further on.
        num_new_tokens: known tokens to compute (a prompt chunk, or the one last token).
        num_draft_tokens: draft tokens to verify at most; only when this step reaches the last
            known token.
        stops: when its chain of draft tokens may end earlier.
        trim: which of its draft tokens are verified; None: all.
        block_table: the request's KV blocks, covering start + num_new_tokens + num_draft_tokens.
        window_table: the same for layers with a window, where those have blocks of their own; the
            null block stands for tokens that no row of the step sees.
        resumed: the place of the checkpoint that its states begin with, where layers keep such and
            it is admitted behind a prefix; else -1.
        saved: the place for the checkpoint of a step that may reach the edge of a block; -1: none.
        admitted: it got its slot in this step (anew, or again after a preemption).
        adapter: the slot of the request's adapter, or -1.
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
    adapter: int = -1

    @property
    def is_prompt_chunk(self) -> bool:
        return self.num_new_tokens > 1 or not self.reaches_end


@dataclass(frozen=True)
class Batch:
    """The requests of one step, in order."""

    requests: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether every request only goes on: no prompt, nobody new."""
        return all(not (item.is_prompt_chunk or item.admitted) for item in self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens + item.num_draft_tokens for item in self.requests)


@dataclass(frozen=True)
class Committed:
    """What one scheduled request gained in a step, in host numbers.

    Attributes:
        token_ids: accepted draft tokens and then one bonus or recovered token; empty for a prompt
            chunk that does not reach the end.
        num_draft_tokens: draft tokens that were really verified.
        num_accepted: how many of them were accepted.
        drafter_computed: leading tokens that the drafter has in the shared blocks, as of now.
        num_positions: of the draft tokens; of a tree its depth at most.
        confidences: the drafter's, of each draft token, of those that were trimmed as well; empty
            where it has none, or nobody reads them.
        broken: the logits behind these tokens are not finite, so there is no further one.
    """

    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted: int
    drafter_computed: int
    num_positions: int | None = None
    broken: bool = False
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step: drafting, the target's pass up to its logits, verification (sampling,
    the verdict, committing it, and what the drafter takes note of), the rest."""

    draft: float
    target: float
    verify: float
    rest: float


@dataclass(frozen=True)
class StepReport:
    """What came of a step.

    Attributes:
        committed: per scheduled request, what it gained (before stop conditions cut it).
        live: per scheduled request, whether it had not ended before; if it had, what is here about
            it is surplus.
        padded: it was a captured step, padded to a bucket of requests and a number of drafts.
        num_rows: rows that the target's pass has computed, padding included.
    """

    batch: Batch
    committed: Sequence[Committed]
    live: Sequence[bool]
    times: StepTimes
    padded: bool
    num_rows: int
