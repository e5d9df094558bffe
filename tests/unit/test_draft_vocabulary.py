"""The subset holds what is common, and the end tokens."""

import json
import warnings
from pathlib import Path

import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels.columns import ALL_COLUMNS
from slipstream.models.checkpoint import resolve_checkpoint
from slipstream.models.tokenizer import Tokenizer
from slipstream.speculative.draft_vocabulary import (
    DraftVocabularyConfig,
    choose_draft_vocabulary,
)
from slipstream.speculative.drafter import Draft

DEMO = resolve_checkpoint("demo")


def test_without_a_text_the_first_learned_tokens_are_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [90, 200]}))
    chosen = choose_draft_vocabulary(DraftVocabularyConfig(10, None), tmp_path, 96)
    assert chosen == [*range(9), 90]


def test_the_commonest_tokens_of_a_text_are_taken(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("self.value = self.other\n" * 50 + "import rare\n")
    chosen = choose_draft_vocabulary(DraftVocabularyConfig(12, text), DEMO, 4096)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 12
    tokenizer = Tokenizer(DEMO)
    assert set(tokenizer.encode("self.value = self.other\n")) <= set(chosen)
    assert {0, 2} <= set(chosen)


def test_only_chosen_tokens_are_drafted(tiny_target: str, tiny_draft: str) -> None:
    llm = LLM(
        tiny_target,
        speculative_config={"model": tiny_draft, "draft_vocab_size": 50},
        skip_tokenizer_init=True,
        num_kv_blocks=64,
    )
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [5, 9, 14]}] * 20, params)
    drafted = [
        token
        for output in outputs
        for token, guessed in zip(
            output.outputs[0].token_ids, output.outputs[0].from_draft, strict=True
        )
        if guessed
    ]
    assert drafted
    assert max(drafted) < 50
    assert max(token for output in outputs for token in output.outputs[0].token_ids) >= 50


def test_the_probabilities_of_a_cut_draft_are_found_without_a_warning() -> None:
    vocabulary = torch.tensor([3, 5, 9])
    drawn = torch.tensor([[5, 9, 3], [3, 3, 9]])
    probs = torch.rand(2, 2, 3)
    one_hot = torch.zeros(2, dtype=torch.bool)
    draft = Draft(drawn[:, :2], torch.tensor([2, 2]), one_hot, probs, vocabulary)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            chances = draft.chances(ALL_COLUMNS)
    finally:
        torch.set_warn_always(before)
    assert chances is not None
    assert chances.tolist() == [[probs[0, 0, 1], probs[0, 1, 2]], [probs[1, 0, 0], probs[1, 1, 0]]]
