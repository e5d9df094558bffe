"""Drafting across tokenizers: which tokens are the same, and what the draft model is shown."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from slipstream.models.checkpoint import Checkpoint
from slipstream.speculative.draft_model.vocabularies import map_tokens
from tests.checkpoints import write_qwen3
from tests.drafter_recording import record
from tests.padded_steps import use_padded_steps
from tests.qwen3_oracle import Qwen3Oracle
from tests.tokenizers import write_tokenizer

PROMPT = [5, 9, 14, 33, 70, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
MASK = 71
# Of the target's 96 tokens the draft has those with even ids and those below 40, in another order,
# and some of its own; its id 0 is the unknown token.
OURS = [f"t{index}" for index in range(96)]
SHARED = [index for index in range(95, 0, -1) if index < 40 or index % 2 == 0]
THEIRS = ["<unk>", "own", *(OURS[index] for index in SHARED), "mask"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and its first layer with renumbered tokens."""
    target = write_qwen3(tmp_path_factory.mktemp("target"))
    draft = write_qwen3(tmp_path_factory.mktemp("draft"), keep_layers=1, vocab_size=len(THEIRS) + 3)
    own, weights = (load_file(folder / "model.safetensors") for folder in (draft, target))
    table = own["model.embed_tokens.weight"]
    for index, token in enumerate(THEIRS):
        if token in OURS:
            table[index] = weights["model.embed_tokens.weight"][OURS.index(token)]
    layer = {name: weights[name] for name in own}
    save_file({**layer, "model.embed_tokens.weight": table}, draft / "model.safetensors")
    write_tokenizer(target, OURS)
    write_tokenizer(draft, THEIRS)
    return str(target), str(draft)


def make(target: str, speculative: dict[str, Any] | None) -> LLM:
    return LLM(
        target,
        speculative_config=speculative,
        num_kv_blocks=64,
        skip_tokenizer_init=True,
        block_size=8,
    )


def mapped(draft: str, **more: Any) -> dict[str, Any]:
    return {"model": draft, "num_speculative_tokens": 4, "use_heterogeneous_vocab": True, **more}


def generate(llm: LLM, *prompts: list[int]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY)


def in_draft(tokens: list[int]) -> list[int]:
    return [THEIRS.index(OURS[token]) if OURS[token] in THEIRS else 0 for token in tokens]


@pytest.mark.parametrize("steps", ["exact", "padded"])
@pytest.mark.parametrize("parallel", [False, True])
def test_drafts_are_the_oracles_over_the_shared_tokens(
    parallel: bool, steps: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    expected = generate(make(target, None), PROMPT, [*range(1, 60)])
    if steps == "padded":
        use_padded_steps(monkeypatch)
    recording, oracle = record(monkeypatch), Qwen3Oracle(draft)
    more = {"method": "pard", "pard_token": MASK} if parallel else {}
    outputs = generate(make(target, mapped(draft, **more)), PROMPT, [*range(1, 60)])
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.metrics.num_accepted_tokens > 5
    shared = sorted(SHARED)
    columns = torch.tensor(in_draft(shared))
    assert any(token not in SHARED for item in recording.drafts for token in item.known[6:])
    for item in recording.drafts:
        count = len(item.tokens)
        tail = [MASK] * (count - 1) if parallel else in_draft(item.tokens[:-1])
        logits = oracle.logits([*in_draft(item.known), *tail])[-count:, columns]
        assert (item.logits.double() - logits).abs().max() < 1e-4
        assert item.tokens == [shared[place] for place in logits.argmax(-1).tolist()]


def test_only_shared_tokens_are_proposed_when_sampled(pair: tuple[str, str]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=3)
    llm = make(pair[0], mapped(pair[1], draft_vocab_size=30))
    output = llm.generate({"prompt_token_ids": PROMPT}, params)[0].outputs[0]
    drafted = [t for t, guess in zip(output.token_ids, output.from_draft, strict=True) if guess]
    assert drafted
    assert set(drafted) <= set(sorted(SHARED)[:30])


def test_a_draft_vocabulary_is_chosen_among_the_shared_tokens(pair: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match=f"vocabulary of {len(SHARED)} that target and drafter"):
        make(pair[0], mapped(pair[1], draft_vocab_size=len(SHARED) + 1))


def test_without_the_option_the_drafter_is_refused_and_the_option_named(
    pair: tuple[str, str],
) -> None:
    with pytest.raises(CheckpointError, match="use_heterogeneous_vocab=true"):
        make(pair[0], {"model": pair[1]})


def test_the_same_tokenizer_needs_no_map(pair: tuple[str, str]) -> None:
    llm = make(pair[0], mapped(pair[0]))
    metrics = generate(llm, PROMPT)[0].metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens


def test_how_much_is_shared_is_told(
    pair: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "slipstream"):
        make(pair[0], mapped(pair[1]))
    told = f"{len(SHARED)} of the target's 96 tokens are among the drafter's {len(THEIRS)}"
    assert told in caplog.text


# Which tokens are the same

BYTE_LEVEL = {
    "decoder": {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
}
METASPACE = {"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}}
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def map_of(folder: Path, ours: Path, theirs: Path, size: int = 100) -> dict[int, int]:
    write_qwen3(theirs)
    return map_tokens(ours, size, Checkpoint(theirs), size).draft_ids


def test_spaces_and_bytes_mean_the_same_however_they_are_spelled(tmp_path: Path) -> None:
    vocab = ["Ġthe", "the", "Ċ", "Ã©", "ÃĹ", "x", "Ġ"]
    ours = write_tokenizer(tmp_path / "ours", vocab, **BYTE_LEVEL)
    spelled = ["<unk>", SPACE, "<0x0A>", SPACE + "the", "é", "the", "<0x78>", "x", "ÃĹ"]
    theirs = write_tokenizer(tmp_path / "theirs", spelled, **METASPACE)
    assert map_of(tmp_path, ours, theirs) == {0: 3, 1: 5, 2: 2, 3: 4, 5: 7, 6: 1}


def test_a_special_token_is_no_word_of_the_same_spelling(tmp_path: Path) -> None:
    special = [
        {"id": 1, "content": "<s>", "special": True},
        {"id": 2, "content": "<e>", "special": True},
    ]
    for token in special:
        token |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ours = write_tokenizer(tmp_path / "ours", ["a", "<s>", "<e>"], added_tokens=special)
    theirs = write_tokenizer(tmp_path / "theirs", ["a", "<e>", "<s>"])
    assert map_of(tmp_path, ours, theirs) == {0: 0}
    (theirs / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    assert map_of(tmp_path, ours, theirs) == {0: 0, 2: 1}


def test_ids_without_a_row_in_the_model_are_left_out(tmp_path: Path) -> None:
    ours = write_tokenizer(tmp_path / "ours", ["a", "b", "c"])
    theirs = write_tokenizer(tmp_path / "theirs", ["c", "a", "b"])
    assert map_of(tmp_path, ours, theirs) == {0: 1, 1: 2, 2: 0}
    assert map_of(tmp_path, ours, theirs, 2) == {0: 1}


@pytest.mark.parametrize(
    ("named", "eos", "fallback"),
    [({"unk_token": "u"}, 2, 1), ({}, 2, 2), ({"eos_token": "e"}, None, 0)],
)
def test_what_stands_for_unknown_tokens(
    named: dict[str, str], eos: int | None, fallback: int, tmp_path: Path
) -> None:
    model = {"type": "BPE", "vocab": {"e": 0, "u": 1, "a": 2}, "merges": []}
    ours = write_tokenizer(tmp_path / "ours", ["a"])
    theirs = write_tokenizer(tmp_path / "theirs", ["e"], model=model)
    (theirs / "tokenizer_config.json").write_text(json.dumps(named))
    (theirs / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert map_tokens(ours, 9, Checkpoint(theirs), 9).fallback == fallback


def test_maps_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    ours = write_tokenizer(tmp_path / "ours", ["a", "b"])
    theirs = write_tokenizer(tmp_path / "theirs", ["c", "d"])
    with pytest.raises(CheckpointError, match="no token in common"):
        map_tokens(ours, 9, Checkpoint(theirs), 9)
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    write_tokenizer(theirs, ["a"], model=model)
    (theirs / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="neither an unknown token nor an end token"):
        map_tokens(ours, 9, Checkpoint(theirs), 9)
    (theirs / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        map_tokens(ours, 9, Checkpoint(theirs), 9)
