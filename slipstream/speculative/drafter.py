"""The protocol that every drafter follows, and the drafter that never drafts.

The engine asks a drafter what it can do (`limits`), never which one it is. A new method is one
file with a loader and a drafter, and one line in `catalogue.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.cache.kv_cache import KVLayout
from slipstream.core.batch import Batch
from slipstream.core.request import Request
from slipstream.runner.device_state import DeviceState
from slipstream.sampling.state import SamplingState
from slipstream.sampling.verification import Verdict


@dataclass(frozen=True)
class Draft:
    """The guesses of one step, one row per scheduled request.

    Attributes:
        token_ids: [R, K] int64; only the first num_tokens[r] of a row count.
        num_tokens: [R] int64, from 0 to the number that was scheduled.
        one_hot: [R] bool, true where the guess is certain (greedy, n-gram) and q is 1.
        probs: [R, K, Vq] float32, the q that each token was sampled from, or None when every row
            is one-hot.
        vocabulary: [Vq] int64, rising: the token id of each column of `probs`; None when they are
            the ids from 0 on.
    """

    token_ids: Tensor
    num_tokens: Tensor
    one_hot: Tensor
    probs: Tensor | None = None
    vocabulary: Tensor | None = None

    @staticmethod
    def empty(num_requests: int, device: torch.device) -> "Draft":
        return Draft(
            token_ids=torch.zeros((num_requests, 0), dtype=torch.int64, device=device),
            num_tokens=torch.zeros(num_requests, dtype=torch.int64, device=device),
            one_hot=torch.ones(num_requests, dtype=torch.bool, device=device),
        )


@dataclass(frozen=True)
class DrafterLimits:
    """What a drafter can do.

    Attributes:
        max_speculative_tokens: largest K, or None for any.
        max_model_len: beyond this many tokens it does not draft, or None for no limit.
        drafts_behind_prompt: it can guess behind a prompt that the target has not seen yet.
        cache_identity: names what it keeps in the shared blocks; empty when nothing.
    """

    max_speculative_tokens: int | None = None
    max_model_len: int | None = None
    drafts_behind_prompt: bool = False
    cache_identity: str = ""


class Drafter(Protocol):
    """Runs ahead of the target."""

    def propose(self, batch: Batch) -> Draft:
        """Guess at most `num_draft_tokens` tokens for each scheduled request.

        Requests marked `admitted` are new to this drafter (or come back after a preemption): it
        owns their first `start` tokens in the shared blocks, from the prefix cache, and no more.
        """

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Take in what was committed; the device state already holds it.

        Args:
            features: [T, hidden_size], the target's hidden states of this step, after its final
                norm, row by row as they were computed.
        """

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop what is kept for requests that finished or were preempted (their slot is gone)."""

    def cached_tokens(self, requests: Sequence[Request]) -> Sequence[int]:
        """Leading tokens of each running request whose blocks hold this drafter's part as well."""


@dataclass(frozen=True)
class DrafterResources:
    """What the engine lends to a drafter when it is built."""

    state: DeviceState
    sampling: SamplingState
    num_blocks: int
    use_fp64_gumbel: bool


class LoadedDrafter(Protocol):
    """A drafter's weights, before the size of the cache is known."""

    @property
    def limits(self) -> DrafterLimits: ...

    @property
    def layout(self) -> KVLayout | None:
        """What it adds to every block."""

    def build(self, resources: DrafterResources) -> Drafter: ...


class NoDrafter:
    """Plain decoding: speculation with an empty draft."""

    limits = DrafterLimits()
    layout: KVLayout | None = None

    def build(self, resources: DrafterResources) -> Drafter:
        self._device = resources.state.device
        return self

    def propose(self, batch: Batch) -> Draft:
        return Draft.empty(len(batch.requests), self._device)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Nothing to learn."""

    def forget(self, requests: Sequence[Request]) -> None:
        """Nothing to drop."""

    def cached_tokens(self, requests: Sequence[Request]) -> Sequence[int]:
        return [request.num_tokens for request in requests]
