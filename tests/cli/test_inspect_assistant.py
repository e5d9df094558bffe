"""`slipstream inspect` of assistants that read the target's cache."""

import json
from pathlib import Path

from tests.checkpoints import write_qwen3
from tests.cli.conftest import CommandLine
from tests.drafters.assistants import write_assistant


def test_an_assistant_and_its_fit(
    slipstream: CommandLine, tiny_target: str, tmp_path: Path
) -> None:
    folder = str(write_assistant(tmp_path / "draft", tiny_target))
    ran = slipstream("inspect", folder, "--target", tiny_target)
    assert ran.code == 0
    for part in ("of the kind gemma4_assistant", "the cache of its last layers", "0 bytes a token"):
        assert part in ran.out
    assert json.loads(slipstream("inspect", folder, "--json").out)["kv_bytes_per_token"] == 0
    other = str(write_qwen3(tmp_path / "other", head_dim=24))
    ran = slipstream("inspect", folder, "--target", other, "--json")
    assert ran.code == 1
    assert "2 heads of 16 numbers" in json.loads(ran.out)["drafter"]["problems"][0]
