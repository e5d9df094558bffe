"""MTP modules that are told apart, and those that do not fit: one sentence that names the cause."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from slipstream.speculative.catalogue import recognise
from slipstream.speculative.mtp.checkpoint import MtpCheckpoint
from tests.checkpoints import write_qwen3
from tests.drafters.heads import write_eagle1
from tests.drafters.mtp_heads import add_mtp, write_mtp
from tests.drafters.test_bad_heads import edit, make, write_config

QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2}
BASE = {"model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"}
KINDS: list[tuple[dict[str, Any], set[str], str]] = [
    (QWEN, {"mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"}, "mtp"),
    (QWEN, {"model.mtp_layers.0.input_proj.weight"}, "mtp"),
    (QWEN, {"model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"}, "mtp"),
    ({"speculators_model_type": "mtp", "transformer_layer_config": QWEN}, set(), "mtp"),
    ({**QWEN, "architectures": ["Qwen3NextMTP"]}, set(), "mtp"),
    ({**QWEN, "model_type": "deepseek_mtp"}, set(), "mtp"),
    # A language model that has modules beside it can still draft as a whole.
    ({**QWEN, "mtp_num_hidden_layers": 1}, {*BASE, "mtp.fc.weight"}, "draft_model"),
    (
        {**QWEN, "num_nextn_predict_layers": 1},
        {*BASE, "model.layers.2.eh_proj.weight"},
        "draft_model",
    ),
]


@pytest.mark.parametrize(("config", "names", "kind"), KINDS)
def test_recognition(config: dict[str, Any], names: set[str], kind: str) -> None:
    assert recognise(config, names) == kind


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


def test_gated_attention_cannot_run_yet(tiny_target: str, tmp_path: Path) -> None:
    """Its queries come with a gate each, as in Qwen3-Next."""
    head = write_mtp(tmp_path, tiny_target)
    edit(head, **{"mtp.layers.0.self_attn.q_proj.weight": torch.ones(192, 48)})
    with pytest.raises(CheckpointError, match="has gated attention, which is not supported yet"):
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


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 99}, "vocabulary of 99 tokens and the target has 96"),
    "width": ({"hidden_size": 64}, "reads features of 64 numbers and the target's have 48"),
    "unknown key": ({"spin": 3}, '"spin" is unknown'),
    "shape": ({"intermediate_size": 72}, r"has shape \[80, 48\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_that_does_not_fit(name: str, tiny_target: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    with pytest.raises(CheckpointError, match=message):
        make(tiny_target, write_config(write_mtp(tmp_path, tiny_target), **changes))


def test_modules_of_a_wider_target(tiny_target: str, tmp_path: Path) -> None:
    other = write_qwen3(tmp_path / "other", hidden_size=64)
    with pytest.raises(CheckpointError, match=r"cannot draft for .* another target"):
        make(tiny_target, write_mtp(tmp_path / "head", other))
    # Also where they lie in the other target's own checkpoint.
    with pytest.raises(CheckpointError, match=r"cannot draft for .* another target"):
        make(tiny_target, add_mtp(other, "mimo"), method="mtp")


def test_what_holds_no_modules(tiny_target: str, tiny_draft: str, tmp_path: Path) -> None:
    for config in ({"method": "mtp"}, {"model": "mtp"}):
        with pytest.raises(CheckpointError, match=r"holds no MTP modules .*; give a folder"):
            LLM(tiny_target, speculative_config=config, skip_tokenizer_init=True)
    with pytest.raises(CheckpointError, match=r"for method mtp: .* one for draft_model"):
        make(tiny_target, Path(tiny_draft), method="mtp")
    with pytest.raises(CheckpointError, match=r"for method mtp: .* it is one for eagle"):
        make(tiny_target, write_eagle1(tmp_path / "one", tiny_target), method="mtp")
    with pytest.raises(CheckpointError, match=r"for method eagle: .* it is one for mtp"):
        make(tiny_target, write_mtp(tmp_path / "two", tiny_target), method="eagle")


def test_tensors_that_nobody_reads(tiny_target: str, tmp_path: Path) -> None:
    head = write_mtp(tmp_path / "apart", tiny_target)
    with pytest.raises(CheckpointError, match=r"does not use \(mtp.extra.weight\)"):
        make(tiny_target, edit(head, **{"mtp.extra.weight": torch.ones(3)}))
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
    ({"draft_tensor_parallel_size": 2}, "runs on one device"),
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


@pytest.mark.parametrize("style", ["qwen", "deepseek", "speculators"])
def test_dummy_weights_and_other_precisions(style: str, tmp_path: Path) -> None:
    """A config alone can be timed."""
    target = write_qwen3(tmp_path / "target")
    head = write_mtp(tmp_path / "head", target, style)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)
    prompt = {"prompt_token_ids": [4, 9, 2]}
    for extra in ({"quantization": "fp8"}, {"draft_sample_method": "greedy"}):
        output = make(str(target), head, **extra).generate(prompt, params)[0]
        assert output.metrics.num_drafts > 0
    for folder in (target, head):
        (folder / "model.safetensors").unlink()
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 16}
    llm = LLM(str(target), load_format="dummy", speculative_config={"model": str(head)}, **options)
    assert llm.generate(prompt, params)[0].metrics.num_drafts > 0
    with pytest.raises(CheckpointError, match="holds no MTP modules"):
        LLM(str(target), load_format="dummy", speculative_config={"method": "mtp"}, **options)
    write_config(target, num_nextn_predict_layers=2)
    llm = LLM(str(target), load_format="dummy", speculative_config={"method": "mtp"}, **options)
    assert llm.generate(prompt, params)[0].metrics.num_drafts > 0


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
