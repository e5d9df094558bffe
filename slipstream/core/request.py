"""A request as the scheduler keeps it: tokens, sampling parameters and status."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from slipstream.core.adapters import NamedAdapter
from slipstream.core.sampling_params import SamplingParams, Verification
from slipstream.core.spans import Span
from slipstream.core.structured import Guide


class RequestStatus(Enum):
    """Whether a request waits, runs or has finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why an output ended: a stop token, a stop string or the end of its grammar; a length limit;
    an abort; or an error (logits that are not finite, or a grammar that allows no token)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


SEED_MASK = (1 << 64) - 1
SPLITMIX_STEP = 0x9E3779B97F4A7C15


@dataclass(eq=False)
class Request:
    """The host's view of one request.

    Ranges over `token_ids` (prompt, then output):

        0 ........ num_computed ........ num_tokens
        | in the target's KV cache | known, not yet computed |

    A decoding request has exactly one token that is not computed: the last one. `num_computed`
    never counts rejected draft tokens.

    Args:
        request_id: unique among unfinished requests.
        token_ids: the prompt; grows by the committed tokens.
        params: sampling parameters; each sample of `n` is a request of its own.
        seed: 64-bit seed of this sample.
        stop_token_ids: the ids that end the output, with the model's EOS ids unless `ignore_eos`.
        max_tokens: maximum number of output tokens, at most what `max_model_len` leaves.
        num_speculative_tokens: maximum of draft tokens per step; 0: it never drafts.
        arrival: number of requests that arrived before it.
        priority: requests with a smaller number are served first, whenever they arrived.
        cache_salt: cached blocks are shared only with requests of the same salt.
        adapter: the LoRA adapter for all its tokens; None: there is none.
        spans: images in the prompt, in order.
        bad_words: token sequences that must not occur in the output (from `params.bad_words`).
        guide: the state of the output's grammar; None: there is no grammar.
        verification: how its drafts are verified.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_tokens: int
    num_speculative_tokens: int
    arrival: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    guide: Guide | None = None
    verification: Verification = Verification.REJECTION
    priority: int = 0
    cache_salt: str = ""
    adapter: NamedAdapter | None = None
    spans: Sequence[Span] = ()
    num_prompt_tokens: int = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    slot: int = -1  # place in the device state while running
    num_computed: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it was admitted
    place_time: float | None = None  # time of its first admission, in seconds of `perf_counter`
    num_steps: int = 0  # verification steps so far; keys the noise, survives preemption
    num_preemptions: int = 0
    drafter_computed: int = 0  # leading tokens that the drafter had after the last committed step
    steps_in_flight: int = 0  # planned, but not committed yet

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def adapts_drafts(self) -> bool:
        """Whether its adapter has a part for the drafter."""
        return self.adapter is not None and self.adapter.adapts_drafts

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of queues; the smallest is first."""
        return self.priority, self.arrival

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def uses_prefix_cache(self) -> bool:
        """False with prompt logprobs, which need the logits of every prompt token."""
        return self.params.prompt_logprobs is None

    @property
    def has_place(self) -> bool:
        """Whether it holds a slot or blocks, or a step failed while it was being admitted."""
        return self.status is RequestStatus.RUNNING or self.slot >= 0 or self.num_computed > 0

    def lose_place(self) -> None:
        """Reset the request to waiting, with no computed tokens."""
        self.status, self.slot = RequestStatus.WAITING, -1
        self.num_computed = self.steps_in_flight = 0
        self.num_preemptions += 1


def derive_seed(seed: int, sample_index: int) -> int:
    """The 64-bit seed of sample `sample_index` of a request; sample 0 keeps the seed itself.

    One output of SplitMix64 (Steele et al. 2014), started from the mixed seed: distinct for all
    samples of a seed, and unrelated for neighbouring seeds.
    """
    if sample_index == 0:
        return seed
    return _mix(_mix(seed & SEED_MASK) + sample_index * SPLITMIX_STEP)


def _mix(value: int) -> int:
    """The finaliser of SplitMix64: a bijection on 64-bit numbers."""
    value &= SEED_MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & SEED_MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & SEED_MASK
    return value ^ (value >> 31)
