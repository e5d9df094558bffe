"""A Qwen3 checkpoint as a GGUF file of llama.cpp, without its tokenizer.

Matrices go over as they are (bf16); `llama.py` has the library round them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Bits = np.ndarray[Any, np.dtype[np.uint16]]  # of numbers in bf16

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
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Path, file: Path) -> None:
    """Convert a checkpoint of Qwen3 in bf16; ValueError for any other."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise ValueError(f"only qwen3 is converted to GGUF, not {config['model_type']}")
    partial = file.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3")
    _write_shape(writer, config)
    for name, numbers in _tensors(checkpoint):
        if name == "output.weight" and config["tie_word_embeddings"]:
            continue
        if numbers.ndim == 1:
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


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Bits]]:
    """All tensors under their names in GGUF."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        content = np.memmap(file, dtype=np.uint8, mode="r")
        length = int(content[:8].view(np.uint64)[0])
        header = json.loads(content[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] != "BF16":
                raise ValueError(f"{file}: {name} must be BF16, not {entry['dtype']}")
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            # The offsets may be odd, so that no array of two-byte numbers could begin there.
            bits = np.frombuffer(content[start:stop].tobytes(), dtype=np.uint16)
            yield _renamed(name), bits.reshape(entry["shape"])


def _float32(bits: Bits) -> Any:
    """The numbers whose upper halves in float32 are these."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _renamed(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.weight"
