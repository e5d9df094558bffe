"""What is wrong with a checkpoint is found in its headers, before any data are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM
from slipstream.core.errors import CheckpointError
from slipstream.models import safetensors_file, tensor_check
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.tensor_check import require_tensors
from tests.checkpoints import write_qwen3
from tests.float4_checkpoints import modelopt, packed_mxfp4, packed_nvfp4, quark
from tests.models.expert_cases import mixture
from tests.models.parity_cases import Case, shape
from tests.models.test_parity import write_checkpoint
from tests.models.test_quantized_experts import GPT_OSS, fused_anew, fused_mxfp4, quantised
from tests.quantized_checkpoints import (
    Format,
    awq,
    edit_config,
    edit_tensors,
    float8,
    float_tensors,
    gptq,
    int_tensors,
    packed_tensors,
    write_quantized,
)

FORMATS: dict[str, Format] = {
    "mxfp4": packed_mxfp4(),
    "nvfp4": packed_nvfp4(),
    "quark": quark(),
    "modelopt": modelopt(),
    "modelopt-fp8": modelopt("FP8"),
    "fp8": float8(block=128),
    "fp8-64": float8(),
    "static": float8(block=None, scheme="static"),
    "float": float_tensors(),
    "float-blocks": float_tensors("block"),
    "int8": int_tensors(),
    "int4": packed_tensors(group=32),
    "int4-zeros": packed_tensors(symmetric=False),
    "int4-order": packed_tensors(actorder="group"),
    "int8-packed": packed_tensors(bits=8),
    "gptq": gptq(group=32),
    "gptq-order": gptq(ordered=True),
    "gptq-bias": gptq(with_bias=True),
    "gptq8": gptq(bits=8, group=-1),
    "awq": awq(group=32),
}
GPT_OSS_STACK = "model.layers.0.mlp.experts.gate_up_proj_blocks"
MODULE = "model.layers.1.mlp.up_proj"


@pytest.fixture
def headers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("data were read")

    monkeypatch.setattr(safetensors_file, "_read_slices", refuse)


def check(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    require_tensors(checkpoint, read_decoder_config(checkpoint))


def own(folder: Path) -> dict[str, Tensor]:
    """The tensors of MODULE by the endings of their names."""
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{MODULE}."): it for name, it in tensors.items() if MODULE in name}


@pytest.mark.usefixtures("headers_alone")
@pytest.mark.parametrize("name", FORMATS)
def test_every_quantised_tensor_is_compared(name: str, tmp_path: Path) -> None:
    """A tensor that is missing, has another shape or is one too many is named."""
    write_quantized(tmp_path, FORMATS[name])
    check(tmp_path)
    tensors = own(tmp_path)
    for ending, tensor in tensors.items():
        if ending in ("input_scale", "bias", "g_idx", "weight_shape"):  # may be missing
            continue
        full = f"{MODULE}.{ending}"
        edit_tensors(tmp_path, **{full: None})
        with pytest.raises(CheckpointError, match=rf"has no tensor {MODULE}\.\w+"):
            check(tmp_path)
        edit_tensors(tmp_path, **{full: torch.zeros(3, 5, 7, dtype=tensor.dtype)})
        with pytest.raises(CheckpointError, match=rf"{full}.*\[3, 5, 7\]"):
            check(tmp_path)
        edit_tensors(tmp_path, **{full: tensor})
    edit_tensors(tmp_path, **{f"{MODULE}.weight_extra": torch.ones(2)})
    with pytest.raises(CheckpointError, match=rf"does not use \({MODULE}\.weight_extra\)"):
        check(tmp_path)


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8", "nvfp4", "int8"])
def test_settings_that_are_missing_are_told(name: str, tmp_path: Path) -> None:
    """Early files of GPTQ and AWQ have them beside config.json."""
    write_quantized(tmp_path, FORMATS[name])
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(
        CheckpointError, match=r"tensors such as model\..* has no quantization_conf"
    ):
        check(tmp_path)


QWEN3 = Case("Qwen3Moe", "fp8", {**shape(4, 2, 64, 24), **mixture(4, 2, 256)})


def without_scales(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: it for name, it in tensors.items() if not name.endswith("_scale_inv")}


def as_integers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stacks = {name: it for name, it in tensors.items() if it.dim() == 3 and "scale" not in name}
    return {**tensors, **{name: it.view(torch.uint8) for name, it in stacks.items()}}


def with_renamed_stacks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_proj_scale_inv", "_proj_scales"): it for name, it in tensors.items()}


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("broken", [without_scales, as_integers, with_renamed_stacks])
def test_fused_experts_of_other_formats_are_refused(
    broken: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = write_checkpoint(QWEN3, tmp_path / "m")
    quantised(folder, float8(block=128), lambda it: ".experts." in it, {})
    fused_anew(folder)
    check(folder)
    save_file(broken(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"fused experts \(.*gate_up_proj\) in fp8.* not read"
    ):
        check(folder)


def test_stacks_of_blocks_are_compared_too(tmp_path: Path) -> None:
    folder = write_checkpoint(GPT_OSS, tmp_path / "m")
    fused_mxfp4(folder)
    check(folder)
    edit_tensors(folder, **{GPT_OSS_STACK: torch.zeros(4, 5, dtype=torch.uint8)})
    with pytest.raises(CheckpointError, match=rf"{GPT_OSS_STACK} as \[4, 5\] of uint8"):
        check(folder)


@pytest.mark.usefixtures("plain_torch")
def test_an_engine_compares_the_headers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Path] = []

    class Counted(tensor_check._Headers):
        def __init__(self, checkpoint: Checkpoint, stored: Any) -> None:
            compared.append(checkpoint.path)
            super().__init__(checkpoint, stored)

    monkeypatch.setattr(tensor_check, "_Headers", Counted)
    target, draft = write_qwen3(tmp_path / "target"), write_qwen3(tmp_path / "draft", seed=1)
    given = {"model": str(draft), "num_speculative_tokens": 2}
    LLM(str(target), skip_tokenizer_init=True, num_kv_blocks=8, speculative_config=given)
    assert sorted(compared) == [draft, target]
