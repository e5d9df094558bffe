"""Drafters that know everything, or nothing: a drafting method for tests, found by its module.

A test adds it to the catalogue under a name of its own; `model` says which of the two it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.batch import Batch
from slipstream.core.request import Request
from slipstream.runner.device_batch import DeviceBatch, Guesses
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, LoadedDrafter
from slipstream.speculative.method import Method
from slipstream.speculative.options import Options, TargetModel

METHOD = Method(name="fake", module="tests.fake_drafters")
# The whole text (prompt and output) of every prompt, as plain decoding gives it.
ANSWERS: dict[tuple[int, ...], Sequence[int]] = {}


@dataclass(frozen=True)
class FakeConfig:
    right: bool


def read_options(options: Options) -> FakeConfig:
    return FakeConfig(options.take_str("model", None) == "perfect")


def load(config: FakeConfig, target: TargetModel) -> LoadedDrafter:
    return LoadedDrafter(
        build=lambda lent: FakeDrafter(config.right, target.vocab_size, lent.state),
        limits=DrafterLimits(drafts_at_prefill=True, on_device=False),
    )


class FakeDrafter(Drafter):
    """PerfectDrafter (`right`) or WrongDrafter: the answer's own tokens, or others."""

    def __init__(self, right: bool, vocab_size: int, state: DeviceState) -> None:
        super().__init__(state)
        self._shift, self._vocab_size = (0 if right else 1), vocab_size

    def prepare(self, batch: Batch) -> Guesses:
        return [self._guess(item.request, item.num_draft_tokens) for item in batch.requests]

    def propose(self, batch: DeviceBatch) -> Draft:
        return Draft.of_guesses(batch)

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        assert len(verdict.num_tokens) == batch.num_requests

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        assert any(item.is_prompt_chunk for item in batch.requests)

    def _guess(self, request: Request, count: int) -> list[int]:
        answer = ANSWERS[tuple(request.token_ids[: request.num_prompt_tokens])]
        known = request.num_tokens
        return [(token + self._shift) % self._vocab_size for token in answer[known : known + count]]
