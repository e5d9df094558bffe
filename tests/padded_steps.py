"""Captured steps without a GPU: the same padded turns and early launches, run directly.

What a graph would replay is called again instead. So everything but the capture itself is tested
where there is no GPU: padding to buckets, fixed numbers of rows, steps launched before the last
one's results are taken in. Steps of tests are too small to be packed, unless that is asked for.
"""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from slipstream import LLM
from slipstream.runner.graphs import Between

T = TypeVar("T")


class DirectRecorder:
    """Takes the place of `runner.graphs.Recorder`."""

    def __init__(self, device: torch.device) -> None:
        """There is no device on which to capture."""
        self.graphs: list[object] = []

    def __call__(
        self, function: Callable[[Between], T], buffers: Between
    ) -> Callable[[Between], T]:
        function(buffers)  # as a capture would: on a batch that is all padding
        return function


def use_padded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that are built from here on run as if they captured graphs."""
    monkeypatch.setattr("slipstream.engine.resolve.captures_graphs", lambda *_: True)
    monkeypatch.setattr("slipstream.engine.assembly.Recorder", DirectRecorder)
    monkeypatch.setattr("slipstream.runner.captured_passes.WANTED_BEFORE_CAPTURE", 1)


def use_packed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides, steps have few rows left over where requests draft different numbers of tokens."""
    use_padded_steps(monkeypatch)
    pack_small_steps(monkeypatch)


def pack_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that pack their steps pack small ones, too, for as long as this is patched."""

    def row_totals(bucket: int, width: int) -> list[int]:
        full = bucket * (width + 1)
        return [*range(2, full, 3), full]

    monkeypatch.setattr("slipstream.core.step_form.row_totals", row_totals)
    monkeypatch.setattr("slipstream.runner.graphs.WANTED_BEFORE_CAPTURE", 1)


def use_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run "exact" steps, as on a CPU, "padded" or "packed" ones."""
    {"exact": lambda _: None, "padded": use_padded_steps, "packed": use_packed_steps}[kind](
        monkeypatch
    )


def packed_rows(llm: LLM) -> list[tuple[int, int, int]]:
    """(bucket, width, rows) of the packed steps that an engine has run."""
    graphs = llm.engine._step._graphs
    assert graphs is not None
    return [(key.bucket, key.width, key.rows) for key in graphs._graphs if key.rows is not None]
