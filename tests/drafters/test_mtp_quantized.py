"""MTP modules within quantised checkpoints: drafts are those of the numbers that are stored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, CheckpointError
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import LoadOptions, decoder_bytes
from slipstream.models.precision import weight_bytes
from slipstream.speculative.mtp.config import MtpCheckpoint, read_mtp_config
from tests.checkpoints import write_qwen3
from tests.drafters.broken import edit, make, write_config
from tests.drafters.engines import GREEDY, K, forced, run
from tests.drafters.mtp_heads import add_mtp, write_mtp
from tests.drafters.recording import record_drafts
from tests.float4_checkpoints import modelopt
from tests.hybrid_checkpoints import add_module, write_hybrid
from tests.mixture_checkpoints import write_mixture
from tests.models.test_quantized_experts import quantised
from tests.quantized_checkpoints import Format, float8, gptq, packed_tensors, write_whole

OWN: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": K}
# Parts of blocks of 128 x 128 in most matrices, and several blocks.
SHAPE: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 288,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def dense(folder: Path, style: str) -> Path:
    return add_mtp(write_qwen3(folder, **SHAPE), style)


def qwen3_5(folder: Path) -> Path:
    return add_module(write_hybrid(folder, "qwen3_5_text"), "qwen3_5_text")


def glm(folder: Path) -> Path:
    """Latent attention, experts, and an embedding and head in the module."""
    target = write_mixture(folder, "glm4_moe_lite", num_nextn_predict_layers=1)
    return add_mtp(target, "deepseek", own_ends=True)


def wrap(folder: Path) -> None:
    """Rename tensors as in multimodal models, where all names but the module's are longer."""
    config = json.loads((folder / "config.json").read_text())
    names = ["Qwen3_5ForConditionalGeneration"]
    whole = {"architectures": names, "text_config": config}
    whole["quantization_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(whole))
    stored = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name: it
        for name, it in stored.items()
    }
    save_file(renamed, folder / "model.safetensors")


def engine(folder: Path, speculative: dict[str, Any] | None) -> LLM:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 64}
    return LLM(str(folder), speculative_config=speculative, **options)


def in_projections(name: str) -> bool:
    """All projections but the one that enters the module."""
    return "proj." in name and "eh_proj" not in name


def everywhere(name: str) -> bool:
    return "proj." in name or name == "mtp.fc.weight"


def outside_the_module(name: str) -> bool:
    return in_projections(name) and not name.startswith("mtp.")


NOT_LISTED, FC = ["lm_head"], ["lm_head", "mtp.fc"]
BLOCKS = float8(block=128)
CASES: dict[str, tuple[Callable[[Path], Path], Format, Callable[[str], bool], list[str]]] = {
    "qwen": (lambda it: dense(it, "qwen"), BLOCKS, in_projections, FC),
    "qwen-wrapped": (qwen3_5, BLOCKS, in_projections, NOT_LISTED),
    "qwen-everywhere": (lambda it: dense(it, "qwen"), BLOCKS, everywhere, NOT_LISTED),
    "qwen-floats": (qwen3_5, BLOCKS, outside_the_module, ["lm_head", "mtp"]),
    "glm": (glm, BLOCKS, in_projections, ["lm_head", "model.layers.3.eh_proj"]),
    "deepseek-everywhere": (glm, BLOCKS, everywhere, NOT_LISTED),
    "mimo-small-blocks": (lambda it: dense(it, "mimo"), float8(), in_projections, NOT_LISTED),
    "gptq": (lambda it: dense(it, "deepseek"), gptq(group=32), everywhere, NOT_LISTED),
    "int4": (lambda it: dense(it, "deepseek"), packed_tensors(group=32), everywhere, NOT_LISTED),
    # A list that names nothing of the module.
    "nvfp4": (
        lambda it: dense(it, "qwen"),
        modelopt(),
        lambda name: in_projections(name) and "layers.0.self_attn" not in name,
        ["model.layers.0.self_attn*"],
    ),
}
_LISTS = {"fp8": "modules_to_not_convert", "modelopt": "ignore", "compressed-tensors": "ignore"}


LESS_TRIED = ("qwen", "glm")  # their modules are read with other lists too


@pytest.mark.parametrize(
    "case",
    [pytest.param(it, marks=pytest.mark.full) if it in LESS_TRIED else it for it in CASES],
)
def test_drafts_are_those_of_the_stored_numbers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, style, is_quantised, unquantised = CASES[case]
    folder = write(tmp_path / "model")
    meant = quantised(folder, style, is_quantised, {})
    listed = _LISTS.get(style.config["quant_method"])
    if listed is not None:
        write_config(folder, quantization_config={listed: unquantised})
    whole = write_whole(tmp_path / "whole", folder, meant)
    if case == "qwen-wrapped":
        wrap(folder)
    expected = run(engine(folder, None), GREEDY).outputs[0].token_ids
    drafted = record_drafts(monkeypatch)
    run(engine(whole, {**OWN, **forced()}), GREEDY)
    theirs = list(drafted)
    drafted.clear()
    run(engine(folder, {**OWN, **forced()}), GREEDY)
    assert len(drafted) == len(theirs) > 5
    for ours, other in zip(drafted, theirs, strict=True):
        assert (ours.known, ours.tokens) == (other.known, other.tokens)
        for logits, wanted in zip(ours.logits, other.logits, strict=True):
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    output = run(engine(folder, OWN), GREEDY)
    assert output.outputs[0].token_ids == expected
    assert output.metrics.num_accepted_tokens > 0


@pytest.fixture
def eight_bits(tmp_path: Path) -> Path:
    folder = dense(tmp_path / "model", "qwen")
    quantised(folder, BLOCKS, in_projections, {})
    return folder


def test_formats_that_are_not_read(eight_bits: Path) -> None:
    write_config(eight_bits, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match="'bitsandbytes'; supported are"):
        read_mtp_config(MtpCheckpoint(eight_bits))
    write_config(eight_bits, quantization_config="drop")
    with pytest.raises(CheckpointError, match="has quantised weights, which is not supported"):
        read_mtp_config(MtpCheckpoint(eight_bits))


def test_bytes_of_modules_are_not_the_target_s(eight_bits: Path) -> None:
    checkpoint = Checkpoint(eight_bits)
    options = LoadOptions(torch.bfloat16, torch.device("cpu"), "auto", 64)
    config = read_decoder_config(checkpoint)
    found = decoder_bytes(checkpoint, config, options)
    assert found == pytest.approx(weight_bytes(config, options.dtype, None), rel=0.02)


def test_scales_that_are_missing(eight_bits: Path) -> None:
    name = "mtp.layers.0.mlp.up_proj.weight_scale_inv"
    with pytest.raises(CheckpointError, match=f"has no tensor {name}, which its quantization_"):
        engine(edit(eight_bits, name), OWN)


def test_quantised_modules_apart_from_their_model(tmp_path: Path) -> None:
    """Pickled modules beside the target's are not read either."""
    target = write_qwen3(tmp_path / "target", **SHAPE)
    folder = write_mtp(tmp_path / "modules", target, "qwen", fit=False)
    quantised(folder, BLOCKS, in_projections, {})
    with pytest.raises(CheckpointError, match="has quantised weights, which is not supported"):
        make(target, folder)
    weights = load_file(folder / "model.safetensors") | load_file(target / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has quantised weights, which is not supported"):
        read_mtp_config(MtpCheckpoint(folder))
