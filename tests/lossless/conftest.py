"""Models for samples that are counted."""

import sys
from math import nan
from pathlib import Path

import pytest
from torch import Tensor

import slipstream.layers.stack
from tests.lossless.counted_pair import Heads, write_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def heads(pair: tuple[str, str]) -> Heads:
    return Heads(Path(pair[0]).parent / "heads", pair[0])


@pytest.fixture(autouse=True)
def _nothing_reads_rows_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a pass leaves out have no numbers, so that who reads one ends in an error."""
    for module in (slipstream.layers.stack, sys.modules.get("slipstream.kernels.cpu.layers")):
        if module is not None:
            monkeypatch.setattr(module, "at_rows", _with_gaps)


def _with_gaps(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return values.new_full((num_rows, values.shape[1]), nan).index_copy_(0, rows, values)
