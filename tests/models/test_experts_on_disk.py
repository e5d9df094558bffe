"""Mixtures of experts in quantised checkpoints: fused or one by one, whole or in shares."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.kernels.experts import Routing, Scores
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.table import ExpertsParts
from slipstream.layers.experts import ExpertNames, ExpertsSpec
from slipstream.layers.layer import BuildContext
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parameters import Share
from slipstream.layers.rope import RopeTables
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.parameter_sources import no_progress
from slipstream.models.precision import in_precision
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.models.quantized.source import QuantizedSource
from slipstream.runner.capability import kept_formats
from tests.float4_checkpoints import (
    modelopt,
    mxfp4_numbers,
    packed_mxfp4,
    packed_nvfp4,
    quark,
)
from tests.quantized_checkpoints import Format, awq, edit_tensors, float8, gptq, int_tensors

pytestmark = pytest.mark.usefixtures("plain_torch")

CPU = torch.device("cpu")
LAYER, EXPERTS = "model.layers.0", "model.layers.0.mlp.experts"
COUNT, WIDTH, INNER = 3, 64, 96
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
}


def spec(count: int = COUNT, alternating: bool = False) -> ExpertsSpec:
    names = ExpertNames(router="mlp.router", alternating=alternating, transposed=alternating)
    routing = Routing(count, 2, Scores.CHOSEN_SOFTMAX, normalised=False)
    return ExpertsSpec(
        routing=routing,
        intermediate_size=INNER,
        router_bias=True,
        expert_bias=alternating,
        names=names,
    )


def unquantized() -> dict[str, Tensor]:
    """The tensors that no format quantises."""
    return {
        f"{LAYER}.post_attention_layernorm.weight": torch.ones(WIDTH),
        f"{LAYER}.mlp.router.weight": torch.randn(COUNT, WIDTH),
        f"{LAYER}.mlp.router.bias": torch.randn(COUNT),
    }


def weights(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gate and up of each expert, one above the other, and down; of other sizes in each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.linspace(0.5, 2, COUNT).view(-1, 1, 1)
    return (
        torch.randn(COUNT, 2 * INNER, WIDTH, generator=generator) * sizes,
        torch.randn(COUNT, WIDTH, INNER, generator=generator) * sizes,
    )


def write_singles(folder: Path, style: Format) -> tuple[Tensor, Tensor]:
    """Experts one by one -> (gate and up [E 2I, H], down [E H, I]) as they are meant."""
    tensors, meant = unquantized(), dict[str, list[Tensor]](gate_up=[], down=[])
    gate_up, down = weights()
    for expert in range(COUNT):
        gate, up = gate_up[expert].chunk(2)
        for name, weight, kind in (
            ("gate_proj", gate, "gate_up"),
            ("up_proj", up, "gate_up"),
            ("down_proj", down[expert], "down"),
        ):
            stored = style.write(weight.numpy())
            meant[kind].append(stored.weight)
            tensors |= {
                f"{EXPERTS}.{expert}.{name}.{ending}": tensor.contiguous().clone()
                for ending, tensor in stored.tensors.items()
            }
    save_file(tensors, folder / "model.safetensors")
    return torch.cat(meant["gate_up"]), torch.cat(meant["down"])


def write_fused(folder: Path) -> tuple[Tensor, Tensor]:
    """Experts as gpt-oss has them -> as `write_singles`."""
    tensors, meant = unquantized(), list[Tensor]()
    for name, weight in zip(("gate_up_proj", "down_proj"), weights(), strict=True):
        count, rows, columns = weight.shape
        whole = weight
        if name == "gate_up_proj":  # gate 0, up 0, gate 1, ...
            whole = torch.stack(weight.chunk(2, 1), 2).flatten(1, 2)
        values, scales, _ = mxfp4_numbers(np.ascontiguousarray(whole.flatten(0, 1).numpy()))
        tensors |= {
            f"{EXPERTS}.{name}_blocks": values.view(count, rows, columns // 32, 16),
            f"{EXPERTS}.{name}_scales": scales.view(count, rows, columns // 32),
            f"{EXPERTS}.{name}_bias": torch.arange(count * rows).float().view(count, rows),
        }
        meant.append(mxfp4_numbers(weight.flatten(0, 1).numpy())[2])
    save_file(tensors, folder / "model.safetensors")
    return meant[0], meant[1]


def read(
    folder: Path,
    config: dict[str, Any],
    of: ExpertsSpec,
    share: Share | None = None,
    **options: Any,
) -> ExpertsParts:
    stored = read_quantization({"quantization_config": config})
    assert stored is not None
    own = share or Share()
    kept = options.get("kept", kept_formats(CPU))
    source = QuantizedSource(
        Checkpoint(folder), stored, torch.float32, CPU, no_progress, kept, torch.float32, own
    )
    context = BuildContext(in_precision(source, None, REFERENCE), WIDTH, RopeTables(8, CPU), own)
    sublayer = of.build(context, LAYER, LayerNorms(1e-5))
    source.finish()
    assert isinstance(sublayer._parts, ExpertsParts)
    return sublayer._parts


SINGLES: dict[str, tuple[Format, type]] = {
    "mxfp4": (packed_mxfp4(), Mxfp4Matrix),
    "nvfp4": (packed_nvfp4(), Nvfp4Matrix),
    "quark": (quark(), Mxfp4Matrix),
    "modelopt": (modelopt(), Nvfp4Matrix),
    "fp8": (modelopt("FP8"), DenseMatrix),
    "fp8-blocks": (float8(block=128), DenseMatrix),
    "int8": (int_tensors(), Int8Matrix),
    "gptq": (gptq(group=32), Int4Matrix),
    "awq": (awq(group=32), Int4Matrix),
}


@pytest.mark.parametrize("name", SINGLES)
def test_experts_one_by_one_become_one_matrix(name: str, tmp_path: Path) -> None:
    style, kind = SINGLES[name]
    gate_up, down = write_singles(tmp_path, style)
    parts = read(tmp_path, style.config, spec())
    for weight, meant in ((parts.gate_up, gate_up), (parts.down, down)):
        assert type(weight) is kind
        assert torch.equal(weight.dequantised(), meant)


def test_blocks_of_experts_whose_rows_are_no_whole_blocks(tmp_path: Path) -> None:
    style = float8(block=128)
    gate_up, down = write_singles(tmp_path, style)
    parts = read(tmp_path, style.config, spec(), kept={Float8BlockMatrix})
    assert isinstance(parts.gate_up, Float8BlockMatrix)
    assert parts.gate_up.block_rows == 32
    assert torch.equal(parts.gate_up.dequantised(), gate_up)
    assert torch.equal(parts.down.dequantised(), down)


def test_fused_experts_are_taken_apart(tmp_path: Path) -> None:
    gate_up, down = write_fused(tmp_path)
    parts = read(tmp_path, GPT_OSS, spec(alternating=True))
    for weight, meant in ((parts.gate_up, gate_up), (parts.down, down)):
        assert isinstance(weight, Mxfp4Matrix)
        assert torch.equal(weight.dequantised(), meant)
    assert parts.gate_up_bias is not None
    assert parts.gate_up_bias[1, :3].tolist() == [192.0, 194.0, 196.0]
    assert parts.gate_up_bias[1, INNER] == 193.0


def test_fused_experts_become_floats_where_there_is_no_kernel(tmp_path: Path) -> None:
    gate_up, _ = write_fused(tmp_path)
    parts = read(tmp_path, GPT_OSS, spec(alternating=True), kept=())
    assert isinstance(parts.gate_up, DenseMatrix)
    assert torch.equal(parts.gate_up.dequantised(), gate_up)


@pytest.mark.parametrize("fused", [True, False])
def test_shares_of_experts(fused: bool, tmp_path: Path) -> None:
    """Ranks share the rows of gate and up of each expert, and the columns of down."""
    style = packed_mxfp4()
    config = GPT_OSS if fused else style.config
    gate_up, down = write_fused(tmp_path) if fused else write_singles(tmp_path, style)
    of = spec(alternating=fused)
    for rank in range(3):
        share = Share(rank, 3, reduce=lambda it: it)
        parts = read(tmp_path, config, of, share)
        mine = slice(rank * INNER // 3, (rank + 1) * INNER // 3)
        rows = gate_up.view(COUNT, 2, INNER, WIDTH)[:, :, mine].flatten(0, 2)
        assert torch.equal(parts.gate_up.dequantised(), rows)
        assert torch.equal(parts.down.dequantised(), down[:, mine])


# What is refused

Change = Callable[[dict[str, Tensor]], dict[str, Tensor | None]]


def replaced(name: str, tensor: Tensor | None) -> Change:
    return lambda found: {f"{LAYER}.mlp.{name}": tensor}


def poisoned(name: str, value: float) -> Change:
    """A checkpoint in which one number of a tensor is changed."""

    def change(found: dict[str, Tensor]) -> dict[str, Tensor | None]:
        tensor = found[f"{LAYER}.mlp.{name}"].clone()
        flat = tensor.float().flatten()
        flat[len(flat) // 2] = value
        return {f"{LAYER}.mlp.{name}": flat.view(tensor.shape).to(tensor.dtype)}

    return change


BAD_FUSED: list[tuple[Change, str]] = [
    (poisoned("experts.gate_up_proj_scales", 255), "255, which is NaN, in .*gate_up_proj_scales"),
    (
        poisoned("experts.down_proj_scales", 255),
        "255, which is NaN, in the scales .*down_proj_scales;",
    ),
    (replaced("experts.gate_up_proj_scales", None), "no tensor .*gate_up_proj_scales, which"),
    (replaced("experts.down_proj_blocks", None), "no tensor .*down_proj_blocks, which"),
    (
        replaced("experts.down_proj_scales", torch.ones(COUNT, WIDTH, 4).byte()),
        r"down_proj_scales as \[3, 64, 4\] of uint8, .* for \[3, 64, 3\]",
    ),
    (
        replaced("experts.down_proj_blocks", torch.ones(2, WIDTH, 3, 16).byte()),
        r"down_proj_blocks as \[2, 64, 3, 16\] of uint8, .* \[3, 64, 3, 16\]",
    ),
    (replaced("experts.down_proj_bias", torch.ones(2, WIDTH)), r"shape \[2, 64\].* for \[3, 64\]"),
    (replaced("router.bias", torch.ones(COUNT + 1)), r"router.bias .* shape \[4\], .* for \[3\]"),
    (replaced("experts.up_proj_blocks", torch.ones(1).byte()), "does not use .*up_proj_blocks"),
]


@pytest.mark.parametrize(("change", "message"), BAD_FUSED)
def test_fused_experts_that_are_refused(change: Change, message: str, tmp_path: Path) -> None:
    write_fused(tmp_path)
    edit_tensors(tmp_path, **change(load_file(tmp_path / "model.safetensors")))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, GPT_OSS, spec(alternating=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("count", [COUNT - 1, COUNT + 1])
def test_counts_of_experts_that_do_not_fit(fused: bool, count: int, tmp_path: Path) -> None:
    style = packed_nvfp4()
    if fused:
        write_fused(tmp_path)
    else:
        write_singles(tmp_path, style)
    router = {f"{LAYER}.mlp.router.weight": torch.ones(count, WIDTH)}
    edit_tensors(tmp_path, **router, **{f"{LAYER}.mlp.router.bias": torch.ones(count)})
    message = r"gate_up_proj_bias .* has shape \[3, 192\], but its config.json asks for"
    if not fused:
        message = "experts.3.gate_proj.weight, nor" if count > COUNT else "does not use .*experts.2"
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, GPT_OSS if fused else style.config, spec(count, alternating=fused))


NAN, INF = float("nan"), float("inf")
ONE = "experts.1.up_proj"
BAD_SINGLES: list[tuple[Format, Change, str]] = [
    (packed_mxfp4(), poisoned(f"{ONE}.weight_scale", 255), "255, which is NaN, in .*1.up_proj"),
    (quark(), poisoned(f"{ONE}.weight_scale", 255), "255, which is NaN, in .*1.up_proj.weight_sc"),
    (modelopt(), poisoned(f"{ONE}.weight_scale", NAN), "1.up_proj.weight_scale .* NaN or infinity"),
    (modelopt(), poisoned(f"{ONE}.weight_scale_2", INF), "weight_scale_2 .* NaN or infinity"),
    (
        modelopt(),
        poisoned(f"{ONE}.weight_scale_2", 0),
        "0.0 in .*_2, where a global scale is above",
    ),
    (modelopt(), replaced(f"{ONE}.weight_scale_2", torch.ones(2)), r"scale_2 as \[2\] of float32"),
    (packed_nvfp4(), poisoned(f"{ONE}.weight_global_scale", 0), "weight_global_scale, where a glo"),
    (packed_nvfp4(), poisoned(f"{ONE}.weight_global_scale", -1), "-1.0 in .* is above 0"),
    (packed_nvfp4(), poisoned(f"{ONE}.weight_global_scale", NAN), "global_scale .* NaN or infin"),
    (packed_nvfp4(), replaced(f"{ONE}.weight_global_scale", None), "no tensor .*weight_global_sca"),
    (
        packed_nvfp4(),
        replaced(f"{ONE}.weight_scale", torch.ones(INNER, 2).to(torch.float8_e4m3fn)),
        r"weight_scale as \[96, 2\] of float8_e4m3fn, .* for \[96, 4\]",
    ),
    (
        packed_mxfp4(),
        replaced(f"{ONE}.weight_packed", torch.ones(INNER, WIDTH).byte()),
        r"weight_packed as \[96, 64\] of uint8, .* for \[96, 32\]",
    ),
    (float8(block=128), poisoned(f"{ONE}.weight_scale_inv", INF), "weight_scale_inv .* NaN or"),
]


@pytest.mark.parametrize(("style", "change", "message"), BAD_SINGLES)
def test_single_experts_that_are_refused(
    style: Format, change: Change, message: str, tmp_path: Path
) -> None:
    write_singles(tmp_path, style)
    edit_tensors(tmp_path, **change(load_file(tmp_path / "model.safetensors")))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, style.config, spec())


def test_a_missing_expert(tmp_path: Path) -> None:
    style = modelopt()
    write_singles(tmp_path, style)
    found = load_file(tmp_path / "model.safetensors")
    edit_tensors(tmp_path, **{name: None for name in found if ".experts.1.down" in name})
    message = r"no tensor .*experts.1.down_proj.weight, nor .* form, nor .*experts.down_proj,"
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, style.config, spec())
