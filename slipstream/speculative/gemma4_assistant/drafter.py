"""`gemma4_assistant`: a small network that reads the target's cache and has none of its own.

It begins with the target's hidden state of the last computed token and the token behind it; then
it goes on with its own. All its rows stand at the position of that token and see what the target
has computed, not each other. So it keeps nothing in the blocks, and a refused draft costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.cache.spec import CacheLayout
from slipstream.core.batch import Batch
from slipstream.core.errors import UsageError
from slipstream.core.request import Request
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.model_runner import Forward
from slipstream.sampling.state import Uses
from slipstream.sampling.verification import Verdict, sample_draft
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, DrafterResources, Needs
from slipstream.speculative.gemma4_assistant.config import (
    assistant_problems,
    read_assistant_config,
    target_layer,
)
from slipstream.speculative.gemma4_assistant.network import AssistantNetwork, load_assistant
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.last_hidden import LastHidden
from slipstream.speculative.heads.options import (
    HeadFacts,
    HeadOptions,
    load_options,
    open_head,
    read_head_options,
    require_fit,
    target_config,
)
from slipstream.speculative.options import Options, TargetModel

METHOD = "gemma4_assistant"


def read_options(options: Options) -> HeadOptions:
    """Nothing beside what every head takes."""
    return read_head_options(options, METHOD)


def describe(checkpoint: HeadCheckpoint) -> HeadFacts:
    """Without its weights."""
    config = read_assistant_config(checkpoint)
    features = "the last hidden state, behind the final norm, and the cache of its last layers"
    return HeadFacts(
        config.sizes, features, partial(assistant_problems, config), keeps_blocks=False
    )


def load(config: HeadOptions, target: TargetModel) -> "LoadedAssistant":
    """Load the assistant and check that it fits the target."""
    checkpoint = open_head(config, METHOD)
    assistant, shape = read_assistant_config(checkpoint), target_config(target)
    require_fit(checkpoint, target, assistant_problems(assistant, shape))
    load = load_options(config, target)
    if load.dtype != target.load.dtype:
        raise UsageError(
            f"speculative_config: dtype {load.dtype} differs from the target's "
            f"{target.load.dtype}, but an assistant reads the target's cache; leave dtype out"
        )
    read = [target_layer(layer, shape) for layer in assistant.layers]
    network = load_assistant(checkpoint, assistant, [it for it in read if it is not None], load)
    limits = DrafterLimits(
        max_model_len=config.max_model_len, keeps_probabilities=not config.greedy_only
    )
    return LoadedAssistant(
        network, limits, assistant.sizes.vocab_size, shape.hidden_size, config.greedy_only
    )


@dataclass(frozen=True, eq=False)
class LoadedAssistant:
    """The network in memory. It adds nothing to the blocks, so it shares them with everybody."""

    needs: ClassVar[Needs] = Needs()
    layout: ClassVar[CacheLayout | None] = None

    network: AssistantNetwork
    limits: DrafterLimits
    vocab_size: int
    target_width: int
    greedy_only: bool

    def build(self, resources: DrafterResources) -> Drafter:
        self.network.share(resources.target.embedding)
        return AssistantDrafter(self, resources)


class AssistantDrafter:
    """A chain of single rows over the target's cache."""

    def __init__(self, loaded: LoadedAssistant, resources: DrafterResources) -> None:
        self._network, self._loaded, self._resources = loaded.network, loaded, resources
        self._state, self._sampling = resources.state, resources.sampling
        self._caches = resources.target_cache.layers
        dtype = resources.target.embedding.dtype
        self._last = LastHidden(resources.state, loaded.target_width, dtype)

    def prepare(self, batch: Batch) -> None:
        self._last.drop([item.request.slot for item in batch.requests if item.admitted])

    def propose(self, batch: DeviceBatch) -> Draft:
        if not batch.width:
            return Draft.empty(batch)
        slots, state = batch.slots, self._state
        known = state.num_tokens[slots]
        wanted = torch.where(self._last.is_there(slots), batch.num_draft_tokens, 0)
        drafts = slots.new_zeros((batch.num_requests, batch.width))
        probs = self._probabilities(batch)
        newest = (known - 1).clamp_min(0)
        token, hidden = state.token_ids[slots, newest], self._last.rows(slots)
        inputs = self._rows(slots, newest)
        for index in range(batch.width):
            normed, hidden = self._network(token, hidden, inputs, self._caches)
            token = sample_draft(
                self._network.logits(normed),
                slots,
                known + index,
                self._sampling,
                batch.uses,
                self._loaded.vocab_size,
                greedy_only=self._loaded.greedy_only,
                use_fp64_gumbel=self._resources.use_fp64_gumbel,
                probs_out=None if probs is None else probs[:, index],
            )
            drafts[:, index] = token
        certain = self._sampling.temperature[slots] == 0
        one_hot = torch.ones_like(certain) if self._loaded.greedy_only else certain
        return Draft(drafts, wanted, one_hot, probs)

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        self._last.keep(batch, verdict, forward)

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        """`observe` kept the last row of every chunk."""

    def forget(self, requests: Sequence[Request]) -> None:
        """A slot's row counts no more once the slot is given out anew."""

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._state.num_computed[slots]

    def _rows(self, slots: Tensor, newest: Tensor) -> PassInputs:
        """One row for each request at the position of its newest token, which is not computed."""
        return PassInputs(
            RowPlaces(torch.arange(len(slots) + 1, device=slots.device), newest, max_rows=1),
            Paging(
                self._state.block_tables[slots],
                context_lens=torch.minimum(newest, self._state.num_computed[slots]),
                slots=torch.full_like(slots, -1),
            ),
        )

    def _probabilities(self, batch: DeviceBatch) -> Tensor | None:
        """[R, K, V], to be filled with what the drafts are sampled from, if any is."""
        if self._loaded.greedy_only or Uses.SAMPLING not in batch.uses:
            return None
        shape = (batch.num_requests, batch.width, self._loaded.vocab_size)
        return torch.empty(shape, dtype=torch.float32, device=self._state.device)
