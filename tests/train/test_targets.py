"""Targets in training: what a drafter learns from is what the engine serves."""

from pathlib import Path

import pytest
import torch

from slipstream.train.run import run_training
from tests.quantized_checkpoints import gptq, write_quantized, write_whole
from tests.train.small_runs import run_drafting, settings, teacher

IDS = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", ["eagle3", "draft", "mtp"])
def test_a_quantised_target_teaches_what_its_numbers_mean(
    kind: str, own_words: Path, tmp_path: Path
) -> None:
    model, whole = tmp_path / "quantised", tmp_path / "whole"
    meant = write_quantized(model, gptq(), num_hidden_layers=3)
    write_whole(whole, model, meant)
    ours, theirs = (teacher(str(path)).states(IDS, (1, 3)) for path in (model, whole))
    for found, expected in zip(
        (ours.hidden, *ours.streams), (theirs.hidden, *theirs.streams), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    run_training(settings(kind, str(model), own_words, tmp_path / "drafter", steps=2))
    plain, speculated, _ = run_drafting(str(model), tmp_path / "drafter", {})
    assert speculated == plain
