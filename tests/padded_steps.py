"""Captured steps without a GPU: the same padded turns and early launches, run directly.

What a graph would replay is called again instead. So everything but the capture itself is tested
where there is no GPU: padding to buckets, fixed numbers of rows, steps launched before the last
one's results are taken in.
"""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from slipstream.runner.graphs import Between

T = TypeVar("T")


class DirectRecorder:
    """Takes the place of `runner.graphs.Recorder`."""

    def __init__(self, device: torch.device) -> None:
        """There is nothing to keep."""

    def __call__(
        self, function: Callable[[Between], T], buffers: Between
    ) -> Callable[[Between], T]:
        function(buffers)  # as a capture would: on a batch that is all padding
        return function


def use_padded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built from here on run as though they captured graphs."""
    monkeypatch.setattr("slipstream.engine.resolve.captures_graphs", lambda *_: True)
    monkeypatch.setattr("slipstream.engine.build.Recorder", DirectRecorder)
