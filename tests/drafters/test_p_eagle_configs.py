"""P-EAGLE checkpoints: where things stand in them, and those that do not fit."""

import logging
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, UsageError
from tests.drafters.broken import write_config
from tests.drafters.engines import GREEDY, check_drafts, make, run
from tests.drafters.heads import as_pickle, as_wrapper, write_eagle3, write_p_eagle
from tests.drafters.oracles import p_eagle_oracle as oracle
from tests.drafters.recording import assert_drafts_are, record_drafts


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
    """The wrapper has the K that the head was trained for."""
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


def test_a_chain_head_may_name_no_mask_token(tiny_target: str, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, tiny_target, mask_token_id=None)
    assert make(tiny_target, head).engine.resolved.method == "eagle3"


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
