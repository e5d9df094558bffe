"""Settings are checked before data are made and the target is loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.train import run
from slipstream.train.data import Data, pack_data
from slipstream.train.plan import WORK
from slipstream.train.run import run_training
from slipstream.train.sequences import Sequences
from slipstream.train.settings import TrainSettings
from tests.checkpoints import write_qwen3
from tests.quantized_checkpoints import gptq, write_quantized
from tests.train.small_runs import settings

SMALL = "small"  # a checkpoint with fewer tokens than the target
ONE_SEQUENCE = Sequences(torch.ones(1, 48, dtype=torch.int32), torch.ones(1, 48).bool())


@pytest.fixture
def nothing_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a run would begin to work."""

    def refuse(*_: Any) -> None:
        raise AssertionError("data are made or the target is loaded")

    monkeypatch.setattr(Data, "sequences", refuse)
    monkeypatch.setattr(run, "load_target", refuse)


@pytest.mark.usefixtures("nothing_costly")
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("eagle3", {"options": {"init": "demo"}}, "--init has no effect on eagle3"),
        ("eagle3", {"drop_rate": 0.5}, "--drop-rate has no effect on eagle3"),
        ("draft", {"place_decay": 0.5}, "--place-decay has no effect on draft"),
        ("eagle3", {"options": {"aux_layers": (1, 2, 4)}}, "a target of 3 layers has those of"),
        ("p-eagle", {"options": {"aux_layers": (1, 2, 4)}}, "a target of 3 layers has those of"),
        ("dflash", {"options": {"aux_layers": (1, 2, 4)}}, "a target of 3 layers has those of"),
        ("p-eagle", {"options": {"mask_token": 96}}, "not in the vocabulary of 96 ids"),
        ("dflash", {"options": {"mask_token": 96}}, "not in the vocabulary of 96 ids"),
        ("pard", {"options": {"mask_token": 96}}, "not in the vocabulary of 96 ids"),
        ("medusa", {"options": {"draft_vocab_size": 97}}, "between 1 and the target's vocabulary"),
        (
            "eagle3",
            {"options": {"draft_vocab_size": 9, "share_head": True}},
            "leave --draft-vocab-size or --share-head out",
        ),
        ("draft", {"options": {"num_heads": 3, "num_kv_heads": 2}}, "must be a multiple"),
        ("dflash", {"num_speculative_tokens": 24}, "have no room for drafts of 24"),
        ("mtp", {"num_speculative_tokens": 600}, "have no room for drafts of 600"),
        ("eagle3", {"max_length": 64}, "which have 48 tokens; leave it out"),
        ("eagle3", {"generate": True}, "--generate continues texts"),
        ("eagle3", {"dtype": "int7"}, "int7"),
        ("pard", {"options": {"init": "/no/such/model"}}, "/no/such/model"),
        ("eagle3", {"options": {"aux_layers": (1, 9)}}, "layers 1, 9"),
        ("eagle3", {"options": {"draft_vocab_size": 500}}, "between 1 and"),
        ("eagle3", {"options": {"mask_token": 3}}, "--mask-token has no effect on eagle3"),
        ("pard", {"options": {"init": SMALL}}, "knows 80 tokens and the target 96"),
        ("pard", {"options": {"init": SMALL, "num_layers": 2}}, "--num-layers is given by --init"),
    ],
)
def test_flags_that_cannot_be_are_refused_at_once(
    kind: str,
    changes: dict[str, Any],
    message: str,
    taught_target: str,
    own_words: Path,
    tmp_path: Path,
) -> None:
    out, options = tmp_path / "out", dict(changes.get("options", {}))
    if options.get("init") == SMALL:
        options["init"] = str(write_qwen3(tmp_path / SMALL, vocab_size=80, keep_layers=1))
    with pytest.raises((UsageError, CheckpointError), match=message):
        run_training(
            settings(kind, taught_target, own_words, out, **{**changes, "options": options})
        )
    assert not out.exists()


@pytest.mark.usefixtures("nothing_costly")
def test_quantised_models_to_begin_with_are_refused_at_once(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    write_quantized(tmp_path / "m", gptq())
    model, out = str(tmp_path / "m"), tmp_path / "out"
    with pytest.raises(CheckpointError, match="gptq weights, which training cannot begin with"):
        run_training(settings("draft", taught_target, own_words, out, options={"init": model}))
    assert not out.exists()


@pytest.mark.usefixtures("nothing_costly")
def test_data_that_cannot_be_learned_are_refused_at_once(
    taught_target: str, tmp_path: Path
) -> None:
    packed, prompts = tmp_path / "one.safetensors", tmp_path / "prompts.jsonl"

    def refused(data: Path, message: str, **changes: Any) -> None:
        given = settings("medusa", taught_target, data, tmp_path / "out", **changes)
        with pytest.raises(UsageError, match=message):
            run_training(given)

    ONE_SEQUENCE.save(packed)
    refused(packed, "makes 1 sequence of 48 tokens")
    Sequences(ONE_SEQUENCE.token_ids + 95, ONE_SEQUENCE.learned).save(packed)
    refused(packed, "have token 96, and the target knows 96: they were packed for another model")
    prompts.write_text(json.dumps({"prompt": "w1 w2 w3"}) + "\n")
    refused(prompts, "--generate lets the target answer")
    refused(prompts, "make 14 tokens at most", generate=True, generate_tokens=10)


@pytest.mark.usefixtures("nothing_costly")
def test_a_folder_that_cannot_be_written_is_refused_at_once(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "head"
    with pytest.raises(UsageError, match=f"--out {out} cannot be written to"):
        run_training(settings("medusa", taught_target, own_words, out))


def test_other_data_do_not_cost_a_run_what_it_has(
    taught_target: str, own_words: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out, other = tmp_path / "out", tmp_path / "other.safetensors"
    run_training(settings("medusa", taught_target, own_words, out, steps=1))
    request.getfixturevalue("nothing_costly")
    sequences = Sequences.load(own_words)
    sequences.at(slice(20)).save(other)
    with pytest.raises(UsageError, match="a run with another --data"):
        run_training(settings("medusa", taught_target, other, out))


def test_packing_refuses_what_it_would_not_write(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    def given(data: Path, out: Path) -> TrainSettings:
        return settings("data", taught_target, data, out, max_length=None)

    with pytest.raises(UsageError, match=r"must end in \.safetensors"):
        pack_data(given(own_words, tmp_path / "x.bin"))
    with pytest.raises(UsageError, match="is packed already"):
        pack_data(given(own_words, tmp_path / "x.safetensors"))
    (tmp_path / "text.txt").write_text("w1 w2 w3")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written to"):
        pack_data(given(tmp_path / "text.txt", tmp_path / "file" / "x.safetensors"))
    made = pack_data(given(tmp_path / "text.txt", tmp_path / "new" / "x.safetensors"))
    assert made.length == 512
    assert len(Sequences.load(tmp_path / "new" / "x.safetensors")) == 1


def test_a_run_that_was_never_begun_leaves_a_folder_to_use(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError):
        run_training(settings("medusa", taught_target, own_words, out, drop_rate=0.5))
    run_training(settings("medusa", taught_target, own_words, out, steps=1))
    assert (out / WORK).is_dir()
    shutil.rmtree(out / WORK)
    with pytest.raises(UsageError, match="no run to continue"):
        run_training(settings("medusa", taught_target, own_words, out, steps=1))
