"""DFlash drafters from training to serving."""

from pathlib import Path

import pytest
import torch

from slipstream.kernels.pass_inputs import PassInputs
from slipstream.models.loading import LoadOptions
from slipstream.speculative.catalogue import recognise
from slipstream.speculative.dflash.network import DFlashNetwork, read_dflash_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.loading import load_network
from slipstream.train.recipe_dflash import DFlashRecipe
from slipstream.train.run import run_training
from tests.pass_inputs import pass_inputs
from tests.train.small_runs import batch_of, run_drafting, settings, teacher


@pytest.fixture(scope="module")
def trained(
    taught_target: str, own_words: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DFlashRecipe, Path]:
    out = tmp_path_factory.mktemp("dflash")
    options = {"num_layers": 2}
    recipe = run_training(
        settings("dflash", taught_target, own_words, out, steps=60, options=options)
    ).recipe
    assert isinstance(recipe, DFlashRecipe)
    return recipe, out


def test_the_engine_fills_draft_blocks(
    trained: tuple[DFlashRecipe, Path], taught_target: str
) -> None:
    folder = trained[1]
    checkpoint = HeadCheckpoint(folder)
    assert recognise(checkpoint.config, checkpoint.tensor_names) == "dflash"
    plain, speculated, length = run_drafting(taught_target, folder, {})
    assert speculated == plain
    assert length > 1.1


def test_the_served_network_is_the_trained_one(
    trained: tuple[DFlashRecipe, Path], taught_target: str
) -> None:
    recipe, folder = trained
    checkpoint, target = HeadCheckpoint(folder), teacher(taught_target)
    load = LoadOptions(torch.float32, torch.device("cpu"), "auto", 64)
    config = read_dflash_config(checkpoint)
    served = load_network(DFlashNetwork, checkpoint, config, target.config, load)
    served.share(target.network.embedding, target.network.head)
    tokens = torch.randint(1, 96, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    batch = batch_of(target, tokens, recipe.vocabulary, recipe.stream_layers)
    anchor, width = 15, 4
    with torch.no_grad():
        positions = list(recipe.blocks(batch, torch.tensor([4, anchor])))
        caches = [(torch.zeros(4, 8, 2, 16), torch.zeros(4, 8, 2, 16)) for _ in range(2)]
        context = served.context([stream[0, :anchor] for stream in batch.states.streams])
        served.store(context, _inputs(0, anchor), caches)
        ids = torch.tensor([tokens[anchor], *[recipe.config.mask_token] * 3])
        hidden = served(ids, _inputs(anchor, anchor + width), caches)
        logits = served.head(hidden)
    for slot, position in enumerate(positions, 1):
        torch.testing.assert_close(position.logits[1], logits[slot], atol=1e-4, rtol=0)


def _inputs(start: int, end: int) -> PassInputs:
    positions = torch.arange(start, end)
    return pass_inputs(
        query_start=torch.tensor([0, end - start]),
        context_lens=torch.tensor([end]),
        block_tables=torch.arange(4, dtype=torch.int32).unsqueeze(0),
        positions=positions,
        slots=positions,
    )
