"""Drafters for a target with an adapter: they learn what the target says with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.cli.checkpoint_facts import read_facts
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.train.data import pack_data
from slipstream.train.run import run_training
from slipstream.train.settings import DataSettings
from slipstream.train.target import load_target
from tests.adapters import write_adapter, write_merged
from tests.lossless.test_greedy import tokens
from tests.quantized_checkpoints import gptq, write_quantized, write_whole
from tests.train.small_runs import prepared, settings, teacher, write_own_words

IDS = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(5))
PROMPTS: list[Any] = [{"prompt_token_ids": [start, 7, 9]} for start in range(40, 48)]


@pytest.fixture(scope="module")
def adapter(taught_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "style"
    return Path(write_adapter(folder, taught_target, rank=3, lora_alpha=6, size=0.8))


@pytest.fixture(scope="module")
def merged(taught_target: str, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_merged(tmp_path_factory.mktemp("merged") / "it", taught_target, adapter, 2.0)


@pytest.mark.parametrize("quantised", [False, True])
def test_the_target_teaches_what_its_adapter_makes_of_it(
    quantised: bool, taught_target: str, adapter: Path, merged: str, tmp_path: Path
) -> None:
    """Also with quantised weights, since adapters are not merged."""
    model = taught_target
    if quantised:
        model, whole = str(tmp_path / "quantised"), tmp_path / "whole"
        write_whole(whole, Path(model), write_quantized(Path(model), gptq(), num_hidden_layers=3))
        adapter = Path(write_adapter(tmp_path / "style", whole, rank=3))
        merged = write_merged(tmp_path / "merged", whole, adapter)
    checkpoint = Checkpoint(Path(model))
    config, device = read_decoder_config(checkpoint), torch.device("cpu")
    ours = load_target(checkpoint, config, torch.float32, device, 256, adapter)
    found, expected = (it.states(IDS, (1, 3)) for it in (ours, teacher(merged)))
    assert not torch.allclose(found.hidden, teacher(model).states(IDS, ()).hidden, atol=1e-2)
    for one, other in zip(
        (found.hidden, *found.streams), (expected.hidden, *expected.streams), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


MORE = ("p-eagle", "dflash", "mtp", "medusa")


@pytest.mark.parametrize(
    "kind", ["eagle3", "draft", *(pytest.param(it, marks=pytest.mark.full) for it in MORE)]
)
def test_a_drafter_for_an_adapter_is_the_one_for_the_merged_model(
    kind: str, taught_target: str, adapter: Path, merged: str, tmp_path: Path
) -> None:
    """The drafter names its adapter, and drafts for it and for others."""
    words = write_own_words(merged, tmp_path / "own.safetensors", count=24)
    steps = 12 if kind == "eagle3" else 2
    given = settings(kind, taught_target, words, tmp_path / "head", steps=steps, lora=adapter)
    ours = run_training(given)
    other = run_training(settings(kind, merged, words, tmp_path / "other", steps=steps))
    for (name, one), (_, two) in zip(
        ours.recipe.trained.named(), other.recipe.trained.named(), strict=True
    ):
        torch.testing.assert_close(one, two, atol=2e-3, rtol=0, msg=name)
    assert read_facts(str(tmp_path / "head")).document()["target_adapter"] == str(adapter)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert "target_adapter" not in config
    assert f"with the adapter `{adapter}`" in (tmp_path / "head" / "README.md").read_text()
    speculative = {"model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    llm = LLM(taught_target, speculative_config=speculative, enable_lora=True, num_kv_blocks=128)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, LoRARequest("style", 1, adapter))
    plain = LLM(merged, num_kv_blocks=128).generate(PROMPTS, params)
    assert tokens(outputs) == tokens(plain)
    counted = llm.metrics.adapters["style"]
    assert counted.num_drafts > 0
    assert counted.num_accepted_tokens > 0 or steps == 2


def test_the_target_answers_with_its_adapter(
    taught_target: str, adapter: Path, merged: str, tmp_path: Path
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"w{it} w7 w9"}) + "\n" for it in range(40, 48)))
    asked = {"generate": True, "generate_tokens": 9, "temperatures": (0.0,), "max_length": 16}
    texts = []
    for name, target, lora in (
        ("style", taught_target, adapter),
        ("merged", merged, None),
        ("style", taught_target, None),  # the answers of the first are not taken
    ):
        given = settings("eagle3", target, data, tmp_path, lora=lora, **asked)
        kept = tmp_path / f"{name}.safetensors", tmp_path / f"{name}.jsonl"
        texts.append(prepared(given, *kept).token_ids.tolist())
    assert texts[0] == texts[1] != texts[2]


def test_a_run_with_another_adapter_is_another_run(
    taught_target: str, adapter: Path, own_words: Path, tmp_path: Path
) -> None:
    given = settings("eagle3", taught_target, own_words, tmp_path / "head", steps=1, lora=adapter)
    run_training(given)
    plain = settings("eagle3", taught_target, own_words, tmp_path / "head", steps=1)
    with pytest.raises(UsageError, match="holds a run with another --lora"):
        run_training(plain)


def test_adapters_that_cannot_be_used_are_refused_before_anything_is_made(
    taught_target: str, adapter: Path, own_words: Path, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    missing = settings("eagle3", taught_target, own_words, out, lora=tmp_path)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        run_training(missing)
    assert not out.exists()
    packing = DataSettings(
        target=taught_target, out=tmp_path / "a.safetensors", data=(tmp_path,), lora=adapter
    )
    with pytest.raises(UsageError, match="--lora says which adapter answers; give --generate"):
        pack_data(packing)
