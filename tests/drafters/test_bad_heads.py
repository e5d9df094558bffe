"""Recognition, and heads that do not fit: one sentence that names the cause."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from slipstream.speculative.catalogue import recognise
from slipstream.speculative.eagle3.config import read_eagle3_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from tests.checkpoints import write_qwen3
from tests.drafters.heads import as_pickle, as_wrapper, write_eagle1, write_eagle3

LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
KINDS: list[tuple[dict[str, Any], set[str], str]] = [
    (LLAMA, {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"}, "draft_model"),
    (LLAMA, {"fc.weight", "layers.0.mlp.up_proj.weight"}, "eagle"),
    ({"model_type": "eagle", "model": LLAMA}, set(), "eagle"),
    ({**LLAMA, "draft_vocab_size": 32000}, set(), "eagle3"),
    (LLAMA, {"midlayer.hidden_norm.weight", "fc.weight"}, "eagle3"),
    (LLAMA, {"model.layers.0.hidden_norm.weight", "fc.weight"}, "eagle3"),
    (LLAMA, {"d2t", "fc.weight"}, "eagle3"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, set(), "eagle3"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, {"mask_hidden"}, "p-eagle"),
    ({**LLAMA, "draft_vocab_size": 9, "ptd_token_id": 5}, set(), "p-eagle"),
    ({**LLAMA, "draft_vocab_size": 9, "mask_token_id": None}, set(), "eagle3"),
    ({**LLAMA, "architectures": ["PEagleDraftModel"]}, set(), "p-eagle"),
    ({"speculators_model_type": "eagle3", "transformer_layer_config": LLAMA}, set(), "eagle3"),
    ({"speculators_model_type": "peagle"}, set(), "p-eagle"),
    ({**LLAMA, "dflash_config": {}}, {"fc.weight"}, "dflash"),
    ({"model_type": "gemma4_assistant"}, set(), "gemma4_assistant"),
    ({"model_type": "medusa"}, set(), "medusa"),
    ({"model_type": "mlp_speculator"}, set(), "mlp_speculator"),
    ({**LLAMA, "spd_type": "pard", "pard_token": 7}, set(), "pard"),
    ({**LLAMA, "pard2": True, "spd_type": "pard2"}, set(), "pard2"),
]


@pytest.mark.parametrize(("config", "names", "kind"), KINDS)
def test_recognition(config: dict[str, Any], names: set[str], kind: str) -> None:
    assert recognise(config, names) == kind


def make(target: str, head: Path, **options: Any) -> LLM:
    return LLM(
        target,
        speculative_config={"model": str(head), **options},
        skip_tokenizer_init=True,
        num_kv_blocks=16,
    )


def edit(folder: Path, drop: str | None = None, **tensors: torch.Tensor) -> Path:
    """Without the tensors whose names end so, with others."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    kept = {name: value for name, value in weights.items() if not (drop and name.endswith(drop))}
    save_file(kept | tensors, file)
    return folder


def write_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "drop"}))
    return folder


AUX = "eagle_aux_hidden_state_layer_ids"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "aux out of range": ({AUX: [0, 1, 3]}, "target of 2 layers has those of 0 to 2"),
    "aux twice": ({AUX: [0, 1, 1]}, "streams of the layers 0, 1, 1"),
    "usual aux of a small target": ({AUX: "drop"}, "which is what a head without a list reads"),
    "fewer aux": ({AUX: [0, 1]}, "fc reads 144 numbers a token, and 2 layers .* give 96"),
    "aux words": ({AUX: ["a"]}, "must be a list of layer numbers"),
    "vocabulary": ({"vocab_size": 99, "draft_vocab_size": 60}, "vocabulary of 99 tokens"),
    "target width": ({"target_hidden_size": 64}, "target of hidden size 64, and this one has 48"),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
    "unknown key": ({"spin": 3}, '"spin" is unknown'),
    "quantised": (
        {"quantization_config": {"quant_method": "fp8"}},
        "asks for fp8 weights, which drafting heads are not read in; .* --drafter-quantization",
    ),
    "flag": ({"norm_output": "yes"}, "norm_output.* must be true or false"),
    "draft vocabulary": ({"draft_vocab_size": 61}, "must hold 61 integers"),
    "width": ({"hidden_size": 96}, "cannot share the target's: its hidden size is 96"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_that_does_not_fit(name: str, tiny_target: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    folder = write_eagle3(tmp_path, tiny_target, draft_vocab=60, fit=False)
    with pytest.raises(CheckpointError, match=message):
        make(tiny_target, write_config(folder, **changes))


def test_tensors_that_do_not_fit(tiny_target: str, tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        return write_eagle3(tmp_path / name, tiny_target, draft_vocab=60, fit=False)

    with pytest.raises(CheckpointError, match="without a tensor d2t nobody knows which"):
        make(tiny_target, edit(fresh("d2t"), "d2t"))
    with pytest.raises(CheckpointError, match="leads to token ids from 35 to 153, outside"):
        make(tiny_target, edit(fresh("absolute"), d2t=torch.arange(60) + 35))
    with pytest.raises(CheckpointError, match="does not lead to rising token ids"):
        make(tiny_target, edit(fresh("unsorted"), d2t=5 - 2 * torch.arange(60).clamp_max(2)))
    with pytest.raises(CheckpointError, match=r"no tensor model.layers.0.hidden_norm.weight"):
        make(tiny_target, edit(fresh("norm"), "hidden_norm.weight"))
    with pytest.raises(CheckpointError, match="no lm_head, and the target's has 96 rows"):
        make(tiny_target, edit(fresh("head"), "lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"does not use \(extra.weight\)"):
        make(tiny_target, edit(fresh("extra"), **{"extra.weight": torch.ones(3)}))
    twice = {"layers.0.hidden_norm.weight": torch.ones(48)}
    with pytest.raises(CheckpointError, match="same tensor under two names"):
        make(tiny_target, edit(fresh("twice"), **twice))


def test_a_head_of_a_wider_target(tiny_target: str, tmp_path: Path) -> None:
    other = write_qwen3(tmp_path / "other", hidden_size=64)
    for write in (write_eagle1, write_eagle3):
        head = write(tmp_path / write.__name__, other)
        with pytest.raises(CheckpointError, match=r"cannot draft for .* another target"):
            make(tiny_target, head)


def test_methods_are_not_mixed_up(tiny_target: str, tiny_draft: str, tmp_path: Path) -> None:
    head = write_eagle1(tmp_path / "one", tiny_target)
    with pytest.raises(CheckpointError, match=r"for method eagle3: .* it is one for eagle"):
        make(tiny_target, head, method="eagle3")
    with pytest.raises(CheckpointError, match="it is one for draft_model"):
        make(tiny_target, Path(tiny_draft), method="eagle")
    write_config(head, speculators_model_type="sponge")
    with pytest.raises(CheckpointError, match="kind sponge, which is not supported"):
        make(tiny_target, head)
    with pytest.raises(UsageError, match="method eagle needs model"):
        LLM(tiny_target, speculative_config={"method": "eagle"}, skip_tokenizer_init=True)
    with pytest.raises(UsageError, match="one way to draft; leave it out"):
        make(tiny_target, write_eagle3(tmp_path / "3", tiny_target), parallel_drafting=True)


def test_pickles_that_hold_more_than_tensors_are_not_run(tiny_target: str, tmp_path: Path) -> None:
    head = as_pickle(write_eagle3(tmp_path, tiny_target, fit=False))
    torch.save({"fc.weight": Path("/")}, head / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read as a file of tensors alone"):
        make(tiny_target, head)
    (head / "pytorch_model.bin").write_bytes(b"PK nothing")
    with pytest.raises(CheckpointError, match="download it again"):
        make(tiny_target, head)


NESTED = [([1, 17, 33], (2, 18, 34)), ([2, 30, 58], (2, 30, 58)), ([24, 30, 36], (24, 30, 36))]


@pytest.mark.parametrize(("stated", "read"), NESTED)
def test_nested_layer_ids_have_two_meanings(
    stated: list[int], read: tuple[int, ...], tiny_target: str, tmp_path: Path
) -> None:
    head = write_eagle3(tmp_path, tiny_target, fit=False)
    write_config(head, eagle_aux_hidden_state_layer_ids="drop", eagle_config={AUX: stated})
    assert read_eagle3_config(HeadCheckpoint(head)).entered_layers == read
    write_config(head, eagle_config="drop", **{AUX: stated})
    assert read_eagle3_config(HeadCheckpoint(head)).entered_layers == tuple(stated)


def test_the_usual_layers_and_flags(tiny_target: str, tmp_path: Path) -> None:
    head = write_config(write_eagle3(tmp_path, tiny_target, fit=False), **{AUX: None})
    config = read_eagle3_config(HeadCheckpoint(head))
    assert config.stream_layers(36) == (2, 18, 33)
    assert config.stream_layers(32) == (2, 16, 29)
    assert not config.norm_before_residual
    assert config.layers.rope.theta == 10000.0
    as_wrapper(head)
    assert read_eagle3_config(HeadCheckpoint(head)).norm_before_residual


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_dummy_weights_and_other_precisions(method: str, tmp_path: Path) -> None:
    """A config alone can be timed."""
    target = write_qwen3(tmp_path / "target", num_hidden_layers=6)
    write = write_eagle1 if method == "eagle" else write_eagle3
    head = write(tmp_path / "head", target)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)
    with pytest.raises(UsageError, match="shares the target's embedding or lm_head"):
        make(str(target), head, dtype="bfloat16")
    options: list[dict[str, Any]] = [{"quantization": "fp8"}, {"dtype": "float32"}, {}]
    if method == "eagle3":
        write_eagle3(head, target, own_embedding=True)
        options.append({"dtype": "bfloat16"})
    for extra in options:
        output = make(str(target), head, **extra).generate({"prompt_token_ids": [4, 9]}, params)
        assert output[0].metrics.num_drafts > 0
    for folder in (target, head):
        (folder / "model.safetensors").unlink()
    llm = LLM(
        str(target),
        load_format="dummy",
        speculative_config={"model": str(head), "method": method},
        skip_tokenizer_init=True,
        num_kv_blocks=16,
    )
    output = llm.generate({"prompt_token_ids": [4, 9]}, params)
    assert output[0].metrics.num_drafts > 0


def test_a_wrapper_leaves_out_what_transformers_has_by_default(tmp_path: Path) -> None:
    """As the library writes the head of Qwen3-8B, whose width is the default one."""
    layers = Qwen3Config(num_hidden_layers=1, num_key_value_heads=8, intermediate_size=12288)
    wrapper = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layers.to_diff_dict(),
        "draft_vocab_size": 32000,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    config = read_eagle3_config(HeadCheckpoint(tmp_path))
    shape = config.layers
    assert (shape.hidden_size, shape.vocab_size, shape.num_layers) == (4096, 151936, 1)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (32, 8, 128)
    assert shape.attention.qk_norm
    assert config.fc_norm
    assert config.norm_output


@pytest.mark.parametrize("form", ["nested", "mixtral"])
def test_other_forms_of_eagle1_configs(form: str, tiny_target: str, tmp_path: Path) -> None:
    """Those of old conversions, and a llama layer under the name of a mixture of experts."""
    head = write_eagle1(tmp_path, tiny_target)
    plain = make(tiny_target, head).generate({"prompt_token_ids": [4, 9]}, LONG)[0]
    file = head / "config.json"
    config = json.loads(file.read_text())
    if form == "nested":
        config = {"model_type": "eagle", "model": config, "eagle_fc_bias": True}
        config |= {"architectures": ["EagleModel"], "truncated_vocab_size": 96}
    else:
        config |= {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    file.write_text(json.dumps(config))
    other = make(tiny_target, head).generate({"prompt_token_ids": [4, 9]}, LONG)[0]
    assert other.metrics.num_drafts > 0
    ours, theirs = other.metrics, plain.metrics
    assert ours.num_accepted_tokens_per_pos == theirs.num_accepted_tokens_per_pos
