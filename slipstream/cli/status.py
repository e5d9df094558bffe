"""Speed and acceptance in one line."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from time import perf_counter
from typing import TYPE_CHECKING

from slipstream.core.errors import counted
from slipstream.core.outputs import RequestMetrics

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.engine.metrics import EngineMetrics

_MANY = 8  # positions that are always shown


@dataclass(frozen=True)
class Status:
    """What the engine did during a command or an answer."""

    num_tokens: int
    seconds: float
    speculation: RequestMetrics
    time_shares: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def line(self) -> str:
        """`42.0 tokens/s · AL 3.21 · accepted 0.85 0.71 0.60 · draft 31% target 55% ...`."""
        parts = [f"{self.tokens_per_second:.1f} tokens/s"]
        if self.speculation.num_drafts:
            parts.append(f"AL {self.speculation.acceptance_length:.2f}")
            parts.append(f"accepted {self._shares()}")
        speedup = self.speculation.estimated_speedup
        if speedup is not None:  # then K is chosen, too
            parts.append(f"K {self.speculation.mean_draft_tokens:.1f}")
            parts.append(f"{speedup:.2f}x plain")
        if any(self.time_shares.values()):
            times = [it for it in self.time_shares.items() if it != ("draft", 0.0)]
            parts.append(" ".join(f"{name} {share:.0%}" for name, share in times))
        return " · ".join(parts)

    def _shares(self) -> str:
        """Share of drafts accepted at each position; of long drafts up to the last accepted one."""
        shares = list(self.speculation.acceptance_per_position)
        whole = len(shares)
        while len(shares) > _MANY and shares[-1] == 0:
            shares.pop()
        return " ".join([f"{share:.2f}" for share in shares] + ["…"] * (len(shares) < whole))

    def summary(self) -> str:
        """The status of a finished run."""
        return f"{counted(self.num_tokens, 'token')} in {self.seconds:.2f} s · {self.line()}"


class Meter:
    """Measures an engine from the moment when the meter is made."""

    def __init__(self, llm: "LLM") -> None:
        self._llm, self._before, self._began = llm, deepcopy(llm.metrics), perf_counter()

    def read(self, num_tokens: int) -> Status:
        """The status after `num_tokens` output tokens."""
        gained = _difference(self._llm.metrics, self._before)
        return Status(
            num_tokens, perf_counter() - self._began, gained.speculation, gained.time_shares
        )


def _difference(now: "EngineMetrics", before: "EngineMetrics") -> "EngineMetrics":
    gained = deepcopy(now)
    for field in fields(gained):
        if field.name not in ("speculation", "adapters"):  # a command's adapter is not told apart
            setattr(gained, field.name, getattr(now, field.name) - getattr(before, field.name))
    gained.speculation.add(before.speculation, sign=-1)
    return gained
