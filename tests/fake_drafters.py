"""Drafters that know everything, or nothing: a drafting method for tests, found by its module.

A test adds it to the catalogue under a name of its own; `model` says which of the two it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.kv_cache import KVLayout
from slipstream.core.batch import Batch
from slipstream.core.request import Request
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, DrafterResources
from slipstream.speculative.options import Options, TargetModel

# The whole text (prompt and output) of every prompt, as plain decoding gives it.
ANSWERS: dict[tuple[int, ...], Sequence[int]] = {}


@dataclass(frozen=True)
class FakeConfig:
    right: bool


def read_options(options: Options) -> FakeConfig:
    return FakeConfig(options.take_str("model", None) == "perfect")


def load(config: FakeConfig, target: TargetModel) -> "FakeDrafter":
    return FakeDrafter(config.right, target.vocab_size)


class FakeDrafter:
    """PerfectDrafter (`right`) or WrongDrafter: the answer's own tokens, or others."""

    limits = DrafterLimits(drafts_behind_prompt=True)
    layout: KVLayout | None = None

    def __init__(self, right: bool, vocab_size: int) -> None:
        self._shift, self._vocab_size = (0 if right else 1), vocab_size

    def build(self, resources: DrafterResources) -> Drafter:
        self._device = resources.state.device
        return self

    def propose(self, batch: Batch) -> Draft:
        guesses = [self._guess(item.request, item.num_draft_tokens) for item in batch.requests]
        width = max(map(len, guesses), default=0)
        if width == 0:
            return Draft.empty(len(guesses), self._device)
        padded = [guess + [0] * (width - len(guess)) for guess in guesses]
        return Draft(
            torch.tensor(padded, dtype=torch.int64, device=self._device).view(-1, width),
            torch.tensor([len(guess) for guess in guesses], device=self._device),
            torch.ones(len(guesses), dtype=torch.bool, device=self._device),
        )

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        assert len(verdict.num_tokens) == len(batch.requests)

    def forget(self, requests: Sequence[Request]) -> None:
        """Nothing is kept."""

    def cached_tokens(self, requests: Sequence[Request]) -> Sequence[int]:
        return [request.num_tokens for request in requests]

    def _guess(self, request: Request, count: int) -> list[int]:
        answer = ANSWERS[tuple(request.token_ids[: request.num_prompt_tokens])]
        known = request.num_tokens
        return [(token + self._shift) % self._vocab_size for token in answer[known : known + count]]
