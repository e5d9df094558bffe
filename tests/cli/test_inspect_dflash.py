"""`slipstream inspect` of DFlash drafters."""

import json
from pathlib import Path

from tests.checkpoints import write_qwen3
from tests.cli.conftest import CommandLine
from tests.drafters.blocks import as_wrapped_dflash, write_dflash


def test_a_drafter_and_its_fit(slipstream: CommandLine, tiny_target: str, tmp_path: Path) -> None:
    folder = write_dflash(tmp_path / "draft", tiny_target)
    ran = slipstream("inspect", str(folder), "--target", tiny_target)
    assert ran.code == 0
    for part in (
        "of the kind dflash",
        "enter layers 1, 2",
        "one pass, 7 at most, with mask token 90",
        "fits",
    ):
        assert part in ran.out
    assert json.loads(slipstream("inspect", str(folder), "--json").out)["kind"] == "dflash"
    other = str(write_qwen3(tmp_path / "other", hidden_size=64))
    ran = slipstream("inspect", str(as_wrapped_dflash(folder)), "--target", other, "--json")
    assert ran.code == 1
    assert "another target" in json.loads(ran.out)["drafter"]["problems"][0]
