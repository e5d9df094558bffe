"""The interface of drafters.

The engine asks a drafter what it can do (`limits`), never which one it is. A new method is one
folder and one line in `catalogue.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.cache.spec import CacheLayout, CacheSizes, ModelCache
from slipstream.core.batch import Batch
from slipstream.core.request import Request
from slipstream.kernels.columns import Columns
from slipstream.layers.adapters import AdapterSlots
from slipstream.models.decoder import Decoder
from slipstream.runner.device_batch import DeviceBatch, Guesses
from slipstream.runner.device_state import DeviceState
from slipstream.runner.excerpts import ExcerptSizes
from slipstream.runner.model_runner import Forward
from slipstream.sampling.state import SamplingState
from slipstream.sampling.verification import TreeNodes, Verdict

NO_STATES = (
    "drafters whose layers keep a state of each request are not supported; use a draft model with "
    "attention alone"
)


@dataclass(frozen=True)
class Draft:
    """The guesses of one step, one row per request of the batch.

    Attributes:
        token_ids: [R, K] int64; only the first num_tokens[r] of a row count.
        num_tokens: [R] int64, from 0 to the number that was scheduled.
        one_hot: [R] bool, true where the guess is certain (greedy, n-gram) and q is 1.
        probs: [R, K, Vq] float32, the q that each token was sampled from, or None when every row
            is one-hot.
        vocabulary: [Vq] int64, rising: the token id of each column of `probs`; None when they are
            the ids from 0 on.
        written: whether the tokens stand behind the known ones in the device state already.
        tree: what each token continues; None: the one before it. Trees are one-hot.
        certain: [R, K] bool, tokens that a grammar put in place of what was sampled; None: nowhere.
        confidences: [R, K] float32, the largest probability that the drafter gave any token in each
            place; not a number where it had none to give. None: nobody asked, or nobody knows.
        shares: `probs` have this rank's columns alone.
    """

    token_ids: Tensor
    num_tokens: Tensor
    one_hot: Tensor
    probs: Tensor | None = None
    vocabulary: Tensor | None = None
    written: bool = False
    tree: TreeNodes | None = None
    certain: Tensor | None = None
    confidences: Tensor | None = None
    shares: bool = False

    def chances(self, columns: Columns) -> Tensor | None:
        """[R, K], the q of each token, without meaning where it is certain; None: all are.

        Args:
            columns: that `probs` have, where ranks share them.
        """
        if self.probs is None:
            return None
        places = self.token_ids
        if self.vocabulary is not None:
            places = torch.searchsorted(self.vocabulary, places)
        # Another drafter's guess may have no column; it is one-hot, so any will do.
        if not self.shares:
            places = places.clamp(0, self.probs.shape[2] - 1)
            return self.probs.gather(2, places.unsqueeze(2)).squeeze(2)
        places, is_own = columns.places(places, self.probs)
        own = self.probs.gather(2, places.unsqueeze(2)).squeeze(2)
        return columns.combined(own.masked_fill(~is_own, 0.0))

    def certain_tokens(self, chances: Tensor | None) -> Tensor | None:
        """[R, K] bool, tokens whose q counts as 1, though the others of their request were sampled:
        those of grammars, and where a drafter's logits were no numbers. None: nowhere."""
        if chances is None:
            return self.certain
        # Nothing is ever sampled with q = 0, but a row of logits that are no numbers gives zeros.
        broken = ~(chances > 0)
        return broken if self.certain is None else self.certain | broken

    def first(self, requests: int) -> "Draft":
        """The drafts of the first requests."""
        return replace(
            self,
            token_ids=self.token_ids[:requests],
            num_tokens=self.num_tokens[:requests],
            one_hot=self.one_hot[:requests],
            probs=None if self.probs is None else self.probs[:requests],
            confidences=None if self.confidences is None else self.confidences[:requests],
            tree=None if self.tree is None else self.tree.first(requests),
        )

    @staticmethod
    def empty(batch: DeviceBatch) -> "Draft":
        return Draft(
            token_ids=batch.slots.new_zeros((batch.num_requests, 0)),
            num_tokens=torch.zeros_like(batch.slots),
            one_hot=torch.ones_like(batch.at_end),
            written=True,
        )

    @staticmethod
    def of_guesses(batch: DeviceBatch) -> "Draft":
        return Draft(batch.guesses, batch.num_draft_tokens, torch.ones_like(batch.at_end))


@dataclass(frozen=True)
class DrafterLimits:
    """What a drafter can do.

    Attributes:
        max_speculative_tokens: largest K, or None for any.
        max_model_len: beyond this many tokens it does not draft, or None for no limit.
        drafts_at_prefill: it can guess behind a prompt that the target has not seen yet.
        cache_identity: names what it keeps in the shared blocks; empty when nothing.
        on_device: it needs nothing of the host's to guess, so a step may begin before the host
            knows what the last one gave.
        keeps_probabilities: it keeps nothing in the blocks, but the q of every draft token.
        parallel: all its draft tokens come from one pass over waiting and mask tokens.
        is_lookup: it knows when it has no guess, and those that it has are one-hot.
        may_skip_steps: left out of steps, it makes up for them when it drafts again, however many
            tokens they gained, as long as batches are exact.
        tree_depth: of drafts that are trees, their depth.
    """

    max_speculative_tokens: int | None = None
    max_model_len: int | None = None
    drafts_at_prefill: bool = False
    cache_identity: str = ""
    on_device: bool = True
    keeps_probabilities: bool = False
    parallel: bool = False
    is_lookup: bool = False
    may_skip_steps: bool = False
    tree_depth: int | None = None

    def draft_rows(self, num_speculative_tokens: int) -> int:
        """Rows that a request may have in a pass that gives all draft tokens: those that wait
        behind a round whose drafts were all accepted, and masks; 0 for drafters without one."""
        return 2 * num_speculative_tokens if self.parallel else 0


class Drafter:
    """Runs ahead of the target; a base whose defaults keep nothing.

    A step asks it four things in this order. `prepare` and `read_prompts` run on the host;
    `propose` and `observe` are device work that may be captured in a graph: they look at tensors
    only and, unless the batch is exact, wait for none.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state

    def prepare(self, batch: Batch) -> Guesses | None:
        """Called on the host before the device's part of a step.

        Requests marked `admitted` are new to this drafter (or come back after a preemption): it
        owns their first `start` tokens in the shared blocks, from the prefix cache, and no more.

        Returns:
            At most `num_draft_tokens` guesses for each scheduled request (None where the device is
            to draft), from a drafter that runs on the host; None from others.
        """
        return None

    def propose(self, batch: DeviceBatch) -> Draft:
        """Guess at most `num_draft_tokens` tokens for each request of the batch, whose `width` is 1
        or more."""
        raise NotImplementedError

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """Take in what was committed; the device state already holds it."""

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        """Take in the prompt chunks of a step that had some, once all else is done."""

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop what is kept for requests that finished or were preempted (their slot is gone).

        What is kept by slot may stay: `prepare` sees when a slot is given out anew."""

    def cached_tokens(self, slots: Tensor) -> Tensor:
        """[R] int64: leading tokens of the requests in these slots whose blocks hold this
        drafter's part as well."""
        return self._state.num_computed[slots]


class NoDrafter(Drafter):
    """Plain decoding: speculation with an empty draft."""

    def propose(self, batch: DeviceBatch) -> Draft:
        return Draft.empty(batch)


class HostDrafter(Drafter):
    """Guesses in `prepare`, on the host, from known tokens; the device only gets the guesses. One
    that does not is a follower's, which is told them."""

    def propose(self, batch: DeviceBatch) -> Draft:
        return Draft.of_guesses(batch)


@dataclass(frozen=True)
class Needs:
    """What a drafter wants to see of the target's passes (`Forward`).

    Attributes:
        stream_layers: layers (from 0) of the target whose incoming residual stream it reads; the
            number of layers stands for what leaves the last one.
        features: it reads `streams` or `hidden` of every token. Behind a prefix hit the target then
            computes the last cached token once more, so that its features are there too.
    """

    stream_layers: tuple[int, ...] = ()
    features: bool = False


@dataclass(frozen=True)
class DrafterResources:
    """What the engine gives a drafter when it is built.

    Attributes:
        num_speculative_tokens: the engine's K.
        target: the target's network, whose embedding and head a drafter may share.
        target_cache: the target's keys and values, which a drafter may read.
        captured: steps are captured, so that there are batches that are not exact.
        in_combination: another drafter's guesses may be verified in place of its own.
        gives_confidences: drafts come with the confidences of their tokens, if the drafter knows
            them.
        synthetic_rates: [L, K] float32 where a benchmark says what is accepted, see `VerifyOp`:
            confidences are then these rates.
        shares_prefixes: later requests find the blocks of a prompt, and what it keeps in them.
        leads: what is guessed on the host is guessed in this process; others are told.
    """

    state: DeviceState
    sampling: SamplingState
    cache_sizes: CacheSizes
    num_speculative_tokens: int
    target: Decoder
    target_cache: ModelCache
    captured: bool = True
    in_combination: bool = False
    gives_confidences: bool = False
    synthetic_rates: Tensor | None = None
    shares_prefixes: bool = True
    leads: bool = True


@dataclass(frozen=True)
class DraftWindow:
    """Keys and values of the last `tokens` tokens, and the first ones, of every slot."""

    layout: CacheLayout
    tokens: int

    def bytes_per_request(self, block_size: int, num_speculative_tokens: int) -> int:
        blocks = ExcerptSizes(self.tokens, num_speculative_tokens, block_size).num_blocks
        return blocks * block_size * self.layout.bytes_per_token


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedDrafter:
    """A drafter's weights in memory, before the size of the cache is known.

    Attributes:
        build: makes the drafter with what the engine lends it.
        layout: what it adds to every block; None: nothing.
        window: what it keeps of each request beside the blocks; None: nothing.
        adapters: slots beside its matrices; None: it takes no adapters.
    """

    build: Callable[[DrafterResources], Drafter]
    limits: DrafterLimits = DrafterLimits()
    needs: Needs = Needs()
    layout: CacheLayout | None = None
    window: DraftWindow | None = None
    adapters: AdapterSlots | None = None

    @property
    def layouts(self) -> list[CacheLayout]:
        """All that its layers keep."""
        own = [] if self.window is None else [self.window.layout]
        return own if self.layout is None else [self.layout, *own]


def load_host_drafter(make: Callable[[DeviceState], Drafter]) -> LoadedDrafter:
    """A drafter on the host: nothing to load, and nothing in the blocks."""
    return LoadedDrafter(
        build=lambda resources: (
            make(resources.state) if resources.leads else HostDrafter(resources.state)
        ),
        limits=DrafterLimits(drafts_at_prefill=True, on_device=False, is_lookup=True),
    )


PLAIN_DECODING = LoadedDrafter(build=lambda resources: NoDrafter(resources.state))
