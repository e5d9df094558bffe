"""Checkpoints with experts fused and one by one are the same network, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.layers.experts import ExpertsSpec
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from tests.mixture_checkpoints import FAMILIES, write_mixture
from tests.models.test_parity import load, runner_logits

PROMPTS = [[(7 * i + 3 * j) % 96 for i in range(20 + j)] for j in range(2)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_fused_experts_are_those_that_were_one_by_one(kind: str, tmp_path: Path) -> None:
    written, changed = write_mixture(tmp_path / "written", kind), tmp_path / "changed"
    changed.mkdir()
    (take_apart if kind == "gpt_oss" else fuse)(written, changed)
    assert set(Checkpoint(written).entries) != set(Checkpoint(changed).entries)
    one, other = (runner_logits(load(folder), PROMPTS, (64,)) for folder in (written, changed))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


def fuse(written: Path, folder: Path) -> None:
    """Write the checkpoint with one tensor for all experts of a layer."""

    def change(part: ExpertsSpec, module: str, tensors: dict[str, Tensor]) -> None:
        gate, up, down = (
            torch.stack(
                [
                    tensors.pop(f"{module}.{expert}.{projection}.weight")
                    for expert in range(part.routing.num_experts)
                ]
            )
            for projection in part.names.projections
        )
        tensors[f"{module}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{module}.down_proj"] = down

    rewrite(written, folder, change)


def take_apart(written: Path, folder: Path) -> None:
    """Write a gpt-oss, whose experts are fused, alternating and transposed, one by one."""

    def change(part: ExpertsSpec, module: str, tensors: dict[str, Tensor]) -> None:
        for suffix, ending in (("", "weight"), ("_bias", "bias")):
            gate_up, down = (
                tensors.pop(f"{module}.{name}_proj{suffix}") for name in ("gate_up", "down")
            )
            if ending == "weight":
                gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
            for expert in range(part.routing.num_experts):
                matrices = gate_up[expert, 0::2], gate_up[expert, 1::2], down[expert]
                for name, matrix in zip(("gate", "up", "down"), matrices, strict=True):
                    tensors[f"{module}.{expert}.{name}_proj.{ending}"] = matrix.contiguous()

    rewrite(written, folder, change)


def rewrite(
    written: Path, folder: Path, change: Callable[[ExpertsSpec, str, dict[str, Tensor]], None]
) -> None:
    """Copy a checkpoint; `change` puts other tensors in the place of a layer's experts."""
    tensors = load_file(written / "model.safetensors")
    config = json.loads((written / "config.json").read_text())
    for index, layer in enumerate(read_decoder_config(config).layers):
        part = layer.feed_forward
        if isinstance(part, ExpertsSpec):
            change(part, f"model.layers.{index}.{part.names.experts}", tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
