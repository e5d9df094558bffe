"""`slipstream bench advise`: the best drafter and setting for a load on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.cli.bench_flags import (
    BenchSamplingFlags,
    DatasetFlags,
    ProfileFlags,
    ReportFlags,
)
from slipstream.cli.bench_sweep import SweepFlags, sweep_and_report
from slipstream.cli.flags import RunFlags
from slipstream.core.config import EngineConfig
from slipstream.core.flags import like

if TYPE_CHECKING:
    from slipstream.bench.sweep import Point, Sweep


@dataclass(frozen=True, kw_only=True)
class AdviseFlags(SweepFlags):
    """What to choose from."""

    num_speculative_tokens: str = like(SweepFlags, "num_speculative_tokens", "1,2,4,7,auto")
    batch_sizes: str = like(SweepFlags, "batch_sizes", "1,8")


def advise(
    *,
    over: AdviseFlags,
    dataset: DatasetFlags,
    sampling: BenchSamplingFlags,
    report: ReportFlags,
    engine: EngineConfig,
    run: RunFlags,
) -> None:
    """Find the best drafter and K for your traffic.

    Says how much faster it is on this machine than plain decoding. Measures as
    `bench sweep` does, with K chosen by the engine among the settings, and ends with the command
    that serves the best one. What is faster by less than two runs of plain decoding differ is not
    recommended.
    """

    def conclude(points: "Sequence[Point]", plan: "Sweep") -> str:
        from slipstream.bench.advice import advise as advise_on
        from slipstream.bench.advice import paragraph

        found = advise_on(points)
        return "\n" + "\n".join(paragraph(it, engine.model, plan.drafters) for it in found)

    sweep_and_report(over, dataset, sampling, report, ProfileFlags(), engine, run, conclude)
