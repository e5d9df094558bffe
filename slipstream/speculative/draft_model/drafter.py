"""`draft_model`: any smaller language model of the same tokenizer (Leviathan et al. 2023).

The draft model's layers live in the same blocks as the target's. A round is one ragged pass over
the committed tokens that it has not seen (the bonus token among them), whose last row gives draft
token 1, and then K-1 passes of a single row per request. Of another tokenizer it drafts the tokens
that both have (`vocabularies.py`).
"""

from functools import partial

from torch import Tensor

from slipstream.core.batch import Batch
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.model_runner import Forward
from slipstream.runner.rows import PassRows
from slipstream.sampling.verification import Verdict
from slipstream.speculative.draft_model.context import DraftContext
from slipstream.speculative.draft_model.network import DraftNetwork, load_network
from slipstream.speculative.drafter import Draft, Drafter, DrafterResources, LoadedDrafter
from slipstream.speculative.model_options import ModelKeys, ModelOptions, read_model_options
from slipstream.speculative.options import Options, TargetModel

# Known tokens whose keys and values may be missing when a draft begins: behind a step that drafted,
# the bonus token and, when all was accepted, the last draft token.
MOST_MISSING = 2


def read_options(options: Options) -> ModelOptions:
    """Every key that other engines know for a draft model."""
    keys = ModelKeys(
        remedy="leave it out, or use method pard",
        vocabulary=True,
        other_tokenizer=True,
        window=True,
        splits=True,
    )
    return read_model_options(options, "draft_model", keys)


def load(options: ModelOptions, target: TargetModel) -> LoadedDrafter:
    """Load the draft model's weights and check that it fits the target."""
    network = load_network(options, target, "draft_model")
    return LoadedDrafter(
        build=partial(DraftModelDrafter, network), limits=network.limits, **network.kept
    )


class DraftModelDrafter(Drafter):
    """Drafts with its own network over the shared blocks."""

    def __init__(self, network: DraftNetwork, resources: DrafterResources) -> None:
        super().__init__(resources.state)
        self._network, self._resources = network, resources
        self._runner = network.runner(resources)
        # What another drafter guessed is missing from the first of its tokens on.
        self._most_missing = (
            resources.num_speculative_tokens + 1 if resources.in_combination else MOST_MISSING
        )
        self._context = DraftContext(
            self._runner,
            resources.state,
            network.max_model_len,
            self._most_missing,
            resources.captured,
            network.excerpt_sizes(resources),
            resources.shares_prefixes,
        )

    def prepare(self, batch: Batch) -> None:
        self._context.prepare(batch, self._most_missing)

    def propose(self, batch: DeviceBatch) -> Draft:
        """One ragged pass over what is missing, then single rows."""
        slots, wanted = batch.slots, batch.num_draft_tokens
        known, starts = self._state.num_tokens[slots], self._context.computed[slots]
        runner = self._runner

        def logits(rows: PassRows, index: int) -> Tensor:
            forward = runner.forward(rows)
            return forward.layout.over_last(runner.logits, forward.hidden)

        draft, passes = self._network.drafting.draft_chain(
            *(batch, self._resources, known, starts, wanted, self._most_missing, logits),
            self._context.excerpt(slots),
        )
        self._context.advance(slots, wanted, known + passes - 1)
        return draft

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        self._context.settle(batch, verdict.num_tokens)

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        self._context.read_prompts(batch)

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._context.cached_tokens(slots)
