"""MTP modules in a folder of their own or within the target: what they hold and what they lack."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from slipstream.speculative.mtp.config import MtpCheckpoint
from tests.checkpoints import write_qwen3
from tests.drafters.broken import edit, make, write_config
from tests.drafters.mtp_heads import add_mtp, write_mtp


@pytest.mark.parametrize(
    ("model_type", "zero_centred"),
    [("qwen3", False), ("qwen3_next", True), ("qwen3_5_text", True)],
)
def test_norms_of_wrapped_modules_are_those_of_their_target(
    model_type: str, zero_centred: bool, tiny_target: str, tmp_path: Path
) -> None:
    head = write_mtp(tmp_path, tiny_target, "speculators")
    inner = json.loads((head / "config.json").read_text())["transformer_layer_config"]
    write_config(head, transformer_layer_config={**inner, "model_type": model_type})
    style = MtpCheckpoint(head).style
    assert style.zero_centred == zero_centred
    assert not style.feature_first
    assert not style.blanks_first


PREFIX = {"qwen": "mtp.layers.0", "deepseek": "model.layers.2", "mimo": "model.mtp_layers.0"}
SURPLUS: dict[str, tuple[str, str]] = {
    "self_attn.kv_a_proj_with_mqa.weight": ("latent attention .MLA.", "deepseek"),
    "mlp.experts.0.up_proj.weight": ("a mixture of experts", "qwen"),
    "mlp.gate.weight": ("a mixture of experts", "deepseek"),
    "linear_attn.in_proj.weight": ("linear attention", "qwen"),
    "mlp.up_proj.weight_scale_inv": ("quantised weights", "mimo"),
}


@pytest.mark.parametrize("name", SURPLUS)
def test_layers_of_kinds_that_cannot_run_yet(name: str, tiny_target: str, tmp_path: Path) -> None:
    what, style = SURPLUS[name]
    head = write_mtp(tmp_path, tiny_target, style)
    edit(head, **{f"{PREFIX[style]}.{name}": torch.ones(4)})
    with pytest.raises(CheckpointError, match=f"has {what}, which is not supported yet"):
        make(tiny_target, head)


@pytest.mark.parametrize("key", ["kv_lora_rank", "n_routed_experts"])
def test_configs_of_kinds_that_cannot_run_yet(key: str, tiny_target: str, tmp_path: Path) -> None:
    head = write_config(write_mtp(tmp_path, tiny_target, "deepseek"), **{key: 8})
    with pytest.raises(CheckpointError, match="which is not supported yet"):
        make(tiny_target, head)


@pytest.mark.parametrize("style", PREFIX)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_missing_tensor_is_named(
    style: str, place: int, tiny_target: str, tmp_path: Path
) -> None:
    head = write_mtp(tmp_path, tiny_target, style)
    names = MtpCheckpoint(head).modules[0]
    parts = (
        names.embedding_norm,
        names.feature_norm,
        names.final_norm,
        f"{names.layer}.mlp.down_proj",
    )
    name = f"{parts[place]}.weight".removeprefix("model.")
    with pytest.raises(CheckpointError, match=f"has no tensor (model.)?{name}"):
        make(tiny_target, edit(head, name))


def test_modules_within_a_wider_target(tiny_target: str, tmp_path: Path) -> None:
    other = add_mtp(write_qwen3(tmp_path, hidden_size=64), "mimo")
    with pytest.raises(CheckpointError, match=r"cannot draft for .* another target"):
        make(tiny_target, other, method="mtp")


@pytest.mark.parametrize("config", [{"method": "mtp"}, {"model": "mtp"}])
def test_what_holds_no_modules(config: dict[str, str], tiny_target: str) -> None:
    with pytest.raises(CheckpointError, match=r"holds no MTP modules .*; give a folder"):
        LLM(tiny_target, speculative_config=config, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("style", "key"),
    [("qwen", "mtp_num_hidden_layers"), ("deepseek", "num_nextn_predict_layers")],
)
def test_another_number_of_modules_than_the_config_says(
    style: str, key: str, tmp_path: Path
) -> None:
    target = add_mtp(write_qwen3(tmp_path), style, modules=2)
    for stated in (1, 3):
        write_config(target, **{key: stated})
        with pytest.raises(CheckpointError, match=f"2 MTP modules, and .* {key}={stated}"):
            LLM(str(target), speculative_config={"method": "mtp"}, skip_tokenizer_init=True)


def test_tensors_that_nobody_reads(tmp_path: Path) -> None:
    target = add_mtp(write_qwen3(tmp_path / "target"), "deepseek")
    edit(target, **{"model.layers.2.extra.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"does not use \(model.layers.2.extra.weight\)"):
        LLM(str(target), speculative_config={"method": "mtp"}, skip_tokenizer_init=True)
    # A layer that the target should have had is no module.
    write_config(target, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"does not use \(model.layers.1"):
        LLM(str(target), skip_tokenizer_init=True)


def test_later_modules_with_embeddings_of_their_own(tiny_target: str, tmp_path: Path) -> None:
    head = write_mtp(tmp_path, tiny_target, "deepseek", modules=2, own_ends=True)
    edit(head, **{"model.layers.3.embed_tokens.weight": torch.ones(96, 48)})
    with pytest.raises(CheckpointError, match=r"layers.3.embed_tokens.weight .* is no copy of"):
        make(tiny_target, head)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"revision": "main"}, "revision belongs to model"),
    ({"parallel_drafting": True}, "one way to draft; leave it out"),
    ({"dtype": "bfloat16"}, "shares the target's embedding or lm_head"),
    ({"prompt_lookup_max": 3}, "unknown key prompt_lookup_max for method mtp"),
    ({"draft_tensor_parallel_size": 2}, "every rank runs the few layers"),
    ({"draft_vocab_size": 97}, "larger than the vocabulary of 96"),
    ({"draft_vocab_text": "x"}, "needs draft_vocab_size"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_that_make_no_sense(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = add_mtp(write_qwen3(tmp_path), "qwen")
    config = {"method": "mtp", **options}
    with pytest.raises(UsageError, match=message):
        LLM(str(target), speculative_config=config, skip_tokenizer_init=True)


@pytest.mark.parametrize("method", ["deepseek_mtp", "mimo_mtp", "qwen3_next_mtp", "glm4_moe_mtp"])
def test_the_names_that_other_engines_use(method: str, tmp_path: Path) -> None:
    target = add_mtp(write_qwen3(tmp_path), "qwen")
    llm = LLM(
        str(target),
        speculative_config={"method": method, "num_speculative_tokens": 2},
        skip_tokenizer_init=True,
        num_kv_blocks=16,
    )
    assert llm.engine.resolved.method == "mtp"


def test_dummy_weights_within_a_target(tmp_path: Path) -> None:
    target = write_qwen3(tmp_path)
    (target / "model.safetensors").unlink()
    options: dict[str, Any] = {"load_format": "dummy", "speculative_config": {"method": "mtp"}}
    options |= {"skip_tokenizer_init": True, "num_kv_blocks": 16}
    with pytest.raises(CheckpointError, match="holds no MTP modules"):
        LLM(str(target), **options)
    write_config(target, num_nextn_predict_layers=2)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)
    output = LLM(str(target), **options).generate({"prompt_token_ids": [4, 9, 2]}, params)[0]
    assert output.metrics.num_drafts > 0


def test_a_target_reads_nothing_of_its_modules(tmp_path: Path) -> None:
    """Whatever their kind: they are not the model's."""
    target = add_mtp(write_qwen3(tmp_path), "deepseek")
    edit(target, **{"model.layers.2.mlp.experts.0.up_proj.weight": torch.ones(4)})
    prompt, greedy = {"prompt_token_ids": [4, 9]}, SamplingParams(temperature=0, max_tokens=8)
    llm = LLM(str(target), skip_tokenizer_init=True, num_kv_blocks=16)
    assert len(llm.generate(prompt, greedy)[0].outputs[0].token_ids) > 0
    with pytest.raises(CheckpointError, match="a mixture of experts, which is not supported yet"):
        LLM(str(target), speculative_config={"method": "mtp"}, skip_tokenizer_init=True)
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 1
