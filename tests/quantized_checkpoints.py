"""Tiny checkpoints in the quantised formats of the field, packed word by word with numpy.

Nothing here comes from the package: every writer follows a description of its format, and says
what numbers it has stored.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import write_qwen3

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
Array = np.ndarray[Any, Any]


@dataclass
class Stored:
    """A module's tensors by suffix, and their dequantised weight in float32."""

    tensors: dict[str, Tensor]
    weight: Tensor


@dataclass
class Format:
    """How modules are stored, and how config.json describes it."""

    config: dict[str, Any]
    write: Callable[[Array], Stored]
    also_config: dict[str, Any] = field(default_factory=dict)


def write_quantized(
    folder: Path,
    style: Format,
    skip: tuple[str, ...] = ("lm_head",),
    seed: int = 0,
    fuse: bool = False,
    **changes: Any,
) -> dict[str, Tensor]:
    """A checkpoint whose linear modules are quantised, but for those with a name in `skip`.

    Args:
        fuse: query, key and value are one module, and gate and up another.

    Returns:
        All its weights as they are meant, float32; `write_whole` writes them.
    """
    write_qwen3(folder, seed=seed, **{**SIZES, **changes})
    tensors = load_file(folder / "model.safetensors")
    if fuse:
        for name in [name for name in tensors if "q_proj" in name or "gate_proj" in name]:
            one, letters, fused = (
                ("q", "kv", "qkv") if "q_" in name else ("gate", ["up"], "gate_up")
            )
            parts = [name, *(name.replace(f"{one}_", f"{letter}_") for letter in letters)]
            stacked = torch.cat([tensors.pop(part) for part in parts])
            tensors[name.replace(f"{one}_", f"{fused}_")] = stacked
    meant = dict(tensors)
    for name, weight in list(tensors.items()):
        module = name.removesuffix(".weight")
        is_linear = weight.dim() == 2 and "embed" not in name
        if not is_linear or any(part in module for part in skip):
            continue
        stored = style.write(weight.float().numpy())
        del tensors[name]
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in stored.tensors.items()}
        meant[name] = stored.weight
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=style.config, **style.also_config)
    return meant


def write_whole(folder: Path, like: Path, meant: dict[str, Tensor]) -> Path:
    """The unquantised checkpoint with the numbers of a quantised one."""
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in meant.items()}, folder / "model.safetensors"
    )
    config = json.loads((like / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def edit_tensors(folder: Path, **changes: Tensor | None) -> Path:
    """Replace, add or (None) remove tensors of a checkpoint."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


# Integers


def quantize(
    weight: Array, bits: int, group: int, symmetric: bool, scale_dtype: type = np.float16
) -> tuple[Array, Array, Array]:
    """(q [N, K] from 0 up, scales [N, G] float32, zeros [N, G])."""
    rows, columns = weight.shape
    levels, middle = 2**bits - 1, 2 ** (bits - 1)
    starts = range(0, columns, group)
    q = np.zeros((rows, columns), dtype=np.int64)
    scales = np.zeros((rows, len(starts)), dtype=np.float32)
    zeros = np.full((rows, len(starts)), middle, dtype=np.int64)
    for index, start in enumerate(starts):
        part = weight[:, start : start + group]
        if symmetric:
            scale = np.abs(part).max(1) / (middle - 1)
        else:
            scale = (part.max(1) - part.min(1)) / levels
        scales[:, index] = scale.astype(scale_dtype).astype(np.float32)
        if not symmetric:
            zeros[:, index] = np.clip(np.rint(-part.min(1) / scales[:, index]), 1, levels)
        values = np.rint(part / scales[:, index : index + 1]) + zeros[:, index : index + 1]
        q[:, start : start + group] = np.clip(values, 0, levels)
    return q, scales, zeros


def meant_by(q: Array, scales: Array, zeros: Array, group_of: Array) -> Tensor:
    difference = (q - zeros[:, group_of]).astype(np.float32)
    return torch.from_numpy(difference * scales[:, group_of])


def words(values: Array, bits: int, places: list[int] | None = None) -> Tensor:
    """[.., n] -> [.., n bits / 32] int32; place i of a word has number places[i] of its numbers."""
    in_word = 32 // bits
    order = places or list(range(in_word))
    padding = -values.shape[-1] % in_word
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)])
    grouped = values.reshape(*values.shape[:-1], -1, in_word)
    out = np.zeros(grouped.shape[:-1], dtype=np.uint64)
    for place, number in enumerate(order):
        out |= grouped[..., number].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())


def half(scales: Array) -> Tensor:
    return torch.from_numpy(scales).half()


def gptq(
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    version: str = "gptq",
    ordered: bool = False,
    with_bias: bool = False,
    **settings: Any,
) -> Format:
    def write(weight: Array) -> Stored:
        rows, columns = weight.shape
        size = columns if group == -1 else group
        order = np.random.default_rng(columns).permutation(columns) if ordered else None
        seen = weight if order is None else weight[:, order]
        q, scales, zeros = quantize(seen, bits, size, symmetric)
        group_of = np.arange(columns) // size
        if order is not None:
            back = np.argsort(order)
            q, group_of = q[:, back], group_of[back]
        stored_zeros = zeros - (1 if version == "gptq" else 0)
        tensors = {
            "qweight": words(q, bits).T.contiguous(),
            "qzeros": words(stored_zeros.T, bits),
            "scales": half(scales).T.contiguous(),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        if with_bias:
            tensors["bias"] = torch.zeros(rows, dtype=torch.float16)
        return Stored(tensors, meant_by(q, scales, zeros, group_of))

    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": ordered,
        "damp_percent": 0.1,
        "true_sequential": True,
        "lm_head": False,
    }
    if version != "gptq":
        config["checkpoint_format"] = version
    return Format({**config, **settings}, write)


def awq(group: int = 128, **settings: Any) -> Format:
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def write(weight: Array) -> Stored:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        q, scales, zeros = quantize(weight, 4, size, symmetric=False)
        tensors = {
            "qweight": words(q.T, 4, places),
            "qzeros": words(zeros.T, 4, places),
            "scales": half(scales).T.contiguous(),
        }
        return Stored(tensors, meant_by(q, scales, zeros, np.arange(columns) // size))

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return Format({**config, **settings}, write)


# compressed-tensors


def compressed(
    format: str,
    weights: dict[str, Any],
    activations: dict[str, Any] | None,
    write: Callable[[Array], Stored],
    **settings: Any,
) -> Format:
    group = {
        "weights": {"observer": "minmax", "observer_kwargs": {}, "dynamic": False, **weights},
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "version": "0.9.0",
        "config_groups": {"group_0": group},
    }
    return Format({**config, **settings}, write)


def packed_tensors(
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    actorder: str | None = None,
    **settings: Any,
) -> Format:
    def write(weight: Array) -> Stored:
        rows, columns = weight.shape
        size = columns if group == -1 else group
        ordered = actorder == "group"
        order = np.random.default_rng(columns).permutation(columns)
        q, scales, zeros = quantize(weight[:, order] if ordered else weight, bits, size, symmetric)
        group_of = np.arange(columns) // size
        tensors = {
            "weight_scale": torch.from_numpy(scales).half(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if ordered:
            back = np.argsort(order)
            q, group_of = q[:, back], group_of[back]
            tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        tensors["weight_packed"] = words(q, bits)
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return Stored(tensors, meant_by(q, scales, zeros, group_of))

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "actorder": actorder,
    }
    return compressed("pack-quantized", weights, None, write, **settings)


DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}


def int_tensors(
    strategy: str = "channel", activations: dict[str, Any] | None = None, **settings: Any
) -> Format:
    def write(weight: Array) -> Stored:
        if strategy == "channel":
            largest = np.abs(weight).max(1, keepdims=True)
        else:
            largest = np.abs(weight).max(keepdims=True).reshape(-1)
        scales = torch.from_numpy((largest / 127).astype(np.float32)).bfloat16()
        scale = scales.float().numpy()
        q = np.clip(np.rint(weight / scale), -128, 127)
        tensors = {"weight": torch.from_numpy(q.astype(np.int8)), "weight_scale": scales}
        return Stored(tensors, torch.from_numpy(q.astype(np.float32) * scale))

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy}
    inputs = activations and {**activations, "type": "int"}
    return compressed("int-quantized", weights, inputs, write, **settings)


# FP8


def float8_numbers(weight: Array, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3, the dequantised numbers) by a scale for each number."""
    values = (torch.from_numpy(weight) / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, values.float() * scale


def float_tensors(
    strategy: str = "channel", activations: dict[str, Any] | None = None, **settings: Any
) -> Format:
    def write(weight: Array) -> Stored:
        whole = torch.from_numpy(weight)
        if strategy == "block":
            scales = block_scales(whole, 64)
            each = spread(scales, 64, whole)
        else:
            largest = whole.abs().amax(1, keepdim=True)
            scales = (largest if strategy == "channel" else largest.max().view(1)) / 448
            each = scales.expand_as(whole)
        values, meant = float8_numbers(weight, each)
        return Stored({"weight": values, "weight_scale": scales}, meant)

    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [64, 64]
    inputs = activations and {**activations, "type": "float"}
    return compressed("float-quantized", weights, inputs, write, **settings)


def float8(
    block: int | None = 64, scheme: str = "dynamic", name: str | None = None, **settings: Any
) -> Format:
    def write(weight: Array) -> Stored:
        whole = torch.from_numpy(weight)
        if block is None:
            scales = whole.abs().max() / 448
            each = scales.expand_as(whole)
        else:
            scales = block_scales(whole, block)
            each = spread(scales, block, whole)
        values, meant = float8_numbers(weight, each)
        suffix = name or ("weight_scale" if block is None else "weight_scale_inv")
        tensors = {"weight": values, suffix: scales}
        if scheme == "static":
            tensors["input_scale"] = torch.tensor(0.01)
        return Stored(tensors, meant)

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": scheme,
        "weight_block_size": None if block is None else [block, block],
        "modules_to_not_convert": ["lm_head"],
    }
    return Format({**config, **settings}, write)


def block_scales(whole: Tensor, block: int) -> Tensor:
    """[N / block, K / block], rounded up, float32."""
    rows, columns = -(-whole.shape[0] // block), -(-whole.shape[1] // block)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = whole[row * block : (row + 1) * block, column * block : (column + 1) * block]
            scales[row, column] = part.abs().max() / 448
    return scales


def spread(scales: Tensor, block: int, whole: Tensor) -> Tensor:
    """A scale for each number of the whole."""
    rows = torch.arange(whole.shape[0]) // block
    columns = torch.arange(whole.shape[1]) // block
    return scales[rows][:, columns]
