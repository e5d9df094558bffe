"""Engines in which draft policies are compared, and the requests that they are given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_windows import Asked
from benchmarks.demo_drafters import DRAFTERS
from benchmarks.geometries import GEOMETRIES, HEADS, geometry_named, write_config
from benchmarks.prompt_ids import PromptText
from slipstream import LLM
from slipstream.core.batch import DraftPlan, StepReport
from slipstream.engine.draft_policy import Candidate, DraftPolicy, FixedPolicy
from slipstream.models.checkpoint import resolve_checkpoint

AUTO, PLAIN = "auto", "0"
MOST = 12  # draft tokens of a step, where they are looked up
MOST_DRAWN = 7  # where verdicts are drawn
TEXT = "text"
# For each kind of traffic, the chances of all draft positions of its requests in turn.
TRAFFIC: Mapping[str, tuple[float, ...]] = {"high": (0.85,), "low": (0.1,), "mixed": (0.9, 0.0)}
DRAWN = tuple(TRAFFIC)
# Those that engines have rates for: a request gets those of the place that is the remainder of its
# seed.
CHANCES = (0.0, 0.1, 0.8, 0.85, 0.9)


@dataclass(frozen=True)
class Pair:
    """A target and its drafter.

    Attributes:
        target: a geometry, or "demo".
        drafter: `speculative_config`, in which a geometry may stand for a model.
        traffic: kinds of it: "text", or such for which verdicts are drawn.
    """

    target: str
    drafter: Mapping[str, Any]
    traffic: tuple[str, ...] = (TEXT,)

    @property
    def is_drawn(self) -> bool:
        """Whether verdicts are drawn."""
        return TEXT not in self.traffic


_DEMO = {
    name if name.startswith("demo") else f"demo/{name}": Pair("demo", config)
    for name, config in DRAFTERS.items()
    if config is not None
}
PAIRS: Mapping[str, Mapping[str, Pair]] = {
    "cuda": {
        "8b twin": Pair("qwen3-8b", {"model": "qwen3-8b:4"}),
        "8b eagle3": Pair("qwen3-8b", {"model": "qwen3-8b-eagle3"}, DRAWN),
        "8b p-eagle": Pair("qwen3-8b", {"model": "qwen3-8b-p-eagle"}, DRAWN),
        "demo/ngram": _DEMO["demo/ngram"],
    },
    "cpu": {
        **_DEMO,
        "demo/draft, drawn": Pair("demo", {"model": "demo/draft"}, DRAWN),
        "0.6b twin": Pair("qwen3-0.6b", {"model": "qwen3-0.6b:4"}),
    },
}


def open_engine(pair: Pair, folder: Path, num_speculative_tokens: int | str, **options: Any) -> LLM:
    """The engine of a pair, which draws verdicts by the seeds of requests where the pair says so.

    Args:
        folder: must be there until it is gone.
    """
    drafter = {**pair.drafter, "num_speculative_tokens": num_speculative_tokens}
    if "model" in drafter:
        drafter["model"] = _model(drafter["model"], folder / "drafter")
    if pair.is_drawn:
        drafter.update(drawn(CHANCES))
    if pair.target != "demo":
        # The weights of a head are random anyway.
        options["load_format"] = "dummy" if drafter.get("model") in HEADS else "twin"
        options["skip_tokenizer_init"] = True
    return LLM(_model(pair.target, folder / "target"), speculative_config=drafter, **options)


def drawn(chances: Sequence[float]) -> dict[str, Any]:
    """Keys of a `speculative_config` by which verdicts are drawn with one of these chances of each
    place, by the request's seed where there are several."""
    rates = [[chance**place for place in range(1, MOST_DRAWN + 1)] for chance in chances]
    return {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates if len(rates) > 1 else rates[0],
    }


def _model(name: str, folder: Path) -> str:
    known = name in HEADS or name.partition(":")[0] in GEOMETRIES
    return str(write_config(folder, name)) if known else name


def policies(llm: LLM, settings: Sequence[str]) -> dict[str, DraftPolicy]:
    """A policy for each setting that the engine has: "auto", or a number of draft tokens."""
    own, most = llm.engine.scheduler.policy, llm.engine.resolved.limits.num_speculative_tokens
    return {
        name: own if name == AUTO else FixedPolicy(int(name))
        for name in settings
        if name == AUTO or int(name) <= most
    }


@dataclass(frozen=True)
class SomeDraft:
    """A policy by which a share of the requests drafts `width` tokens, the others none."""

    width: int
    share: float
    reads_confidences = False

    @property
    def widths(self) -> tuple[int, ...]:
        return (0, self.width)

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        number = max(1, int(self.share * len(candidates)))
        return [
            DraftPlan(min(it.most, self.width) if place < number else 0)
            for place, it in enumerate(candidates)
        ]

    def observe(self, report: StepReport) -> None:
        """The policy learns nothing."""


class Requests:
    """Requests for windows, from a pool of prompts of which one half is for warming up.

    Args:
        length: tokens of each prompt.
        size: prompts in each half.
    """

    def __init__(self, pair: Pair, length: int, size: int) -> None:
        self._size = size
        if pair.target == "demo":
            self._pool = PromptText(resolve_checkpoint("demo")).take(2 * size, length)
            return
        generator = torch.Generator().manual_seed(0)
        vocabulary = geometry_named(pair.target)["vocab_size"]
        ids = torch.randint(1, vocabulary, (2 * size, length), generator=generator)
        self._pool = ids.tolist()

    def take(self, traffic: str, first: int, number: int, warms_up: bool) -> list[Asked]:
        """Request `first` and those after it; kinds of requests alternate."""
        prompts = [
            self._pool[index % self._size + self._size * warms_up]
            for index in range(first, first + number)
        ]
        if traffic == TEXT:
            return [Asked(prompt=prompt) for prompt in prompts]
        chances = TRAFFIC[traffic]
        return [
            _drawn(prompt, chances[index % len(chances)], index)
            for index, prompt in enumerate(prompts, first)
        ]

    def drawn(self, chance: float, number: int) -> list[Asked]:
        """Requests whose drafts are accepted with this chance at every place."""
        return [_drawn(prompt, chance, index) for index, prompt in enumerate(self._pool[:number])]


def _drawn(prompt: list[int], chance: float, number: int) -> Asked:
    return Asked(prompt=prompt, seed=seed_for(chance, number), rates=[chance] * MOST_DRAWN)


def seed_for(chance: float, number: int) -> int:
    """A seed by which verdicts are drawn with this chance, another for each number."""
    return CHANCES.index(chance) + number * len(CHANCES)


def sizes(text: str) -> tuple[int, ...]:
    """Numbers of requests from a command line."""
    return tuple(int(size) for size in text.split(","))
