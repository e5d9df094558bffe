"""Costs on disk, so that the next start need not measure everything again.

One file per model, drafter and machine, in $SLIPSTREAM_CACHE/costs or ~/.cache/slipstream/costs.
The file is optional: if it is broken or cannot be written, that is only logged.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from slipstream.core.batch import StepReport
from slipstream.engine.drafting.costs import CostModel
from slipstream.engine.drafting.step_costs import CostRow

logger = logging.getLogger("slipstream")

CACHE = "SLIPSTREAM_CACHE"
LENGTH = 512  # length of each request in `KeptCosts.rows`
_SECONDS, _FEW_SECONDS = 2.0, 0.25  # time for measuring, without a file and with one
_EVERY_SECONDS, _EVERY_STEPS = 180.0, 1024  # how often costs are checked for changes
_MOVED = 0.1
# Errors of files that cannot be read, or do not have the form of `CostModel.state`.
_BROKEN = OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError


class CostFile:
    """The file of the costs of one model, drafter and machine.

    Args:
        key: all that costs depend on, as JSON data.
        folder: None: by the environment.
    """

    def __init__(self, key: Mapping[str, Any], folder: Path | None = None) -> None:
        self._key = json.loads(json.dumps(key, default=str))
        digest = sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self.path = (cache_folder() / "costs" if folder is None else folder) / f"{digest[:32]}.json"

    def load(self, costs: CostModel) -> bool:
        """Restore costs from the file; returns whether there was one."""
        try:
            text = self.path.read_text(encoding="utf-8")
            found = json.loads(text)
            if found["key"] == self._key:
                costs.restore(found["costs"])
                return True
        except FileNotFoundError:
            pass
        except _BROKEN as error:
            logger.debug("%s cannot be used (%r): costs are measured again", self.path, error)
        return False

    def save(self, costs: CostModel) -> None:
        """Replace the file atomically."""
        try:
            text = json.dumps({"key": self._key, "costs": costs.state()}, allow_nan=False)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
                written = Path(folder) / self.path.name
                written.write_text(text, encoding="utf-8")
                written.replace(self.path)
        except (OSError, ValueError) as error:
            logger.debug("%s cannot be written (%s)", self.path, error)


class KeptCosts(CostModel):
    """A cost model that is restored from its file, and saved when it has changed.

    Args:
        padded, at_once, looks_up: see `CostModel`.
        requests, drafts: the sizes of the steps in `rows`, by which changes are noticed.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        padded: Callable[[int], int] | None,
        file: CostFile,
        requests: Sequence[int],
        drafts: Sequence[int],
        now: Callable[[], float] = monotonic,
        at_once: bool = False,
        looks_up: bool = False,
    ) -> None:
        super().__init__(padded, at_once, looks_up)
        self._file, self._requests, self._widths, self._now = file, requests, drafts, now
        self._kept: list[CostRow] = []
        self._asked, self._steps = 0.0, 0

    @property
    def rows(self) -> list[CostRow]:
        """Predictions for requests of `LENGTH` tokens."""
        return self.table(self._requests, self._widths, LENGTH)

    def begin(self, measure: Callable[[float], object], briefly: bool = False) -> None:
        """Restore costs from the file, and measure.

        Args:
            measure: measures costs for the given number of seconds, the most important first.
            briefly: measure as long as with a file even if there is none.
        """
        measure(_FEW_SECONDS if self._file.load(self) or briefly else _SECONDS)
        self._keep()

    def observe(self, report: StepReport) -> None:
        super().observe(report)
        self._steps += 1
        if self._steps % _EVERY_STEPS or self._now() < self._asked + _EVERY_SECONDS:
            return
        pairs = zip(self._kept, self.rows, strict=True)
        if any(abs(new.seconds - old.seconds) > _MOVED * old.seconds for old, new in pairs):
            self._keep()
        self._asked = self._now()

    def _keep(self) -> None:
        self._file.save(self)
        self._kept, self._asked = self.rows, self._now()


def cache_folder() -> Path:
    """Where this program keeps what it learned; nothing can be kept in os.devnull."""
    given = os.environ.get(CACHE)
    try:
        return Path(given or "~/.cache/slipstream").expanduser()
    except RuntimeError:  # a user without a home, as in containers: nothing can be kept
        return Path(os.devnull)
