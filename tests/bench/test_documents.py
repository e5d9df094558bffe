"""docs/benchmarking.md names every flag that is a benchmark's own."""

import re
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from slipstream.cli.bench_flags import (
    BenchSamplingFlags,
    DatasetFlags,
    ProfileFlags,
    ReportFlags,
)
from slipstream.cli.bench_serve_flags import LoadFlags, ServerFlags, SummaryFlags

TEXT = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text()
GROUPS = (
    *(BenchSamplingFlags, DatasetFlags, ProfileFlags, ReportFlags),
    *(LoadFlags, ServerFlags, SummaryFlags),
)


@pytest.mark.parametrize("group", GROUPS)
def test_every_flag_is_explained(group: type) -> None:
    hints = get_type_hints(group, include_extras=True)
    missing = []
    for field in fields(group):
        (option,) = hints[field.name].__metadata__
        names = [name for name in option.param_decls or () if name.startswith("--")]
        names = names or ["--" + field.name.replace("_", "-")]
        if not any(re.search(rf"{name}\b", TEXT) for name in names):
            missing += names[:1]
    assert [it for it in missing if it != "--return-speculation"] == []
    assert "--no-return-speculation" in TEXT
