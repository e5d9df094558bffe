"""`ngram`: prompt lookup (Saxena 2023). What followed these tokens last time?

Needs no second model: the longest n-gram that ends a text is looked up in the text itself, and what
followed its most recent occurrence is the guess.
"""

from dataclasses import dataclass

import torch

from slipstream.core.errors import UsageError
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.device_state import DeviceState
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, LoadedDrafter
from slipstream.speculative.options import Options, TargetModel

DEFAULT_MIN, DEFAULT_MAX = 2, 5


@dataclass(frozen=True)
class NgramConfig:
    """Lengths of the n-grams that are looked up, the longest first."""

    prompt_lookup_min: int
    prompt_lookup_max: int


def read_options(options: Options) -> NgramConfig:
    """N-grams of 2 to 5 tokens unless bounds are given; one that is given moves the other."""
    options.take_only("model", "ngram", "leave it out: n-gram drafting has no model")
    largest = options.take_int("prompt_lookup_max", None)
    smallest = options.take_int("prompt_lookup_min", None)
    if largest is None:
        largest = max(DEFAULT_MAX, smallest or 0)
    if smallest is None:
        smallest = min(DEFAULT_MIN, largest)
    if not 1 <= smallest <= largest:
        raise UsageError(
            f"speculative_config: prompt_lookup_min ({smallest}) must be between 1 and "
            f"prompt_lookup_max ({largest})"
        )
    return NgramConfig(smallest, largest)


def load(config: NgramConfig, target: TargetModel) -> LoadedDrafter:
    del target
    return LoadedDrafter(
        build=lambda resources: NgramDrafter(config, resources.state),
        limits=DrafterLimits(drafts_at_prefill=True, is_lookup=True),
    )


class NgramDrafter(Drafter):
    """Keeps nothing: the tokens of every request are on the device."""

    def __init__(self, config: NgramConfig, state: DeviceState) -> None:
        super().__init__(state)
        self._config = config
        self._lookup = state.ops.suffix_lookup

    def propose(self, batch: DeviceBatch) -> Draft:
        state, config = self._state, self._config
        tokens, found = self._lookup(
            state.token_ids,
            batch.slots,
            state.num_tokens[batch.slots],
            batch.width,
            config.prompt_lookup_min,
            config.prompt_lookup_max,
        )
        return Draft(tokens, batch.num_draft_tokens * found, torch.ones_like(found))
