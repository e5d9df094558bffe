"""Every kind from training to serving: what was trained is what the engine runs."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.core.errors import UsageError
from slipstream.runner.model_runner import ModelRunner
from slipstream.speculative.catalogue import recognise
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.train.language_model import DraftRecipe
from slipstream.train.parallel import dropped_rows, sampled_rows
from slipstream.train.recipe import recipe_class
from slipstream.train.recipe_medusa import MedusaRecipe
from slipstream.train.recipe_pard import PardRecipe
from slipstream.train.run import run_training
from slipstream.train.settings import RECIPES
from tests.checkpoints import write_qwen3
from tests.train.small_runs import batch_of, run_drafting, settings, teacher

SMALL = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}


def test_every_kind_has_its_recipe() -> None:
    for kind in RECIPES:
        assert recipe_class(kind).OPTIONS
    with pytest.raises(UsageError, match="no recipe for 'lookahead'"):
        recipe_class("lookahead")


def test_a_draft_model_is_what_was_trained(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    given = settings("draft", taught_target, own_words, tmp_path, steps=40, options=SMALL)
    trained = run_training(given)
    plain, speculated, length = run_drafting(taught_target, tmp_path, {})
    assert speculated == plain
    assert length > 1.1
    recipe = trained.recipe
    assert isinstance(recipe, DraftRecipe)
    tokens = torch.randint(1, 96, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    batch = batch_of(teacher(taught_target), tokens, recipe.vocabulary, ())
    with torch.no_grad():
        ours = recipe.logits(batch)
    torch.testing.assert_close(ours, _logits(tmp_path, tokens), atol=1e-4, rtol=0)


def _logits(model: Path, tokens: list[int]) -> torch.Tensor:
    """[T, V] of the engine's own pass over a prompt, by a copy that is no drafter."""
    plain = model.with_name(f"{model.name}-plain")
    shutil.copytree(model, plain, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    for key in ("pard_token", "spd_type", "para_num"):
        config.pop(key, None)
    (plain / "config.json").write_text(json.dumps(config))
    seen: list[torch.Tensor] = []
    forward = ModelRunner.forward

    def recorded(self: ModelRunner, rows: Any) -> Any:
        result = forward(self, rows._replace(num_read=None))  # the logits of all rows
        if not seen:
            seen.append(self.logits(result.hidden))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "forward", recorded)
        llm = LLM(str(plain), skip_tokenizer_init=True, num_kv_blocks=16)
        llm.generate({"prompt_token_ids": tokens})
    return seen[0]


@pytest.mark.parametrize("begins_with_one", [False, True])
def test_a_parallel_draft_model_fills_masks(
    begins_with_one: bool, taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = SMALL
    if begins_with_one:
        options = {"init": str(write_qwen3(tmp_path / "init", keep_layers=1, seed=0))}
    out = tmp_path / "pard"
    given = settings("pard", taught_target, own_words, out, steps=40, options=options)
    trained = run_training(given)
    plain, speculated, length = run_drafting(taught_target, out, {})
    assert speculated == plain
    assert length > 1.1
    checkpoint = HeadCheckpoint(out)
    assert recognise(checkpoint.config, checkpoint.tensor_names) == "pard"
    recipe = trained.recipe
    assert isinstance(recipe, PardRecipe)
    # The vocabulary is full, so the mask token gets a new row.
    assert recipe.mask_token == checkpoint.config["pard_token"] == 96
    tokens = torch.randint(1, 96, (16,), generator=torch.Generator().manual_seed(3)).tolist()
    batch = batch_of(teacher(taught_target), tokens, recipe.vocabulary, ())
    rows, ends = sampled_rows(0, len(tokens), 3, 5)
    with torch.no_grad():
        ours = recipe.logits(batch, rows)[0]
    for number, end in enumerate(ends.tolist()):
        asked = [*tokens[: end + 1], recipe.mask_token, recipe.mask_token]
        theirs = _logits(out, asked)[end:, :96]
        chain = len(tokens) + 2 * number
        mine = torch.stack((ours[end], ours[chain], ours[chain + 1]))
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 60, "num_layers": 2}])
def test_medusa_heads_guess_ahead(
    options: dict[str, Any],
    taught_target: str,
    own_words: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = run_training(
        settings("medusa", taught_target, own_words, tmp_path, steps=40, options=options)
    )
    recipe = trained.recipe
    assert isinstance(recipe, MedusaRecipe)
    plain, speculated, length = run_drafting(taught_target, tmp_path, {})
    assert speculated == plain
    assert length > 1.05
    from slipstream.models.loading import LoadOptions
    from slipstream.speculative.medusa.checkpoint import MedusaCheckpoint, read_medusa_config
    from slipstream.speculative.medusa.network import load_medusa

    load = LoadOptions(torch.float32, torch.device("cpu"), "auto", 64)
    checkpoint = MedusaCheckpoint(tmp_path)
    config, target = read_medusa_config(checkpoint), teacher(taught_target)
    served = load_medusa(checkpoint, config, target.config, load)
    tokens = torch.randint(1, 96, (16,), generator=torch.Generator().manual_seed(3)).tolist()
    batch = batch_of(target, tokens, recipe.vocabulary, ())
    state = served.start(batch.states.hidden[0], 3)
    with torch.no_grad():
        positions = list(recipe.positions(batch))
    for index, position in enumerate(positions):
        logits, state = served.logits(index, state, torch.zeros(16))
        torch.testing.assert_close(position.logits, logits, atol=1e-4, rtol=0)


def test_rows_of_masks_are_dropped_in_chains() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = dropped_rows(1, 200, 5, 0.7, generator)
    chains = [set(rows.anchor[rows.depth == depth].tolist()) for depth in range(5)]
    assert chains[0] == set(range(1, 200))
    for before, after in pairwise(chains):
        assert after < before
    assert [len(chain) for chain in chains[1:]] == [139, 98, 68, 48]
    assert int(rows.positions.max()) < 200
    mask = rows.mask
    row = int((rows.depth == 3).nonzero()[0])
    seen = mask[row].nonzero().flatten()
    anchor = int(rows.anchor[row])
    known = {(token, 0) for token in range(1, anchor + 1)}
    chain = {(anchor, depth) for depth in (1, 2, 3)}
    found = set(zip(rows.anchor[seen].tolist(), rows.depth[seen].tolist(), strict=True))
    assert found == known | chain
