"""P-EAGLE checkpoints: where things stand in them, and those that do not fit."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from tests.checkpoints import write_qwen3
from tests.drafters.engines import GREEDY, check_drafts, make, run
from tests.drafters.heads import as_pickle, as_wrapper, write_eagle3, write_p_eagle
from tests.drafters.oracles import p_eagle_oracle as oracle
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.drafters.test_bad_heads import edit, write_config


@pytest.mark.parametrize("key", ["ptd_token_id", "pard_token", "mask_token_id"])
@pytest.mark.parametrize("pickled", [False, True])
def test_where_the_mask_token_stands(
    key: str, pickled: bool, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_p_eagle(tmp_path, tiny_target, mask_key=key, fit=False)
    head = oracle(folder, tiny_target)
    drafted = record_drafts(monkeypatch)
    llm = make(tiny_target, as_pickle(folder) if pickled else folder)
    run(llm, GREEDY)
    assert_drafts_are(drafted, head)
    assert drafted


def test_the_mask_token_may_be_given(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trainer does not write it down."""
    folder = write_p_eagle(tmp_path, tiny_target, mask_key=None, fit=False)
    with pytest.raises(UsageError, match=r"has no pard_token; give it as pard_token$"):
        make(tiny_target, folder)
    drafted = record_drafts(monkeypatch)
    run(make(tiny_target, folder, speculative={"pard_token": 77}), GREEDY)
    assert_drafts_are(drafted, oracle(folder, tiny_target, mask=77))


def test_a_speculators_wrapper_is_the_same_head(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings its own K, which it was trained for."""
    folder = write_p_eagle(
        tmp_path,
        tiny_target,
        draft_vocab=60,
        norm_before_residual=True,
        mask_key="mask_token_id",
    )
    head = oracle(folder, tiny_target)
    as_wrapper(folder, speculators_model_type="peagle", architectures=["PEagleSpeculator"])
    llm = LLM(
        tiny_target,
        speculative_config={"model": str(folder)},
        skip_tokenizer_init=True,
        num_kv_blocks=64,
    )
    assert llm.engine.resolved.limits.num_speculative_tokens == 3
    check_drafts(tiny_target, folder, head, monkeypatch, count=3)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"parallel_drafting": True},
        {"method": "eagle3", "parallel_drafting": True},
        {"method": "p-eagle"},
        {"method": "p_eagle"},
        {"method": "peagle"},
    ],
    ids=str,
)
def test_the_method_has_the_spellings_of_the_field(
    config: dict[str, Any], tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    llm = make(tiny_target, tiny_heads["p-eagle"], speculative=config)
    assert llm.engine.resolved.method == "p-eagle"
    assert run(llm, GREEDY).metrics.num_accepted_tokens > 0


def test_other_methods_are_not_mixed_up(
    tiny_target: str, tiny_heads: dict[str, str], tmp_path: Path
) -> None:
    chain, parallel = tiny_heads["eagle3"], tiny_heads["p-eagle"]
    with pytest.raises(CheckpointError, match=r"for method eagle3: .* it is one for p-eagle"):
        make(tiny_target, parallel, speculative={"method": "eagle3"})
    with pytest.raises(CheckpointError, match=r"for method p-eagle: .* it is one for eagle3"):
        make(tiny_target, chain, speculative={"method": "p-eagle"})
    with pytest.raises(UsageError, match="one way to draft; leave it out"):
        make(tiny_target, chain, speculative={"method": "eagle3", "parallel_drafting": True})
    with pytest.raises(UsageError, match="drafts all tokens at once; leave it out, or choose"):
        make(tiny_target, parallel, speculative={"parallel_drafting": False})
    head = write_eagle3(tmp_path, tiny_target, mask_token_id=None)
    assert make(tiny_target, head).engine.resolved.method == "eagle3"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "aux out of range": (
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
        "target of 2 layers has those of 0 to 2",
    ),
    "vocabulary": ({"vocab_size": 99}, "vocabulary of 99 tokens"),
    "target width": ({"target_hidden_size": 64}, "target of hidden size 64, and this one has 48"),
    "mask of no token": ({"ptd_token_id": 96}, "mask token 96 is none of the 96 ids"),
    "mask of no number": ({"ptd_token_id": "x"}, '"ptd_token_id" must be a whole number'),
    "unknown key": ({"spin": 3}, '"spin" is unknown'),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_that_does_not_fit(name: str, tiny_target: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    folder = write_p_eagle(tmp_path, tiny_target, fit=False)
    with pytest.raises(CheckpointError, match=message):
        make(tiny_target, write_config(folder, **changes))


def test_a_mask_hidden_that_is_missing_or_too_short(tiny_target: str, tmp_path: Path) -> None:
    folder = write_p_eagle(tmp_path, tiny_target, fit=False)
    edit(folder, "mask_hidden", mask_hidden=torch.ones(1, 1, 96))
    with pytest.raises(CheckpointError, match=r"mask_hidden has 96 numbers where .* have 144"):
        make(tiny_target, folder)
    edit(folder, "mask_hidden")
    with pytest.raises(CheckpointError, match=r"no tensor mask_hidden, .*; export it again"):
        make(tiny_target, folder)


def test_a_head_of_a_wider_target(tiny_target: str, tmp_path: Path) -> None:
    other = write_qwen3(tmp_path / "other", hidden_size=64)
    head = write_p_eagle(tmp_path / "head", other, fit=False)
    with pytest.raises(CheckpointError, match=r"cannot draft for .* another target"):
        make(tiny_target, head)


def test_more_draft_tokens_than_a_head_supports(
    tiny_target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_p_eagle(tmp_path, tiny_target, fit=False, num_depths=5, mask_key="mask_token_id")
    make(tiny_target, folder, speculative={"num_speculative_tokens": 5})
    with pytest.raises(UsageError, match="guesses at most 5 tokens a step; lower"):
        make(tiny_target, folder, speculative={"num_speculative_tokens": 6})
    write_config(folder, num_depths="drop")
    as_wrapper(folder, speculators_model_type="peagle", norm_before_residual=False)
    with caplog.at_level(logging.WARNING, "slipstream"):
        make(tiny_target, folder, speculative={"num_speculative_tokens": 3})
        assert not caplog.messages
        make(tiny_target, folder, speculative={"num_speculative_tokens": 4})
    assert "was trained for 3 tokens at once and is asked for 4" in caplog.text


def test_dummy_weights_and_other_precisions(tmp_path: Path) -> None:
    """A config alone can be timed."""
    target = write_qwen3(tmp_path / "target", num_hidden_layers=6)
    head = write_p_eagle(tmp_path / "head", target, fit=False)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)
    for extra in ({"quantization": "fp8"}, {"dtype": "bfloat16"}, {}):
        output = run(make(str(target), head, speculative=extra), params)
        assert output.metrics.num_drafts > 0
    for folder in (target, head):
        (folder / "model.safetensors").unlink()
    llm = make(str(target), head, load_format="dummy")
    assert run(llm, params).metrics.num_drafts > 0
