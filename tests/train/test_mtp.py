"""MTP modules from training to serving."""

from pathlib import Path

import pytest
import torch

from slipstream.speculative.catalogue import recognise
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.train.chain import unroll
from slipstream.train.recipe_mtp import MtpRecipe
from slipstream.train.run import run_training
from tests.drafters.recording import record_drafts
from tests.train.small_runs import batch_of, run_drafting, settings, teacher


def test_an_mtp_module_drafts_what_it_learned(
    taught_target: str, own_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_heads": 4, "intermediate_size": 40}
    trained = run_training(
        settings("mtp", taught_target, own_words, tmp_path, steps=40, options=options)
    )
    checkpoint = HeadCheckpoint(tmp_path)
    assert recognise(checkpoint.config, checkpoint.tensor_names) == "mtp"
    drafted = record_drafts(monkeypatch)
    plain, speculated, length = run_drafting(taught_target, tmp_path, {})
    assert speculated == plain
    assert length > 1.2
    recipe = trained.recipe
    assert isinstance(recipe, MtpRecipe)
    target = teacher(taught_target)
    for item in drafted[::9]:
        batch = batch_of(target, [*item.known, *item.tokens], recipe.vocabulary, ())
        with torch.no_grad():
            places = list(unroll(recipe.network, 1, batch, len(item.tokens)))
        for place, logits in zip(places, item.logits, strict=True):
            ours = place.logits[len(item.known) - 2]
            torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)
