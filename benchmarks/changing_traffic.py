"""How soon the number of draft tokens is right again when acceptance changes.

    python -m benchmarks.changing_traffic [--drafter "demo/draft, drawn"] [--concurrency 1,8]
    python -m benchmarks.changing_traffic --device cuda --drafter "8b eagle3" --json FILE

Verdicts are drawn. The chance of a place, given those before it, is 0.8 for --steps steps, then 0.1
and then 0.8 again, in two ways:

    new     with each change all requests end, and others take their places
    same    the requests go on, and their text has become another

Choice is the number of draft tokens that were verified, per request. It is right where the same
engine goes in steady traffic: between the tenth and the ninetieth percentile of the second half of
twice as many steps of requests whose acceptance never changed, or within half a token of that. A
change has been followed from the first right choice on of which three in four of the next 20 are
right too; the others may try whether more would be accepted. The exit code is 1 where that took
more than 30 steps.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.decode_windows import Watched, policy_of, running
from benchmarks.policy_engines import AUTO, PAIRS, Pair, Requests, open_engine, seed_for, sizes
from benchmarks.policy_pictures import changes_figure
from slipstream import LLM
from slipstream.bench.pictures import require_plots, save
from slipstream.core.batch import StepReport

HIGH, LOW = 0.8, 0.1
PHASES = (HIGH, LOW, HIGH)
MOST_STEPS = 30  # the bar
NEXT = 20
WAYS = ("new", "same")


@dataclass(frozen=True)
class Change:
    """The policy's reaction to a change of traffic.

    Attributes:
        choices: of all steps since then.
        low, high: choices from the one to the other are right.
        steps: until the choice was right; None: never.
    """

    chance: float
    choices: Sequence[float]
    low: float
    high: float
    steps: int | None

    @property
    def met(self) -> bool:
        return self.steps is not None and self.steps <= MOST_STEPS


def right_choices(steady: Sequence[float]) -> tuple[float, float]:
    """The least and the largest, by the choices in steady traffic."""
    settled = sorted(steady[len(steady) // 2 :])
    tenth = len(settled) // 10
    return max(0.0, settled[tenth] - 0.5), settled[-1 - tenth] + 0.5


def judged(chance: float, choices: Sequence[float], low: float, high: float) -> Change:
    """A change by the choices since then."""
    right = [low <= choice <= high for choice in choices]
    steps = None
    for number in range(len(right)):
        following = right[number + 1 : number + 1 + NEXT]
        if right[number] and following and 4 * sum(following) >= 3 * len(following):
            steps = number
            break
    return Change(chance, choices, low, high, steps)


class Traffic:
    """Requests of an engine whose acceptance changes.

    Args:
        steps: between two changes.
    """

    def __init__(self, llm: LLM, requests: Requests, concurrency: int, steps: int) -> None:
        self._llm, self._requests = llm, requests
        self._concurrency, self._steps = concurrency, steps
        self._policy = llm.engine.scheduler.policy
        self._choices: list[float] = []

    def steady(self, chance: float) -> list[float]:
        """The choices for requests whose acceptance never changes, of twice as many steps."""
        with policy_of(self._llm, Watched(self._policy, self._watch)):
            return [choice for phase in self._phases([chance, chance]) for choice in phase]

    def run(self, way: str) -> list[list[float]]:
        """The choices of each phase."""
        with policy_of(self._llm, Watched(self._policy, self._watch)):
            if way == "same":
                return self._phases(PHASES)
            return [choices for chance in PHASES for choices in self._phases([chance])]

    def _watch(self, report: StepReport) -> None:
        drafts = [gain.num_draft_tokens for gain in report.committed]
        self._choices.append(statistics.fmean(drafts) if drafts else 0.0)

    def _phases(self, chances: Sequence[float]) -> list[list[float]]:
        """Draft tokens of each step of each phase; requests live as long as all phases last."""
        found = []
        asked = self._requests.drawn(chances[0], self._concurrency)
        engine = self._llm.engine
        most = engine.resolved.limits.max_model_len
        with running(self._llm, asked, most) as live:
            for chance in chances:
                for number, submission in enumerate(live):
                    # The device draws by what it has as the slot's seed.
                    slot = submission.samples[0].request.slot
                    engine._step._sampling.seeds[slot] = seed_for(chance, number)
                self._choices.clear()
                while len(self._choices) < self._steps:
                    engine.step()
                found.append(list(self._choices))
        return found


def measure(llm: LLM, pair: Pair, concurrency: int, steps: int) -> dict[str, list[Change]]:
    """The changes in either way, after steady traffic of both kinds."""
    traffic = Traffic(llm, Requests(pair, 64, concurrency), concurrency, steps)
    right = {chance: right_choices(traffic.steady(chance)) for chance in (HIGH, LOW)}
    found = {}
    for way in WAYS:
        phases = zip(PHASES, traffic.run(way), strict=True)
        found[way] = [judged(chance, choices, *right[chance]) for chance, choices in phases][1:]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.plot is not None:
        require_plots()
    pair = PAIRS[given.device][given.drafter or DEFAULTS[given.device]]
    changes: dict[str, list[Change]] = {}
    with tempfile.TemporaryDirectory() as folder:
        llm = open_engine(
            pair,
            Path(folder),
            AUTO,
            device=given.device,
            dtype=given.dtype,
            max_num_seqs=max(given.concurrency),
        )
        for concurrency in given.concurrency:
            for way, found in measure(llm, pair, concurrency, given.steps).items():
                changes[f"{way} requests, {concurrency}"] = found
                for change in found:
                    _show(f"{concurrency:4d} {way}", change)
    document = {name: [asdict(change) for change in found] for name, found in changes.items()}
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=1))
    if given.plot is not None:
        save(lambda: changes_figure(document), given.plot)
    return int(not all(change.met for found in changes.values() for change in found))


def _show(title: str, change: Change) -> None:
    steps = "never" if change.steps is None else f"after {change.steps} steps"
    verdict = "met" if change.met else "MISSED"
    print(
        f"{title}: acceptance {change.chance}, right ({change.low:.1f} to {change.high:.1f}) "
        f"{steps}: {verdict}"
    )
    means = [
        statistics.fmean(change.choices[at : at + 5])
        for at in range(0, min(60, len(change.choices)), 5)
    ]
    print("     ", *(f"{mean:.1f}" for mean in means), "...", flush=True)


DEFAULTS = {"cpu": "demo/draft, drawn", "cuda": "8b eagle3"}


def _parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    drawn = [name for pairs in PAIRS.values() for name, pair in pairs.items() if pair.is_drawn]
    cli.add_argument("--device", choices=PAIRS, default="cpu")
    cli.add_argument("--drafter", choices=drawn)
    cli.add_argument("--concurrency", type=sizes, default=(1, 8))
    cli.add_argument("--steps", type=int, default=100)
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--json", type=Path)
    cli.add_argument("--plot", type=Path, help="PNG, SVG or PDF")
    return cli


if __name__ == "__main__":
    sys.exit(main())
