"""Drafters that know everything, or nothing: a drafting method for tests, found by its module.

A test adds it to the catalogue under a name of its own; `model` says which of them it is.
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
    model: str


def read_options(options: Options) -> FakeConfig:
    return FakeConfig(options.take_str("model", None) or "")


def load(config: FakeConfig, target: TargetModel) -> LoadedDrafter:
    return LoadedDrafter(
        build=lambda lent: FakeDrafter(config.model, target.vocab_size, lent.state),
        limits=DrafterLimits(drafts_at_prefill=True, on_device=False),
    )


class FakeDrafter(Drafter):
    """The answer's own tokens ("perfect"), others, or ("in turn") 0, 1, 2 ... of its own tokens and
    others behind them."""

    def __init__(self, model: str, vocab_size: int, state: DeviceState) -> None:
        super().__init__(state)
        self._model, self._vocab_size, self._turn = model, vocab_size, 0

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
        known, right = request.num_tokens, 0
        if self._model == "perfect":
            right = count
        elif self._model == "in turn":
            right, self._turn = self._turn % (count + 1), self._turn + 1
        guess = list(answer[known : known + count])
        return guess[:right] + [(token + 1) % self._vocab_size for token in guess[right:]]
