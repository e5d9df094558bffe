"""The oracle of MTP modules against the network of the speculators library, where it is there."""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_qwen3
from tests.drafters.mtp_heads import with_gains, write_mtp
from tests.drafters.mtp_oracle import Mtp
from tests.drafters.oracles import Target

models = pytest.importorskip("speculators.models.mtp")


@pytest.mark.filterwarnings("ignore")
def test_the_library_reads_the_same_module_in_the_same_way(tmp_path: Path) -> None:
    target = with_gains(write_qwen3(tmp_path / "target", tie_word_embeddings=False))
    folder = write_mtp(tmp_path / "head", target, "speculators")
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    (folder / "config.json").write_text(json.dumps(config))
    theirs = models.MTPDraftModel.from_pretrained(str(folder))
    ids = torch.randint(1, 96, (20,), generator=torch.Generator().manual_seed(1))
    model = Target(target)
    given = model(ids.tolist())[1]
    with torch.no_grad():
        logits = theirs(input_ids=ids[None], hidden_states=given[None])[0]
    assert len(logits) == 3
    oracle = Mtp(folder, model, "speculators")
    for step, scores in enumerate(logits):
        tokens = ids[1 + step :][: scores.shape[1]].tolist()
        given = oracle.module(0, tokens, given[: len(tokens)])
        torch.testing.assert_close(scores[0], given @ model.head.T, atol=1e-4, rtol=0)
