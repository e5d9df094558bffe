"""docs/benchmarking.md names every flag that is a benchmark's own."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from slipstream.cli.bench_flags import (
    BenchSamplingFlags,
    DatasetFlags,
    ProfileFlags,
    ReportFlags,
)
from slipstream.cli.bench_serve_flags import LoadFlags, ServerFlags, SummaryFlags
from slipstream.core.flags import flag_of, spelled

TEXT = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text()
GROUPS = (
    *(BenchSamplingFlags, DatasetFlags, ProfileFlags, ReportFlags),
    *(LoadFlags, ServerFlags, SummaryFlags),
)


@pytest.mark.parametrize("group", GROUPS)
def test_every_flag_is_explained(group: type) -> None:
    missing = []
    for field in fields(group):
        option = flag_of(field)
        assert option is not None
        if not any(re.search(rf"{name}\b", TEXT) for name in (spelled(field), *option.also)):
            missing.append(spelled(field))
    assert [it for it in missing if it != "--return-speculation"] == []
    assert "--no-return-speculation" in TEXT
