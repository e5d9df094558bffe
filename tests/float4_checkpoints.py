"""Writers of four-bit floats in the formats of the field, and of ModelOpt's checkpoints.

Nothing here comes from the package: every writer follows a description of its format.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.quantized_checkpoints import (
    Array,
    Format,
    Stored,
    block_scales,
    compressed,
    float8_numbers,
    spread,
)

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)


def codes_of(scaled: Array) -> tuple[Array, Array]:
    """(codes [N, K] of the nearest e2m1 numbers, the numbers)."""
    code = np.abs(np.abs(scaled)[..., None] - MAGNITUDES).argmin(-1)
    numbers = np.where(scaled < 0, -MAGNITUDES[code], MAGNITUDES[code])
    return (code + 8 * (scaled < 0)).astype(np.uint8), numbers


def in_bytes(codes: Array) -> Tensor:
    """[N, K] -> [N, K / 2] uint8, the even column in the lower half."""
    return torch.from_numpy(codes[:, 0::2] | (codes[:, 1::2] << 4))


def mxfp4_numbers(weight: Array) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes [N, K / 2], e8m0 [N, K / 32] uint8, what they stand for)."""
    groups = weight.reshape(len(weight), -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 6))
    scales = np.exp2(exponents)[..., None].astype(np.float32)
    codes, numbers = codes_of(groups / scales)
    meant = (numbers * scales).reshape(weight.shape)
    powers = torch.from_numpy((exponents + 127).astype(np.uint8))
    return in_bytes(codes.reshape(weight.shape)), powers, torch.from_numpy(meant)


def nvfp4_numbers(weight: Array, shared: float) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes [N, K / 2], e4m3 [N, K / 16], what they stand for); `shared` is the global factor."""
    groups = weight.reshape(len(weight), -1, 16)
    factor = np.float32(shared)
    scales = torch.from_numpy(np.abs(groups).max(-1) / 6 / factor).to(torch.float8_e4m3fn)
    whole = (scales.float().numpy() * factor)[..., None]
    codes, numbers = codes_of(groups / whole)
    meant = (numbers * whole).reshape(weight.shape).astype(np.float32)
    return in_bytes(codes.reshape(weight.shape)), scales, torch.from_numpy(meant)


def factor_of(weight: Array) -> float:
    return float(np.abs(weight).max() / (6 * 448))


# compressed-tensors

_FLOATS = {"num_bits": 4, "type": "float", "symmetric": True}


def packed_mxfp4(**settings: Any) -> Format:
    def write(weight: Array) -> Stored:
        values, scales, meant = mxfp4_numbers(weight)
        return Stored({"weight_packed": values, "weight_scale": scales}, meant)

    weights = {**_FLOATS, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return compressed("mxfp4-pack-quantized", weights, None, write, **settings)


def packed_nvfp4(activations: bool = False, **settings: Any) -> Format:
    def write(weight: Array) -> Stored:
        divisor = np.float32(1 / factor_of(weight))
        values, scales, meant = nvfp4_numbers(weight, float(np.float32(1) / divisor))
        tensors = {
            "weight_packed": values,
            "weight_scale": scales,
            "weight_global_scale": torch.tensor([divisor]),
        }
        if activations:
            tensors["input_global_scale"] = torch.tensor([300.0])
        return Stored(tensors, meant)

    weights = {**_FLOATS, "strategy": "tensor_group", "group_size": 16}
    inputs = {**weights, "dynamic": "local"} if activations else None
    return compressed("nvfp4-pack-quantized", weights, inputs, write, **settings)


# Quark


def quark(**settings: Any) -> Format:
    def write(weight: Array) -> Stored:
        values, scales, meant = mxfp4_numbers(weight)
        return Stored({"weight": values, "weight_scale": scales}, meant)

    weight = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": 32,
        "ch_axis": -1,
        "scale_format": "e8m0",
        "is_dynamic": False,
        "observer_cls": "PerBlockMXObserver",
    }
    config = {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": weight,
            "input_tensors": {**weight, "is_dynamic": True},
            "bias": None,
            "output_tensors": None,
        },
        "exclude": ["lm_head"],
        "layer_quant_config": {},
        "export": {"pack_method": "reorder"},
    }
    return Format({**config, **settings}, write)


# ModelOpt


def modelopt(algorithm: str = "NVFP4", **settings: Any) -> Format:
    def nvfp4(weight: Array) -> Stored:
        values, scales, meant = nvfp4_numbers(weight, factor_of(weight))
        tensors = {
            "weight": values,
            "weight_scale": scales,
            "weight_scale_2": torch.tensor(factor_of(weight)),
        }
        if algorithm != "W4A16_NVFP4":
            tensors["input_scale"] = torch.tensor(0.01)
        return Stored(tensors, meant)

    def fp8(weight: Array) -> Stored:
        whole = torch.from_numpy(weight)
        if algorithm in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
            scales = block_scales(whole, 128)
            values, meant = float8_numbers(weight, spread(scales, 128, whole))
            return Stored({"weight": values, "weight_scale": scales[:, None, :, None]}, meant)
        largest = whole.abs().amax(1, keepdim=True)
        scales = largest / 448 if "CHANNEL" in algorithm else largest.max() / 448
        values, meant = float8_numbers(weight, scales.expand_as(whole))
        tensors = {"weight": values, "weight_scale": scales, "input_scale": torch.tensor(0.01)}
        return Stored(tensors, meant)

    group = {"weights": {"group_size": 16, "num_bits": 4}, "targets": ["Linear"]}
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "config_groups": {"group_0": group} if "NVFP4" in algorithm else {},
        "producer": {"name": "modelopt", "version": "0.40"},
    }
    return Format({**config, **settings}, nvfp4 if "NVFP4" in algorithm else fp8)
