"""Whole models with experts in every packed format: the logits are those of the stored numbers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM
from slipstream.core.errors import CheckpointError
from slipstream.layers.parameters import Share
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import LoadOptions, decoder_bytes, load_decoder
from slipstream.models.tensor_check import require_tensors
from tests.float4_checkpoints import modelopt, mxfp4_numbers, packed_mxfp4, packed_nvfp4, quark
from tests.models.expert_cases import mixture, of_glm, of_gpt_oss
from tests.models.latent_cases import YARN, latent
from tests.models.parity_cases import Case, shape
from tests.models.test_parity import CPU, load, make_prompts, runner_logits, write_checkpoint
from tests.quantized_checkpoints import (
    Format,
    awq,
    edit_config,
    float8,
    float_tensors,
    gptq,
    int_tensors,
    packed_tensors,
    write_whole,
)

QWEN3 = Case("Qwen3Moe", "quantised", {**shape(4, 2, 64, 24), **mixture(4, 2, 32)})
GPT_OSS = Case("GptOss", "quantised", {**shape(4, 2, 64, 24), **of_gpt_oss(4, 2, 96)})
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

# Where one scale serves for 128 columns or rows, the matrices here have part of a block.
FORMATS: dict[str, Format] = {
    "mxfp4": packed_mxfp4(),
    "nvfp4": packed_nvfp4(),
    "quark": quark(),
    "modelopt": modelopt(),
    "modelopt-fp8": modelopt("FP8"),
    "fp8": float8(block=128),
    "float": float_tensors(),
    "int8": int_tensors(),
    "int4": packed_tensors(group=32),
    "gptq": gptq(group=32),
    "awq": awq(group=32),
}
Tensors = dict[str, Tensor]


def quantised(
    folder: Path, style: Format, is_quantised: Callable[[str], bool], alone: dict[str, Tensor]
) -> Tensors:
    """Quantise a checkpoint in place -> all its tensors as they are meant.

    Args:
        alone: tensors that take the place of others whose names begin alike.
    """
    tensors = {**load_file(folder / "model.safetensors"), **alone}
    meant = dict(tensors)
    for name, weight in list(tensors.items()):
        if weight.dim() != 2 or not is_quantised(name):
            continue
        stored = style.write(weight.numpy())
        del tensors[name]
        module = name.removesuffix(".weight")
        tensors |= {
            f"{module}.{end}": it.contiguous().clone() for end, it in stored.tensors.items()
        }
        meant[name] = stored.weight
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=style.config)
    return meant


def assert_same_logits(folder: Path, whole: Path, tolerance: float = 5e-6) -> None:
    prompts = [prompt[:20] for prompt in make_prompts()]
    (ours, theirs) = (runner_logits(load(it), prompts, (7, 1, 12)) for it in (folder, whole))
    for logits, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(QWEN3, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(GPT_OSS, tmp_path_factory.mktemp("gpt-oss"))


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for name in ("config.json", "model.safetensors"):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


# Several blocks of 128 x 128 in most matrices, whose edges are none of heads.
DEEPSEEK = Case(
    "DeepseekV3",
    "fp8",
    {
        **latent(3, 160, 144, 136, (40, 8, 24)),
        **of_glm(4, 2, n_group=2, topk_group=1, first_k_dense_replace=1),
        "rope_parameters": YARN,
    },
)


@pytest.mark.usefixtures("plain_torch")
def test_latent_attention_in_blocks_of_fp8(tmp_path: Path) -> None:
    """As in DeepSeek-V3, kv_b_proj is quantised too, and is split into two matrices."""
    folder = write_checkpoint(DEEPSEEK, tmp_path / "m")
    meant = quantised(folder, FORMATS["fp8"], lambda it: "proj" in it, {})
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"].shape == (2, 2)
    assert_same_logits(folder, write_whole(tmp_path / "whole", folder, meant))


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("name", FORMATS)
def test_experts_one_by_one(name: str, qwen3: Path, tmp_path: Path) -> None:
    folder = copied(qwen3, tmp_path / "m")
    meant = quantised(folder, FORMATS[name], lambda it: "proj" in it, {})
    assert_same_logits(folder, write_whole(tmp_path / "whole", folder, meant))


def fused_mxfp4(folder: Path) -> Tensors:
    """gpt-oss's own format in place of its floats -> all tensors as they are meant."""
    tensors = load_file(folder / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = tensors.pop(name).transpose(1, 2).contiguous()  # rows are outputs
        count, rows, columns = weight.shape
        values, scales, numbers = mxfp4_numbers(weight.flatten(0, 1).numpy())
        tensors[f"{name}_blocks"] = values.view(count, rows, columns // 32, 16)
        tensors[f"{name}_scales"] = scales.view(count, rows, columns // 32)
        meant[name] = numbers.view(weight.shape).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=MXFP4)
    return meant


@pytest.mark.parametrize("name", ["gpt-oss", "int4", "fp8"])
@pytest.mark.parametrize("more", [-1, 1])
def test_wrong_numbers_of_layers_are_found_in_the_headers(
    name: str, more: int, gpt_oss: Path, qwen3: Path, tmp_path: Path
) -> None:
    folder = copied(gpt_oss if name == "gpt-oss" else qwen3, tmp_path / "m")
    if name == "gpt-oss":
        fused_mxfp4(folder)
    else:
        quantised(folder, FORMATS[name], lambda it: "proj" in it, {})
    config = read_decoder_config(Checkpoint(folder))
    require_tensors(Checkpoint(folder), config)
    number = len(config.layers)
    edit_config(folder, num_hidden_layers=number + more, layer_types=None)
    checkpoint = Checkpoint(folder)
    beginning = rf"has no tensor model\.layers\.{number}\." if more > 0 else "does not use"
    note = f"it has tensors of {number} layers?, where num_hidden_layers asks for {number + more}"
    with pytest.raises(CheckpointError, match=f"{beginning}.*: {note}"):
        require_tensors(checkpoint, read_decoder_config(checkpoint))


def test_messages_name_what_the_file_has(gpt_oss: Path, tmp_path: Path) -> None:
    """Not single experts where others are stacked, nor blocks of modules that have none."""
    folder = copied(gpt_oss, tmp_path / "m")
    fused_mxfp4(folder)
    number = len(read_decoder_config(Checkpoint(folder)).layers)
    layer = f"model.layers.{number - 1}.mlp"
    whole = load_file(folder / "model.safetensors")
    router = {f"{layer}.router.weight": torch.ones(4, 4, dtype=torch.uint8)}
    alone = [f"{layer}.experts.gate_up_proj_{ending}" for ending in ("blocks", "scales")]
    for tensors, message in (
        ({n: t for n, t in whole.items() if n not in alone}, "experts.gate_up_proj_blocks, which"),
        ({n: t for n, t in whole.items() if n not in router}, r"router\.weight, nor one of its"),
        ({**whole, **router}, r"router\.weight in a dtype that is not read: .* experts alone"),
    ):
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def taken_apart(folder: Path) -> Tensors:
    """gpt-oss's fused experts under the names of single ones; the fused ones leave the file."""
    tensors, alone = load_file(folder / "model.safetensors"), Tensors()
    for name in [name for name in tensors if ".experts." in name]:
        experts, _, last = name.rpartition(".")
        ending = "bias" if last.endswith("_bias") else "weight"
        whole = tensors.pop(name)
        for expert, own in enumerate(whole if ending == "bias" else whole.transpose(1, 2)):
            module = f"{experts}.{expert}"
            if last.startswith("gate_up"):
                alone[f"{module}.gate_proj.{ending}"] = own[0::2].contiguous()
                alone[f"{module}.up_proj.{ending}"] = own[1::2].contiguous()
            else:
                alone[f"{module}.down_proj.{ending}"] = own.contiguous()
    save_file(tensors, folder / "model.safetensors")
    return alone


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_fused_experts(dtype: torch.dtype, gpt_oss: Path, tmp_path: Path) -> None:
    folder = copied(gpt_oss, tmp_path / "m")
    meant = fused_mxfp4(folder)
    tensors = load_file(folder / "model.safetensors")
    scales = {name: it.view(dtype) for name, it in tensors.items() if name.endswith("_scales")}
    save_file({**tensors, **scales}, folder / "model.safetensors")
    assert_same_logits(folder, write_whole(tmp_path / "whole", folder, meant))


def test_naming_the_form_of_the_experts_changes_nothing(gpt_oss: Path, tmp_path: Path) -> None:
    """gpt-oss with quantization=mxfp4 is the checkpoint as it is: attention is not rounded."""
    folder = copied(gpt_oss, tmp_path / "m")
    fused_mxfp4(folder)
    told = []
    for name in (None, "mxfp4", "nvfp4"):
        llm = LLM(str(folder), skip_tokenizer_init=True, num_kv_blocks=8, quantization=name)
        told.append({name: value for name, value, _ in llm.engine.resolved.reasons})
    assert told[0] == told[1]
    assert "quantization" not in told[1]
    assert told[2]["quantization"] == "nvfp4"


@pytest.mark.usefixtures("plain_torch")
def test_naming_the_form_of_a_draft_model_changes_nothing(gpt_oss: Path, tmp_path: Path) -> None:
    folder = copied(gpt_oss, tmp_path / "m")
    fused_mxfp4(folder)
    options = LoadOptions(torch.float32, CPU, "auto", 64)
    networks = [
        load_decoder(Checkpoint(folder), replace(options, quantization=name))
        for name in (None, "mxfp4", "nvfp4")
    ]
    prompts = [prompt[:9] for prompt in make_prompts()]
    plain, named, rounded = (runner_logits(it, prompts, (9,)) for it in networks)
    assert all(torch.equal(*pair) for pair in zip(plain, named, strict=True))
    assert not torch.equal(plain[0], rounded[0])


def fused_anew(folder: Path) -> None:
    """Stack quantised experts in place, as transformers does with those in FP8."""
    tensors = load_file(folder / "model.safetensors")
    experts: dict[str, dict[str, list[Tensor]]] = {}
    for name in sorted(it for it in tensors if ".experts." in it):  # down, gate, up
        module, expert, projection, ending = name.rsplit(".", 3)
        fused = "down_proj" if projection == "down_proj" else "gate_up_proj"
        stack = experts.setdefault(f"{module}.{fused}{ending.removeprefix('weight')}", {})
        stack.setdefault(expert, []).append(tensors.pop(name))
    for name, stack in experts.items():
        rows = [torch.cat([torch.atleast_1d(it) for it in own]) for own in stack.values()]
        tensors[name] = torch.stack(rows)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("block", [128, 64])
def test_fused_experts_in_blocks_of_fp8(block: int, tmp_path: Path) -> None:
    """Gate and up have whole blocks, as in published sizes. Ranks have their shares of each."""
    case = Case("Qwen3Moe", "fp8", {**shape(4, 2, 64, 24), **mixture(4, 2, 256)})
    apart = write_checkpoint(case, tmp_path / "apart")
    meant = quantised(apart, float8(block=block), lambda it: ".experts." in it, {})
    folder = copied(apart, tmp_path / "fused")
    fused_anew(folder)
    assert_same_logits(folder, write_whole(tmp_path / "whole", apart, meant))
    sizes, matrices = [], []
    for path in (folder, apart):
        checkpoint = Checkpoint(path)
        options = LoadOptions(torch.float32, CPU, "auto", 64)
        sizes.append(decoder_bytes(checkpoint, read_decoder_config(checkpoint), options))
        for rank in range(2):
            share = Share(rank, 2, reduce=lambda it: it, gather=lambda it: it)
            decoder: Any = load_decoder(checkpoint, replace(options, share=share))
            experts = decoder.layers[0].feed_forward._parts
            matrices.append((experts.gate_up.dequantised(), experts.down.dequantised()))
    assert sizes[0] == sizes[1]
    for own, expected in zip(matrices[:2], matrices[2:], strict=True):
        assert all(map(torch.equal, own, expected))


@pytest.mark.parametrize("name", ["nvfp4", "modelopt", "modelopt-fp8", "mxfp4"])
def test_other_fused_experts_are_refused(name: str, qwen3: Path, tmp_path: Path) -> None:
    folder = copied(qwen3, tmp_path / "m")
    quantised(folder, FORMATS[name], lambda it: "proj" in it, {})
    fused_anew(folder)
    with pytest.raises(CheckpointError, match=r"fused experts .* are not read; use a file with"):
        load(folder)


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("name", ["mxfp4", "modelopt", "fp8"])
def test_experts_of_gpt_oss_one_by_one(name: str, gpt_oss: Path, tmp_path: Path) -> None:
    folder = copied(gpt_oss, tmp_path / "m")
    alone = taken_apart(folder)
    meant = quantised(folder, FORMATS[name], lambda it: ".experts." in it, alone)
    assert_same_logits(folder, write_whole(tmp_path / "whole", folder, meant))


@pytest.mark.parametrize("name", ["mxfp4", "modelopt", "fused"])
def test_experts_by_the_fastest_kernels(
    name: str, qwen3: Path, gpt_oss: Path, tmp_path: Path
) -> None:
    """The kernels sum in their own order."""
    folder = copied(gpt_oss if name == "fused" else qwen3, tmp_path / "m")
    if name == "fused":
        meant = fused_mxfp4(folder)
    else:
        meant = quantised(folder, FORMATS[name], lambda it: "proj" in it, {})
    assert_same_logits(folder, write_whole(tmp_path / "whole", folder, meant), tolerance=1e-4)


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("load_format", ["auto", "dummy", "twin"])
def test_bytes_of_experts_are_known_beforehand(
    load_format: str, gpt_oss: Path, tmp_path: Path
) -> None:
    """Also for random weights, of which only experts have four bits."""
    folder = copied(gpt_oss, tmp_path / "m")
    fused_mxfp4(folder)
    checkpoint = Checkpoint(folder)
    options = LoadOptions(torch.float32, CPU, load_format, 64)
    config = read_decoder_config(checkpoint)
    network: Any = load_decoder(checkpoint, options)
    experts = [layer.feed_forward._parts for layer in network.layers]
    assert all(it.gate_up.nbytes < it.gate_up.shape[0] * it.gate_up.shape[1] for it in experts)
    taken = network.embedding.weight.nbytes + network.head.weight.nbytes
    for layer, parts in zip(network.layers, experts, strict=True):
        mixer = layer.mixer
        taken += parts.gate_up.nbytes + parts.down.nbytes + parts.router.weight.nbytes
        taken += mixer.qkv.weight.nbytes + mixer.output.weight.nbytes
    assert decoder_bytes(checkpoint, config, options) == pytest.approx(taken, rel=0.06)
