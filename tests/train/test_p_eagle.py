"""P-EAGLE heads from training to serving."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.speculative.catalogue import recognise
from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.heads.checkpoint import MASK_HIDDEN, HeadCheckpoint
from slipstream.train.parallel import ParallelRows
from slipstream.train.recipe_p_eagle import PEagleRecipe
from slipstream.train.run import run_training
from tests.train.small_runs import batch_of, run_drafting, settings, teacher

OPTIONS: dict[str, dict[str, Any]] = {
    "own": {"num_layers": 2, "draft_vocab_size": 70},
    "shared": {"num_layers": 1, "share_head": True, "share_embedding": True},
}


@pytest.mark.parametrize("shape", OPTIONS)
def test_a_head_drafts_behind_masks(
    shape: str, taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    given = settings(
        "p-eagle", taught_target, own_words, tmp_path, steps=40, options=OPTIONS[shape]
    )
    trained = run_training(given)
    checkpoint = HeadCheckpoint(tmp_path)
    assert recognise(checkpoint.config, checkpoint.tensor_names) == "p-eagle"
    assert MASK_HIDDEN in checkpoint.tensor_names
    assert ("embed_tokens.weight" in checkpoint.tensor_names) == (shape == "own")
    plain, speculated, length = run_drafting(taught_target, tmp_path, {})
    assert speculated == plain
    assert length > 1.2
    recipe = trained.recipe
    assert isinstance(recipe, PEagleRecipe)
    assert recipe.FIRST == 1


@pytest.mark.parametrize("shape", OPTIONS)
def test_the_engine_drafts_what_the_trained_network_says(
    shape: str,
    taught_target: str,
    own_words: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft of the last known token is one chain of masks."""
    given = settings(
        "p-eagle", taught_target, own_words, tmp_path, steps=15, options=OPTIONS[shape]
    )
    recipe = run_training(given).recipe
    assert isinstance(recipe, PEagleRecipe)
    drafts = _recorded(monkeypatch)
    run_drafting(taught_target, tmp_path, {})
    target = teacher(taught_target)
    assert len(drafts) > 20
    for known, tokens, logits in drafts[::11]:
        batch = batch_of(target, known, recipe.vocabulary, recipe.stream_layers)
        last = len(known) - 1
        depths = torch.arange(1, len(tokens))
        rows = ParallelRows(
            torch.cat((torch.arange(1, last + 1), torch.full_like(depths, last))),
            torch.cat((torch.zeros(last, dtype=torch.int64), depths)),
        )
        with torch.no_grad():
            ours = recipe.logits(batch, rows)[0, last - 1 :]
        torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Filled by every draft of one request: known tokens, guesses and their logits."""
    from slipstream.speculative.p_eagle import network as p_eagle

    found: list[tuple[list[int], list[int], torch.Tensor]] = []
    given: list[torch.Tensor] = []
    draft_at_once, propose = DraftSampling.draft_at_once, p_eagle.PEagleDrafter.propose

    def recorded(sampling: DraftSampling, batch: Any, wanted: Any, logits: Any) -> Any:
        given.append(logits)
        return draft_at_once(sampling, batch, wanted, logits)

    def proposed(self: Any, batch: Any) -> Any:
        given.clear()
        draft = propose(self, batch)
        for index, slot in enumerate(batch.slots.tolist()):
            if given and int(draft.num_tokens[index]) == batch.width:
                known = self._state.token_ids[slot, : int(self._state.num_tokens[slot])].tolist()
                logits = given[0].view(batch.num_requests, batch.width, -1)[index].clone()
                found.append((known, draft.token_ids[index].tolist(), logits))
        return draft

    monkeypatch.setattr(DraftSampling, "draft_at_once", recorded)
    monkeypatch.setattr(p_eagle.PEagleDrafter, "propose", proposed)
    return found
