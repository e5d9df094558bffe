"""MTP modules with experts: those of GLM-4.5, against the oracle of the format reference."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, CheckpointError
from slipstream.layers.experts import ExpertsSpec
from slipstream.speculative.mtp.config import MtpCheckpoint, read_mtp_config
from tests.drafters.broken import edit, make, write_config
from tests.drafters.engines import GREEDY, K, forced, run
from tests.drafters.mtp_heads import add_mtp, write_mtp
from tests.drafters.mtp_oracle import Mtp
from tests.drafters.oracles import Target
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.mixture_checkpoints import write_mixture
from tests.padded_steps import use_padded_steps


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose first layer is dense."""
    return str(write_mixture(tmp_path_factory.mktemp("glm"), "glm4_moe"))


def own(target: Path | str, **options: Any) -> LLM:
    speculative = {"method": "mtp", "num_speculative_tokens": K, **options}
    return LLM(
        str(target), speculative_config=speculative, skip_tokenizer_init=True, num_kv_blocks=64
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe_lite"])
def test_glm_drafts_for_itself(
    kind: str, modules: int, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One module that is reused, and several modules in turn, over both kinds of caches."""
    glm = str(write_mixture(tmp_path / "without", kind))
    target = write_mixture(tmp_path / "with", kind, num_nextn_predict_layers=modules)
    add_mtp(target, "deepseek", modules=modules, own_ends=True)
    expected = run(LLM(glm, skip_tokenizer_init=True, num_kv_blocks=64), GREEDY)
    if padded:
        use_padded_steps(monkeypatch)
    drafted = record_drafts(monkeypatch)
    output = run(own(target, **forced()), GREEDY)
    assert output.metrics.num_accepted_tokens > 0
    assert len(drafted) > 10
    assert_drafts_are(drafted, Mtp(target, Target(glm), "deepseek"))
    output = run(own(target), GREEDY)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_moe"])
def test_modules_in_a_folder_of_their_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_mixture(tmp_path / "target", kind)
    style = {"glm4_moe": "deepseek", "qwen3_moe": "speculators"}[kind]
    folder = write_mtp(tmp_path / "modules", target, style)
    config = read_mtp_config(MtpCheckpoint(folder))
    assert isinstance(config.layers.layers[0].feed_forward, ExpertsSpec)
    drafted = record_drafts(monkeypatch)
    output = run(make(str(target), folder), GREEDY)
    assert output.metrics.num_drafts > 0
    assert_drafts_are(drafted, Mtp(folder, Target(target), style))


def test_experts_that_are_missing_or_unknown(glm: str, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path, glm, "deepseek")
    correction = "model.layers.3.mlp.gate.e_score_correction_bias"
    stored = load_file(folder / "model.safetensors")[correction]
    with pytest.raises(
        CheckpointError, match=r"has shape \[7\], but its config.json asks for \[6\]"
    ):
        make(glm, edit(folder, None, **{correction: torch.ones(7)}))
    kept = {correction: stored}
    edit(folder, "model.layers.3.mlp.experts.5.up_proj.weight", **kept)
    with pytest.raises(
        CheckpointError, match=r"has no tensor model.layers.3.mlp.experts.5.up_proj"
    ):
        make(glm, folder)
    # The same tensors beside a config that says nothing of experts.
    shape = json.loads((folder / "config.json").read_text())
    drop = {key: "drop" for key in shape if "expert" in key or "routed" in key}
    write_config(folder, model_type="qwen3", **drop)
    with pytest.raises(CheckpointError, match="a mixture of experts, which is not supported yet"):
        make(glm, folder)
