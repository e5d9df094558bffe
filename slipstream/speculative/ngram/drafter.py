"""`ngram`: prompt lookup (Saxena 2023), which needs no second model.

The longest n-gram at the end of a text that occurs earlier in the text is found, and the tokens
after its most recent occurrence are the draft.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.device_state import DeviceState
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, LoadedDrafter
from slipstream.speculative.ngram.lookup import lookup_on
from slipstream.speculative.options import Options, TargetModel

DEFAULT_MIN, DEFAULT_MAX = 2, 5


@dataclass(frozen=True)
class NgramConfig:
    """The shortest and the longest n-gram that is looked up; longer ones are tried first."""

    prompt_lookup_min: int
    prompt_lookup_max: int


def read_options(options: Options) -> NgramConfig:
    """Read the bounds, by default 2 to 5 tokens; a given bound may move the other default."""
    options.take_only("model", "ngram", "leave it out: n-gram drafting has no model")
    largest = options.take_int("prompt_lookup_max", None)
    smallest = options.take_int("prompt_lookup_min", None)
    if largest is None:
        largest = max(DEFAULT_MAX, smallest or 0)
    if largest < 1:
        raise UsageError(f"speculative_config: prompt_lookup_max must be positive, not {largest}")
    if smallest is None:
        smallest = min(DEFAULT_MIN, largest)
    if not 1 <= smallest <= largest:
        raise UsageError(
            f"speculative_config: prompt_lookup_min ({smallest}) must be between 1 and "
            f"prompt_lookup_max ({largest})"
        )
    return NgramConfig(smallest, largest)


def load(config: NgramConfig, target: TargetModel) -> LoadedDrafter:
    return LoadedDrafter(
        build=lambda resources: NgramDrafter(
            config, resources.state, resources.target.config.image_token
        ),
        limits=DrafterLimits(drafts_at_prefill=True, is_lookup=True),
    )


class NgramDrafter(Drafter):
    """Looks n-grams up in the token ids on the device, and keeps no state.

    Args:
        image_token: see `DecoderConfig`; neither n-grams nor drafts contain it.
    """

    def __init__(
        self, config: NgramConfig, state: DeviceState, image_token: int | None = None
    ) -> None:
        super().__init__(state)
        self._config, self._image_token = config, image_token
        self._lookup = lookup_on(state.device)

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
        lengths = batch.num_draft_tokens * found
        if self._image_token is not None:
            lengths = torch.minimum(lengths, self._most_of_text(batch, tokens, self._image_token))
        return Draft(tokens, lengths, torch.ones_like(found))

    def _most_of_text(self, batch: DeviceBatch, tokens: Tensor, image_token: int) -> Tensor:
        """[R] int64, how many of the draft tokens [R, W] come before the first token of an image;
        0 if a request has an image within the longest n-gram at its end."""
        state, slots = self._state, batch.slots.unsqueeze(1)
        back = torch.arange(1, self._config.prompt_lookup_max + 1, device=tokens.device)
        end = state.token_ids[slots, (state.num_tokens[slots] - back).clamp_min(0)]
        before = (tokens == image_token).cumsum(1).eq(0).sum(1)
        return before.masked_fill((end == image_token).any(1), 0)
