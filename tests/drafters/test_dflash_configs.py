"""DFlash checkpoints: their files, and what their configs leave out."""

from pathlib import Path

import pytest
import torch

from slipstream import CheckpointError
from slipstream.speculative.dflash.network import read_dflash_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from tests.drafters.blocks import write_dflash
from tests.drafters.broken import make, write_config


def test_files_that_do_not_fit(tiny_target: str, tmp_path: Path) -> None:
    folder = write_dflash(tmp_path / "embedding", tiny_target, own_head=False)
    torch.save({}, folder / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match="write it into the row of mask_token_id"):
        make(tiny_target, folder)
    cut = write_dflash(tmp_path / "cut", tiny_target, own_head=False)
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        make(tiny_target, cut)


def test_parallel_drafting_may_be_asked_for(tiny_target: str, tiny_heads: dict[str, str]) -> None:
    llm = make(tiny_target, tiny_heads["dflash"], parallel_drafting=True)
    assert llm.engine.resolved.method == "dflash"


def test_layers_that_are_read_unless_listed(tiny_target: str, tmp_path: Path) -> None:
    """Evenly from the output of layer 1 to that of the third last: published lists."""
    folder = write_dflash(tmp_path, tiny_target, own_head=False, num_hidden_layers=5)
    write_config(folder, dflash_config={"target_layer_ids": "drop"})
    config = read_dflash_config(HeadCheckpoint(folder))
    assert config.stream_layers(36) == (2, 10, 18, 26, 34)  # Qwen3-8B: outputs 1, 9, 17, 25, 33
    assert config.stream_layers(32) == (2, 9, 16, 23, 30)
    write_config(folder, num_hidden_layers=1)
    assert read_dflash_config(HeadCheckpoint(folder)).stream_layers(36) == (19,)
