"""Chaos of the engine: random operations on random engines, everything checked after each.

    python -m benchmarks.chaos [--operations 100000] [--seed 0] [--length 250] [--target NAME ...]
                               [--drafter NAME ...] [--fault NAME] [--out build/chaos] [--every 30]

Each seed is a case: settings of an engine and a list of operations (tests/chaos/case.py), run on
tiny models. A line of progress tells the next seed, from which a run goes on. A case that fails is
run again while it is made shorter, and is written to `out` as a test. `--fault` puts a fault in on
purpose (tests/chaos/faults.py), which the run has to find. The last line is one JSON document; the
exit code is 1 where something does not hold.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import pytest
import torch

from slipstream.core.errors import UsageError
from tests.chaos.case import ALL_DRAFTERS, SERVED, Case, random_case
from tests.chaos.faults import FAULTS
from tests.chaos.models import Answers, Models
from tests.chaos.shrink import alike, shrink, write_test
from tests.chaos.world import OPERATIONS, BrokenError, run

MOST_RUNS = 400  # while a case is made short


class Chaos:
    """A run over many seeds.

    Attributes:
        seen: how often each kind of thing happened.
        covered: settings, by target, drafter and the form of steps.
    """

    def __init__(self, folder: Path, fault: str | None) -> None:
        self._models = Models(folder)
        self._answers = Answers(self._models, self._spared)
        self._fault, self._patch = fault, pytest.MonkeyPatch()
        self.seen: Counter[str] = Counter()
        self.covered: set[tuple[str, str, str]] = set()
        self.began = perf_counter()

    @property
    def num_operations(self) -> int:
        """The number of operations that were run so far."""
        return sum(self.seen[kind] for kind in OPERATIONS)

    def run(self, case: Case) -> BrokenError | None:
        """Run a case; what does not hold."""
        self._put_in()
        try:
            self.seen += run(case, self._models, self._answers)
        except UsageError:
            self.seen["settings refused"] += 1
            return None
        except BrokenError as broken:
            self.seen += broken.seen
            return broken
        finally:
            self._patch.undo()
        settings = case.settings
        self.covered.add((settings.target, settings.drafter, settings.steps))
        return None

    def shortened(self, case: Case, broken: BrokenError) -> Case:
        """A short case that fails in the same way."""
        same = alike(broken)

        def fails(candidate: Case) -> bool:
            found = self.run(candidate)
            return found is not None and same(found)

        return shrink(replace(case, operations=case.operations[: broken.done]), fails, MOST_RUNS)

    def _put_in(self) -> None:
        if self._fault is not None:
            FAULTS[self._fault](self._patch)

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """Plain decoding is not to have the fault."""
        self._patch.undo()
        yield
        self._put_in()

    def tell(self, seed: int) -> None:
        """A line of progress."""
        seconds = perf_counter() - self.began
        count = self.num_operations
        kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(self.seen.items()))
        print(
            f"{count} operations, {count / seconds:.0f}/s, next seed {seed}, "
            f"{len(self.covered)} settings; {kinds}",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=250, help="operations of a case")
    parser.add_argument("--target", nargs="+", choices=SERVED, default=list(SERVED))
    parser.add_argument("--drafter", nargs="+", choices=ALL_DRAFTERS, default=ALL_DRAFTERS)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    parser.add_argument("--every", type=float, default=30, help="seconds between two lines")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), options.fault)
        found: list[dict[str, object]] = []
        seed, told = options.seed, chaos.began
        while chaos.num_operations < options.operations:
            case = random_case(seed, options.length, options.target, options.drafter)
            broken = chaos.run(case)
            if broken is not None:
                at = chaos.num_operations
                print(f"seed {seed}, operation {at}: {broken}\n{case.settings}", flush=True)
                short = chaos.shortened(case, broken)
                path = write_test(short, str(broken), f"chaos_{seed}", options.out)
                print(f"{len(short.operations)} operations are left, in {path}", flush=True)
                found.append({"seed": seed, "operation": at, "error": str(broken)})
                if options.fault is not None:
                    break
            seed += 1
            if perf_counter() - told > options.every:
                told = perf_counter()
                chaos.tell(seed)
        chaos.tell(seed)
    print(
        json.dumps(
            {
                "operations": chaos.num_operations,
                "seconds": round(perf_counter() - chaos.began, 1),
                "seeds": [options.seed, seed],
                "fault": options.fault,
                "found": found,
                "settings": len(chaos.covered),
                "seen": dict(chaos.seen),
            }
        )
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
