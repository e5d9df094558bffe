"""A checkpoint of Qwen3, Qwen3.5 or gpt-oss as a GGUF file of llama.cpp, without its tokenizer.

Matrices go over as they are (bf16, or MXFP4 of fused experts); `llama.py` has the library round
them. Sources: https://github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `ggml-common.h`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Bits = np.ndarray[Any, np.dtype[np.uint16]]  # of numbers in bf16
Array = np.ndarray[Any, Any]  # of those, or of bytes

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
}
_OF_QWEN3_5 = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_OF_GPT_OSS = {"post_attention_layernorm": "post_attention_norm"}
_WHOLE_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
_EXPERTS = "mlp.experts."
_OF_FAMILY = {"gpt_oss": _OF_GPT_OSS, "qwen3_5_text": _OF_QWEN3_5}
_ARCHITECTURES = {"qwen3": "qwen3", "gpt_oss": "gpt-oss", "qwen3_5_text": "qwen35"}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Path, file: Path) -> None:
    """Convert a checkpoint; ValueError for any that is not of these families."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in _ARCHITECTURES:
        raise ValueError(f"{config['model_type']} is not converted to GGUF")
    partial = file.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, _ARCHITECTURES[config["model_type"]])
    _write_shape(writer, config)
    if config["model_type"] == "gpt_oss":
        _write_experts(writer, config)
    if config["model_type"] == "qwen3_5_text":
        _write_states(writer, config)
    for name, numbers in _renamed_tensors(checkpoint, config["model_type"]):
        if name == "output.weight" and config["tie_word_embeddings"]:
            continue
        if numbers.dtype == np.uint8:
            writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        elif numbers.dtype == np.float32:
            writer.add_tensor(name, numbers)
        elif numbers.ndim == 1 or name.endswith(".bias"):
            writer.add_tensor(name, _float32(numbers))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, numbers.view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(file)


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("checkpoint")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")  # token ids are all that is asked
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])


def _write_experts(writer: Any, config: dict[str, Any]) -> None:
    scaling = config["rope_scaling"]
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _write_states(writer: Any, config: dict[str, Any]) -> None:
    """Write the sizes of gated delta nets, three to one layer of attention."""
    heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    if (config["linear_num_key_heads"], config["linear_key_head_dim"]) != (heads, dim):
        raise ValueError(
            "delta nets whose key heads are others than their value heads' are not "
            "converted to GGUF"
        )
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(dim)
    writer.add_ssm_group_count(heads)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * dim)
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])  # alike where there is text alone


def _as_wanted(name: str, numbers: Array) -> Array:
    """A tensor of Qwen3.5 as llama.cpp has it: norms that multiply by 1 + w are w here, rates of
    decay are logarithms, and taps are in float32."""
    if name.endswith("A_log"):
        return np.asarray(-np.exp(_float32(numbers)))
    if name.endswith("conv1d.weight"):
        return np.asarray(_float32(numbers)).reshape(len(numbers), -1)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return np.asarray(_float32(numbers) + 1)
    return numbers


def _renamed_tensors(checkpoint: Path, family: str) -> Iterator[tuple[str, Array]]:
    """All tensors under their names in GGUF."""
    names = {**_LAYER, **_OF_FAMILY.get(family, {})}
    scales = {name: numbers for name, numbers in _tensors(checkpoint) if name.endswith("_scales")}
    for name, numbers in _tensors(checkpoint):
        if f".{_EXPERTS}" in name:
            if not name.endswith("_scales"):
                yield from _experts(name, numbers, scales)
            continue
        if family == "qwen3_5_text":
            numbers = _as_wanted(name, numbers)
        stem, _, ending = name.rpartition(".")
        if stem in _OUTSIDE:
            yield f"{_OUTSIDE[stem]}.{ending}", numbers
            continue
        _, _, layer, rest = name.split(".", 3)
        own = _WHOLE_NAMES.get(rest) or f"{names[rest.rpartition('.')[0]]}.{ending}"
        yield f"blk.{layer}.{own}", numbers


def _experts(name: str, numbers: Array, scales: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """A fused tensor of all experts [E, ...]; gate and up, whose rows take turns, apart."""
    layer, tensor = name.split(".")[2], name.rpartition(".")[2]
    matrix, ending = tensor, "weight"
    if tensor.endswith("_bias"):
        matrix, ending = tensor.removesuffix("_bias"), "bias"
    elif tensor.endswith("_blocks"):
        matrix = tensor.removesuffix("_blocks")
        numbers = _mxfp4(numbers, scales[name.removesuffix("_blocks") + "_scales"])
    else:
        numbers = numbers.transpose(0, 2, 1)  # bf16 is there by columns
    parts = {"down": numbers}
    if matrix == "gate_up_proj":
        parts = {"gate": numbers[:, 0::2], "up": numbers[:, 1::2]}
    for part, rows in parts.items():
        yield f"blk.{layer}.ffn_{part}_exps.{ending}", np.ascontiguousarray(rows)


def _mxfp4(blocks: Array, scales: Array) -> Array:
    """blocks [..., G, 16], pairs of neighbours, and scales [..., G] -> [..., 17 G]: a scale,
    then pairs of numbers that are 16 apart."""
    numbers = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
    pairs = numbers[..., :16] | numbers[..., 16:] << 4
    whole = np.concatenate([scales[..., None], pairs], -1)
    return whole.reshape(*scales.shape[:-1], -1)


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Array]]:
    """All tensors, bf16 or bytes, under their own names."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        content = np.memmap(file, dtype=np.uint8, mode="r")
        length = int(content[:8].view(np.uint64)[0])
        header = json.loads(content[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            kinds = {"BF16": np.uint16, "U8": np.uint8}
            if entry["dtype"] not in kinds:
                raise ValueError(f"{file}: {name} must be BF16 or U8, not {entry['dtype']}")
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            # The offsets may be odd, so that no array of two-byte numbers could begin there.
            bits = np.frombuffer(content[start:stop].tobytes(), dtype=kinds[entry["dtype"]])
            yield name, bits.reshape(entry["shape"])


def _float32(bits: Bits) -> Any:
    """The numbers whose upper halves in float32 are these."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
