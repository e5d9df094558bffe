"""Reading adapters in the layout of PEFT, for the modules of every kind of layer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from slipstream import LLM, CheckpointError, LoRARequest, SamplingParams, UsageError
from slipstream.layers.adapters import AdapterSlots
from slipstream.models.adapters import CONFIG, WEIGHTS, Adapter, read_adapter
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, load_decoder
from tests.adapters import ALL, write_adapter, write_merged
from tests.hybrid_checkpoints import write_hybrid
from tests.mixture_checkpoints import write_mixture
from tests.models.parity_cases import Case
from tests.models.small_cases import SMALL
from tests.models.test_parity import write_checkpoint

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
PROMPT: Any = {"prompt_token_ids": [(7 * place * place + place) % 90 + 1 for place in range(40)]}


def network(path: str | Path, rank: int = 16) -> Decoder:
    options = LoadOptions(torch.float32, CPU, "auto", 64, adapters=(2, rank))
    return load_decoder(Checkpoint(Path(path)), options)


@pytest.fixture(scope="module")
def slots(tiny_target: str) -> AdapterSlots:
    found = network(tiny_target).adapters
    assert found is not None
    return found


def read(folder: str | Path, slots: AdapterSlots) -> Adapter:
    return read_adapter(Path(folder), slots)


def case(architecture: str, name: str = "") -> Case:
    return next(it for it in SMALL if it.architecture == architecture and name in it.name)


MODULES = {
    "Phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),  # stacked in its checkpoints
    "Starcoder2": ("q_proj", "o_proj", "c_fc", "c_proj"),
    "Glm4": ("q_proj", "k_proj", "gate_up_proj"),  # neighbours are rotated together
}


@pytest.mark.parametrize(
    "kind", [*MODULES, "LlamaForCausalLM", "MistralForCausalLM", "qwen3_next", "mixture"]
)
def test_every_kind_of_module_gives_the_logits_of_merged_weights(
    kind: str, tmp_path: Path, tiny_models: Any
) -> None:
    targets = MODULES.get(kind, ALL)
    if kind in MODULES:
        target = str(write_checkpoint(case(kind), tmp_path / "target"))
    elif kind == "qwen3_next":  # queries and gates are neighbours; delta nets have no adapters
        target, targets = write_hybrid(tmp_path / "target", kind), ("q_proj", "v_proj", "o_proj")
    elif kind == "mixture":
        target = str(write_mixture(tmp_path / "target", "qwen3_moe"))
        targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    else:
        target = tiny_models.of_architecture(kind)
    adapter = write_adapter(tmp_path / "adapter", target, rank=5, targets=targets, size=0.3)
    merged = LLM(write_merged(tmp_path / "merged", target, adapter), **SIZES)
    llm = LLM(target, enable_lora=True, **SIZES)
    [expected] = merged.generate(PROMPT, PARAMS)
    [found] = llm.generate(PROMPT, PARAMS, LoRARequest("a", 1, adapter))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert_close(numbers(found), numbers(expected), atol=1e-4, rtol=1e-4)
    [bare] = llm.generate(PROMPT, PARAMS)
    assert not torch.allclose(numbers(found), numbers(bare), atol=1e-2)


SIZES: dict[str, Any] = {
    "skip_tokenizer_init": True, "num_kv_blocks": 32, "dtype": "float32", "max_model_len": 64,
}  # fmt: skip


def numbers(output: Any) -> torch.Tensor:
    """Log probabilities of the prompt's tokens."""
    found = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return torch.tensor([row[token].logprob for row, token in found])


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"target_modules": r".*\.(q|v)_proj"}, 1.0),
        ({"target_modules": "all-linear"}, 1.0),
        ({"target_modules": "(.*)*x"}, 1.0),  # matching it would take for ever
        ({"init_lora_weights": "gaussian", "layers_to_transform": [0, 1]}, 1.0),
    ],
    ids=str,
)
def test_factors_are_read_with_their_scale(
    config: dict[str, Any], scale: float, tiny_target: str, tmp_path: Path, slots: AdapterSlots
) -> None:
    write_adapter(tmp_path, tiny_target, targets=("q_proj", "v_proj"), **config)
    stored, found = load_file(tmp_path / WEIGHTS), read(tmp_path, slots)
    assert len(found.factors) == 4
    for name, (first, second) in found.factors.items():
        assert torch.equal(first, stored[f"base_model.model.{name}.lora_A.weight"])
        assert_close(second, stored[f"base_model.model.{name}.lora_B.weight"] * scale)


@pytest.mark.parametrize("inside", ["", "model.layers.", "model.language_model.layers."])
def test_names_within_a_model_that_also_sees_are_found(
    inside: str, tiny_target: str, tmp_path: Path, slots: AdapterSlots
) -> None:
    """Also in `target_modules`, where full names are those of the multimodal model."""
    named: tuple[str, ...] = ALL
    if inside:
        own = (it.removeprefix("model.layers.") for it in slots.modules)
        named = tuple(f"{inside}{it}" for it in own)
    write_adapter(tmp_path, tiny_target, target_modules=named)
    stored = load_file(tmp_path / WEIGHTS)
    longer = {
        it.replace("model.layers", "model.language_model.layers"): stored[it] for it in stored
    }
    save_file(longer, tmp_path / WEIGHTS)
    assert read(tmp_path, slots).factors.keys() == slots.modules.keys() & read_names(stored)


def read_names(stored: dict[str, torch.Tensor]) -> set[str]:
    return {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in stored}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"peft_type": "LOHA"}, '"peft_type" is "LOHA", but only "LORA"'),
        ({"task_type": "SEQ_CLS"}, '"task_type" is "SEQ_CLS"'),
        ({"bias": "lora_only"}, '"bias" is "lora_only", but only "none"'),
        ({"use_dora": True}, '"use_dora" is not supported: DoRA'),
        ({"modules_to_save": ["lm_head"]}, '"modules_to_save" is not supported: whole modules'),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "experts and other stacked parameters"),
        ({"rank_pattern": {"q_proj": 8}}, '"rank_pattern" is not supported'),
        ({"fan_in_fan_out": True}, '"fan_in_fan_out" is not supported'),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model below the adapter"),
        ({"r": 0}, '"r" must be from 1 to 256, not 0'),
        ({"r": 300}, '"r" must be from 1 to 256, not 300'),
        ({"r": 32}, "rank 32 is above .* start with --max-lora-rank 32"),
        ({"r": 4.5}, '"r" must be an integer'),
        ({"r": 3}, r"has shape \[4, 80\], but this model and .*\.json ask for \[3, 80\]"),
        ({"lora_alpha": "8"}, '"lora_alpha" must be a number'),
        ({"lora_alpha": 1e30}, r"is too large for torch.float32 once it is scaled by 2\.5e\+29"),
        ({"target_modules": None}, '"target_modules" must be a list'),
        ({"target_modules": "("}, '"target_modules" is no regular expression'),
        ({"target_modules": "(" * 9999}, '"target_modules" is no regular expression'),
        ({"target_modules": ["q_proj"]}, "which target_modules in adapter_config.json does not"),
        ({"novel_way": 1}, '"novel_way" is unknown'),
    ],
    ids=str,
)
def test_what_is_not_applied_is_refused_by_name(
    config: dict[str, Any], told: str, tiny_target: str, tmp_path: Path, slots: AdapterSlots
) -> None:
    write_adapter(tmp_path, tiny_target)
    content = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**content, **config}))
    with pytest.raises(CheckpointError, match=told):
        read(tmp_path, slots)


LAYER = "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({f"{LAYER}.mlp.experts.3.down_proj.lora_A.weight": (4, 48)}, "experts are not adapted"),
        ({"base_model.model.lm_head.lora_A.weight": (4, 48)}, "lm_head is no module of this model"),
        ({f"{LAYER}.self_attn.q_proj.lora_magnitude_vector": (96,)}, "which is no factor of an"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 9)}, "which is no factor"),
        ({f"{LAYER}.self_attn.q_proj.lora_B.weight": None}, "has no lora_B of model.layers.0.self"),
        (
            {f"{LAYER}.self_attn.q_proj.lora_A.weight": (4, 47)},
            r"has shape \[4, 47\], .* \[4, 48\]",
        ),
        (
            {f"{LAYER}.self_attn.q_proj.lora_B.weight": (48, 4)},
            r"has shape \[48, 4\], .* \[96, 4\]",
        ),
        ({f"{LAYER}.self_attn.q_proj.lora_A.weight": float("nan")}, "holds NaN or infinity"),
        ({f"{LAYER}.self_attn.q_proj.lora_B.weight": float("inf")}, "holds NaN or infinity"),
        ({f"{LAYER}.self_attn.q_proj.lora_A.weight": 1e30}, "holds numbers above 1e"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_refused(
    changed: dict[str, Any], told: str, tiny_target: str, tmp_path: Path, slots: AdapterSlots
) -> None:
    write_adapter(tmp_path, tiny_target, target_modules="all-linear")
    stored = load_file(tmp_path / WEIGHTS)
    for name, value in changed.items():
        partner = name.replace("lora_A", "lora_B")
        if value is None:
            del stored[name]
        elif isinstance(value, float):
            stored[name][0, 0] = value
        else:
            stored[name] = torch.zeros(value)
            stored.setdefault(partner, torch.zeros(48, 4))
    save_file(stored, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=told):
        read(tmp_path, slots)


def test_files_that_are_missing_or_broken_are_named(
    tiny_target: str, tmp_path: Path, slots: AdapterSlots
) -> None:
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        read(tmp_path / "nowhere", slots)
    folder = Path(write_adapter(tmp_path / "a", tiny_target))
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-40])
    with pytest.raises(CheckpointError, match=re.escape(str(folder / WEIGHTS))):
        read(folder, slots)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        read(folder, slots)
    (folder / CONFIG).write_text("{")
    (folder / WEIGHTS).write_bytes(whole)
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        read(folder, slots)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a" * 4000])
def test_paths_that_cannot_be_followed_are_refused(path: str, tiny_target: str) -> None:
    llm = LLM(tiny_target, enable_lora=True, **SIZES)
    with pytest.raises(CheckpointError, match="LoRA adapter"):
        llm.generate(PROMPT, PARAMS, LoRARequest("a", 1, path))


def test_a_slot_holds_what_was_written_last(tiny_target: str, tmp_path: Path) -> None:
    found = network(tiny_target).adapters
    assert found is not None
    large = read(write_adapter(tmp_path / "a", tiny_target, rank=9), found)
    small = read(write_adapter(tmp_path / "b", tiny_target, rank=2, targets=("o_proj",)), found)
    place = found.modules["model.layers.1.mlp.up_proj"].places[0]
    found.write(1, large.factors)
    rows = slice(place.start, place.start + 80)
    first, second = large.factors["model.layers.1.mlp.up_proj"]
    assert torch.equal(place.low_rank.down[1, 16 : 16 + 9], first)
    assert torch.equal(place.low_rank.up[1, :9, rows], second.T)
    found.write(1, small.factors)
    assert not place.low_rank.down.any()
    assert not place.low_rank.up.any()


def test_a_model_without_such_modules_takes_none(tmp_path: Path) -> None:
    target = write_mixture(tmp_path, "glm4_moe_lite", mlp_layer_types=["sparse"] * 3)
    with pytest.raises(UsageError, match="no layer of this model takes adapters"):
        LLM(target, enable_lora=True, **SIZES)
