"""DFlash drafters that do not fit, or are something else: one sentence that names the cause."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from slipstream.speculative.catalogue import recognise
from slipstream.speculative.dflash.config import read_dflash_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from tests.checkpoints import write_qwen3
from tests.drafters.blocks import write_dflash

SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KINDS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "dflash"),
    ({"architectures": ["Qwen3ForCausalLM"], "dflash_config": {"mask_token_id": 1}}, "dflash"),
    ({"speculators_model_type": "dflash"}, "dflash"),
    ({"speculators_model_type": "dspark"}, "dflash"),
    ({"architectures": ["Qwen3DSparkModel"]}, "dflash"),
]


@pytest.mark.parametrize(("config", "kind"), KINDS)
def test_recognition(config: dict[str, Any], kind: str) -> None:
    assert recognise(config, ()) == kind


def make(target: str, folder: Path, **options: Any) -> LLM:
    config = {"model": str(folder), "num_speculative_tokens": 4, **options}
    return LLM(target, speculative_config=config, skip_tokenizer_init=True, num_kv_blocks=16)


def write_config(folder: Path, nested: dict[str, Any] | None = None, **changes: Any) -> Path:
    """`drop` leaves a key out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    if nested is not None:
        config["dflash_config"] = {**config["dflash_config"], **nested}
    for values in (config, config.get("dflash_config", {})):
        for key in [key for key, value in values.items() if value == "drop"]:
            values.pop(key)
    file.write_text(json.dumps(config))
    return folder


def edit(folder: Path, drop: str | None = None, **tensors: torch.Tensor) -> Path:
    """Without the tensors whose names end so, with others."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    kept = {name: value for name, value in weights.items() if not (drop and name.endswith(drop))}
    save_file(kept | tensors, file)
    return folder


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"nested": {"mask_token_id": "drop"}}, "mask_token_id.* must be one of the 96"),
    "far mask": ({"nested": {"mask_token_id": 96}}, "must be one of the 96 token ids .* not 96"),
    "no block": ({"block_size": "drop"}, "block_size.* is missing"),
    "small block": ({"block_size": 1}, "a draft block holds a known token and one more"),
    "layers": ({"nested": {"target_layer_ids": [1, 2]}}, "enter layers 2, 3; a target of 2"),
    "words": ({"nested": {"target_layer_ids": [1, "a"]}}, "list of layer numbers, each once"),
    "twice": ({"nested": {"target_layer_ids": [1, 1]}}, "list of layer numbers, each once"),
    "fewer": ({"nested": {"target_layer_ids": [1]}}, "reads 96 numbers a token, and 1 layers"),
    "two lists": ({"aux_hidden_state_layer_ids": [0, 1]}, "differ; remove one of them"),
    "trained for": ({"num_target_layers": 36}, "a target of 36 layers, and this one has 2"),
    "target width": ({"target_hidden_size": 64}, "hidden size 64, and this one has 48"),
    "vocabulary": ({"vocab_size": 99}, "vocabulary of 99 tokens"),
    "draft vocabulary": ({"draft_vocab_size": 61}, "without a tensor d2t nobody knows which"),
    "sinks": ({"nested": {"attention_sink_bias": True}}, "only false is supported"),
    "projector": ({"projector_type": "domino"}, 'is "domino", but only "dflash"'),
    "unknown": ({"spin": 3}, '"spin" is unknown'),
    "unknown nested": ({"nested": {"spin": 3}}, '"dflash_config.spin" is unknown'),
    "windows": ({"layer_types": ["sliding_attention"] * 2}, "make them agree"),
    "DSpark": ({"architectures": ["DSparkDraftModel"]}, "DSpark drafter, whose Markov head"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_that_does_not_fit(name: str, tiny_target: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    folder = write_dflash(tmp_path, tiny_target, own_head=False)
    with pytest.raises(CheckpointError, match=message) as caught:
        make(tiny_target, write_config(folder, **changes))
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_fit(tiny_target: str, tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        return write_dflash(tmp_path / name, tiny_target, own_head=False)

    with pytest.raises(CheckpointError, match=r"no tensor hidden_norm.weight"):
        make(tiny_target, edit(fresh("norm"), "hidden_norm.weight"))
    with pytest.raises(CheckpointError, match=r"does not use \(extra.weight\)"):
        make(tiny_target, edit(fresh("extra"), **{"extra.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match="DSpark drafter"):
        make(tiny_target, edit(fresh("markov"), **{"markov_w1": torch.ones(3, 2)}))
    folder = fresh("embedding")
    torch.save({}, folder / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match="write it into the row of mask_token_id"):
        make(tiny_target, folder)
    whole = fresh("cut")
    content = (whole / "model.safetensors").read_bytes()
    (whole / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        make(tiny_target, whole)


def test_a_drafter_of_a_wider_target(tiny_target: str, tmp_path: Path) -> None:
    other = write_qwen3(tmp_path / "other", hidden_size=64)
    folder = write_dflash(tmp_path / "draft", other, own_head=False)
    with pytest.raises(CheckpointError, match=r"cannot draft for .* another target"):
        make(tiny_target, folder)


def test_options(tiny_target: str, tmp_path: Path) -> None:
    folder = write_dflash(tmp_path, tiny_target, block=5)
    with pytest.raises(UsageError, match="at most 4 tokens a step"):
        make(tiny_target, folder, num_speculative_tokens=5)
    with pytest.raises(UsageError, match="all tokens come from one pass; leave it out"):
        make(tiny_target, folder, parallel_drafting=False)
    with pytest.raises(UsageError, match="method dflash needs model"):
        LLM(tiny_target, speculative_config={"method": "dflash"}, skip_tokenizer_init=True)
    with pytest.raises(CheckpointError, match="it is one for dflash"):
        make(tiny_target, folder, method="eagle3")
    with pytest.raises(UsageError, match="shares the target's embedding or lm_head"):
        make(tiny_target, folder, dtype="bfloat16")
    assert make(tiny_target, folder, parallel_drafting=True).engine.resolved.method == "dflash"


def test_dummy_weights_and_other_precisions(tmp_path: Path) -> None:
    target = write_qwen3(tmp_path / "target")
    folder = write_dflash(tmp_path / "draft", target, own_embedding=True)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)
    for extra in ({"quantization": "fp8"}, {"dtype": "bfloat16"}):
        output = make(str(target), folder, **extra).generate({"prompt_token_ids": [4, 9]}, params)
        assert output[0].metrics.num_drafts > 0
    for checkpoint in (target, folder):
        (checkpoint / "model.safetensors").unlink()
    llm = LLM(
        str(target),
        load_format="dummy",
        speculative_config={"model": str(folder)},
        skip_tokenizer_init=True,
        num_kv_blocks=16,
    )
    assert llm.generate({"prompt_token_ids": [4, 9]}, params)[0].metrics.num_drafts > 0


def test_layers_that_are_read_unless_listed(tiny_target: str, tmp_path: Path) -> None:
    """Evenly from the output of layer 1 to that of the third last: published lists."""
    folder = write_dflash(tmp_path, tiny_target, own_head=False, num_hidden_layers=5)
    write_config(folder, nested={"target_layer_ids": "drop"})
    config = read_dflash_config(HeadCheckpoint(folder))
    assert config.stream_layers(36) == (2, 10, 18, 26, 34)  # Qwen3-8B: outputs 1, 9, 17, 25, 33
    assert config.stream_layers(32) == (2, 9, 16, 23, 30)
    write_config(folder, num_hidden_layers=1)
    assert read_dflash_config(HeadCheckpoint(folder)).stream_layers(36) == (19,)
