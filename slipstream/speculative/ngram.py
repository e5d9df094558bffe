"""`ngram`: prompt lookup (Saxena 2023). What followed these tokens last time?

Needs no second model. Each request keeps an index from n-grams to the place after their most recent
occurrence, extended as tokens arrive, so a guess costs a few dictionary look-ups whatever the
length of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.cache.kv_cache import KVLayout
from slipstream.core.batch import Batch
from slipstream.core.errors import UsageError
from slipstream.core.request import Request
from slipstream.runner.device_state import DeviceState
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, DrafterResources
from slipstream.speculative.options import Options, TargetModel

DEFAULT_MIN, DEFAULT_MAX = 2, 5


@dataclass(frozen=True)
class NgramConfig:
    """Lengths of the n-grams that are looked up, the longest first."""

    prompt_lookup_min: int
    prompt_lookup_max: int


def read_options(options: Options) -> NgramConfig:
    """Defaults: n-grams of 2 to 5 tokens; a bound that is given moves the other out of its way."""
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


def load(config: NgramConfig, target: TargetModel) -> "LoadedNgram":
    """There are no weights."""
    del target
    return LoadedNgram(config)


class LoadedNgram:
    """A drafter that adds nothing to the cache."""

    limits = DrafterLimits(drafts_behind_prompt=True)
    layout: KVLayout | None = None

    def __init__(self, config: NgramConfig) -> None:
        self.config = config

    def build(self, resources: DrafterResources) -> Drafter:
        return NgramDrafter(self.config, resources.state)


class NgramDrafter:
    """Guesses on the host, one request at a time."""

    def __init__(self, config: NgramConfig, state: DeviceState) -> None:
        self._config, self._state = config, state
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, batch: Batch) -> Draft:
        guesses = [
            self._guess(item.request, item.num_draft_tokens) if item.num_draft_tokens else []
            for item in batch.requests
        ]
        width = max(map(len, guesses), default=0)
        device = self._state.device
        if width == 0:
            return Draft.empty(len(guesses), device)
        padded = [guess + [0] * (width - len(guess)) for guess in guesses]
        return Draft(
            token_ids=torch.tensor(padded, dtype=torch.int64, device=device),
            num_tokens=torch.tensor([len(guess) for guess in guesses], device=device),
            one_hot=torch.ones(len(guesses), dtype=torch.bool, device=device),
        )

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """The next guess reads the committed tokens from the request itself."""

    def forget(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._indexes.pop(request.request_id, None)

    def cached_tokens(self, requests: Sequence[Request]) -> Sequence[int]:
        return [request.num_tokens for request in requests]

    def _guess(self, request: Request, count: int) -> list[int]:
        index = self._indexes.get(request.request_id)
        if index is None:
            index = NgramIndex(self._config)
            self._indexes[request.request_id] = index
        index.extend(request.token_ids)
        return index.guess(request.token_ids, count)


@dataclass
class NgramIndex:
    """For every n-gram of a text that has a successor: the place of its latest successor."""

    config: NgramConfig
    _places: dict[tuple[int, ...], int] = field(default_factory=dict)
    _indexed: int = 0  # n-grams that end before this place are in

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that gained a successor; the text must only have grown."""
        sizes = range(self.config.prompt_lookup_min, self.config.prompt_lookup_max + 1)
        for place in range(max(self._indexed, 1), len(tokens)):
            for size in sizes:
                if size > place:
                    break
                self._places[tuple(tokens[place - size : place])] = place
        self._indexed = len(tokens)

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that followed the longest known suffix last time, or nothing.

        When the match overlaps the end, the text is taken to go on repeating itself.
        """
        known = len(tokens)
        for size in range(self.config.prompt_lookup_max, self.config.prompt_lookup_min - 1, -1):
            if size > known:
                continue
            place = self._places.get(tuple(tokens[known - size :]))
            if place is not None:
                period = known - place
                return [tokens[place + i % period] for i in range(count)]
        return []
