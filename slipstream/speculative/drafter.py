"""The interface of drafters.

The engine depends on a drafter's `limits`, never on its method. A new method is one folder and one
line in `catalogue.py`.
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
from slipstream.runner.graphs import Recorder
from slipstream.runner.model_runner import Forward
from slipstream.sampling.state import SamplingState
from slipstream.sampling.verification import TreeNodes, Verdict

NO_STATES = (
    "drafters whose layers keep a state of each request are not supported; use a draft model with "
    "attention alone"
)


@dataclass(frozen=True)
class Draft:
    """The draft tokens of one step, one row for each request of the batch.

    q is the drafter's distribution at a position, as in the papers on speculative sampling.

    Attributes:
        token_ids: [R, K] int64; only the first num_tokens[r] of a row are valid.
        num_tokens: [R] int64, from 0 to the scheduled number.
        one_hot: [R] bool, the draft was not sampled (greedy, n-gram), so q is 1.
        probs: [R, K, Vq] float32, the q from which each token was sampled; None: every row is
            one-hot.
        vocabulary: [Vq] int64, rising: the token id of each column of `probs`; None: column i is
            token i.
        written: the tokens have already been written after the known ones in the device state.
        tree: the parent of each token; None: drafts are chains. Trees are one-hot.
        certain: [R, K] bool, tokens with which a grammar replaced sampled ones; None: there are
            none.
        confidences: [R, K] float32, the largest probability of the drafter's distribution at each
            position, NaN if a position has none. None: the drafter has none, or they are not used.
        shares: `probs` has only this rank's columns.
        looked_up: [R] bool, of a combination, the draft is from a look-up; None: of others.
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
    looked_up: Tensor | None = None

    def chances(self, columns: Columns) -> Tensor | None:
        """[R, K], the q of each token, undefined for one-hot drafts; None: all drafts are one-hot.

        Args:
            columns: the columns of `probs`, if ranks split them.
        """
        if self.probs is None:
            return None
        places = self.token_ids
        if self.vocabulary is not None:
            places = torch.searchsorted(self.vocabulary, places.contiguous())
        # A token of another drafter may have no column here; its row is one-hot, so any will do.
        if not self.shares:
            places = places.clamp(0, self.probs.shape[2] - 1)
            return self.probs.gather(2, places.unsqueeze(2)).squeeze(2)
        places, is_own = columns.places(places, self.probs)
        own = self.probs.gather(2, places.unsqueeze(2)).squeeze(2)
        return columns.combined(own.masked_fill(~is_own, 0.0))

    def certain_tokens(self, chances: Tensor | None) -> Tensor | None:
        """[R, K] bool, tokens with q = 1 in drafts that were sampled: tokens that a grammar forced,
        and tokens of rows whose logits were NaN. None: there are none."""
        if chances is None:
            return self.certain
        # No token is sampled with q = 0, but logits that are NaN give a row of zeros.
        broken = ~(chances > 0)
        return broken if self.certain is None else self.certain | broken

    def first(self, requests: int) -> "Draft":
        return replace(
            self,
            token_ids=self.token_ids[:requests],
            num_tokens=self.num_tokens[:requests],
            one_hot=self.one_hot[:requests],
            probs=None if self.probs is None else self.probs[:requests],
            confidences=None if self.confidences is None else self.confidences[:requests],
            tree=None if self.tree is None else self.tree.first(requests),
            looked_up=None if self.looked_up is None else self.looked_up[:requests],
        )

    @staticmethod
    def empty(batch: DeviceBatch) -> "Draft":
        return Draft(
            token_ids=batch.no_tokens,
            num_tokens=batch.zeros,
            one_hot=batch.ones,
            written=True,
        )

    @staticmethod
    def of_guesses(batch: DeviceBatch) -> "Draft":
        return Draft(batch.guesses, batch.num_draft_tokens, batch.ones)


@dataclass(frozen=True)
class DrafterLimits:
    """The capabilities of a drafter.

    Attributes:
        max_speculative_tokens: largest K; None: no limit.
        max_model_len: it does not draft for requests of more tokens; None: no limit.
        drafts_at_prefill: it can draft after a prompt that the target has not computed yet.
        cache_identity: identifies the keys and values that it stores in the shared blocks, since
            requests share blocks only with equal identities; empty: it stores none.
        on_device: it needs no data from the host, so a step may be launched before the host has
            the results of the last one.
        keeps_probabilities: it stores nothing in the blocks, but q of every draft token.
        parallel: it drafts all tokens in one pass, over mask tokens and tokens that wait for it.
        is_lookup: it drafts nothing if it finds no match; its drafts are one-hot.
        may_skip_steps: it need not be called in every step: it catches up when it drafts again, if
            batches are exact.
        tree_depth: the depth of its token trees; None: it drafts chains.
        lookup_passes: of a combination in which look-ups precede another drafter, passes of that
            in an exact step for a request whose draft was looked up; None: of others.
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
    lookup_passes: int | None = None

    def draft_rows(self, num_speculative_tokens: int) -> int:
        """Maximum number of rows of a request in the pass of a parallel drafter: the tokens of a
        round whose drafts were all accepted, and the mask tokens. 0 for other drafters."""
        return 2 * num_speculative_tokens if self.parallel else 0


class Drafter:
    """The base class of all drafters, which has no state.

    A step calls `prepare`, `propose`, `observe` and `read_prompts`, in this order. The first and
    the last run on the host. `propose` and `observe` may be captured in a CUDA graph: they depend
    only on tensors, and wait for the device only if the batch is exact (not padded).
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state

    def prepare(self, batch: Batch) -> Guesses | None:
        """Called on the host before the device's part of a step.

        Requests with `admitted` are new to this drafter, or return after a preemption. Only the
        first `start` tokens of such a request are in the shared blocks, from the prefix cache.

        Returns:
            From a drafter that runs on the host: at most `num_draft_tokens` draft tokens for each
            scheduled request, or None if the device drafts for it. From other drafters: None.
        """
        return None

    def propose(self, batch: DeviceBatch) -> Draft:
        """Draft at most `num_draft_tokens` tokens for each request of the batch, whose `width` is
        1 or more. Known tokens in `DeviceState` are int32, those of a draft int64."""
        raise NotImplementedError

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """Process the verdict and the target's features; the tokens have been committed."""

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        """Compute the drafter's cache for prompt chunks; called last in steps that have some."""

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop the state of requests that finished or were preempted, whose slots are free.

        State by slot may stay: `prepare` gets new requests of a slot with `admitted`."""

    def cached_tokens(self, slots: Tensor) -> Tensor:
        """[R] int64: for the requests in these slots, how many leading tokens have this drafter's
        keys and values in their blocks."""
        return self._state.num_computed.index_select(0, slots)


class NoDrafter(Drafter):
    """Plain decoding: speculation with an empty draft."""

    def propose(self, batch: DeviceBatch) -> Draft:
        return Draft.empty(batch)


class HostDrafter(Drafter):
    """Drafts on the host, in `prepare`, from known tokens, and sends the tokens to the device.

    Follower ranks use this class itself, since they get the tokens from the leader."""

    def propose(self, batch: DeviceBatch) -> Draft:
        return Draft.of_guesses(batch)


@dataclass(frozen=True)
class Needs:
    """The results of the target's passes (`Forward`) that a drafter reads.

    Attributes:
        stream_layers: layers (from 0) of the target whose incoming residual stream it reads; the
            number of layers means the stream that leaves the last one.
        features: it reads `streams` or `hidden` of every token. After a prefix hit the target then
            computes the last cached token again, for its features.
        hidden: it reads `hidden` of every token, not only of those that are judged.
    """

    stream_layers: tuple[int, ...] = ()
    features: bool = False
    hidden: bool = False


@dataclass(frozen=True)
class DrafterResources:
    """The arguments for building a drafter.

    Attributes:
        num_speculative_tokens: the engine's K.
        target: the target's network, whose embedding and head a drafter may share.
        target_cache: the target's keys and values, which a drafter may read.
        captured: steps are captured in CUDA graphs, so some batches are padded.
        record: captures passes over short prompts (`CapturedPasses`); None: they are not captured.
        in_combination: another drafter's tokens may be verified instead of its own.
        gives_confidences: its drafts must have `confidences`, if the drafter has some.
        synthetic_rates: [L, K] float32, acceptance rates that a benchmark forces (see `VerifyOp`);
            they then replace the confidences. None: verification is real.
        shares_prefixes: later requests may reuse a prompt's blocks, with the drafter's data.
        leads: this process drafts on the host, and sends the tokens to the followers.
    """

    state: DeviceState
    sampling: SamplingState
    cache_sizes: CacheSizes
    num_speculative_tokens: int
    target: Decoder
    target_cache: ModelCache
    captured: bool = True
    record: Recorder | None = None
    in_combination: bool = False
    gives_confidences: bool = False
    synthetic_rates: Tensor | None = None
    shares_prefixes: bool = True
    leads: bool = True


@dataclass(frozen=True)
class DraftWindow:
    """The KV cache of a drafter with a window, for every slot: the last `tokens` tokens, and the
    first ones (attention sinks)."""

    layout: CacheLayout
    tokens: int

    def bytes_per_request(self, block_size: int, num_speculative_tokens: int) -> int:
        blocks = ExcerptSizes(self.tokens, num_speculative_tokens, block_size).num_blocks
        return blocks * block_size * self.layout.bytes_per_token


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedDrafter:
    """A drafter's weights in memory, before the size of the cache is known.

    Attributes:
        build: builds the drafter, given its resources.
        layout: the layers that it adds to the blocks of the cache; None: none.
        window: the KV cache that it has for each request outside of the blocks; None: none.
        adapters: slots for LoRA adapters of its matrices; None: it supports no adapters.
    """

    build: Callable[[DrafterResources], Drafter]
    limits: DrafterLimits = DrafterLimits()
    needs: Needs = Needs()
    layout: CacheLayout | None = None
    window: DraftWindow | None = None
    adapters: AdapterSlots | None = None

    @property
    def layouts(self) -> list[CacheLayout]:
        own = [] if self.window is None else [self.window.layout]
        return own if self.layout is None else [self.layout, *own]


def load_host_drafter(make: Callable[[DeviceState], Drafter]) -> LoadedDrafter:
    """A drafter that runs on the host, has no weights, and stores nothing in the blocks."""
    return LoadedDrafter(
        build=lambda resources: (
            make(resources.state) if resources.leads else HostDrafter(resources.state)
        ),
        limits=DrafterLimits(drafts_at_prefill=True, on_device=False, is_lookup=True),
    )


PLAIN_DECODING = LoadedDrafter(build=lambda resources: NoDrafter(resources.state))
