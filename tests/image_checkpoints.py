"""Tiny random models that see images, written by transformers itself."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

from tests.tokenizers import write_tokenizer

VOCAB_SIZE, IMAGE, START, END = 97, 90, 92, 93
ROW_END, IMAGE_END = 12, 13  # of Mistral 3
SIZES = ((37, 53), (20, 90), (64, 64), (7, 5))
MAX_POSITIONS = 512
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


_QWEN2_TEXT: dict[str, Any] = {
    **{key: value for key, value in _TEXT.items() if key != "head_dim"},
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
_GEMMA4_TEXT: dict[str, Any] = {
    **_TEXT,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 10,
    "global_head_dim": 24,
    "final_logit_softcapping": 20.0,
    "pad_token_id": 5,
}
_GEMMA4_IDS: dict[str, Any] = {
    "boi_token_id": START,
    "eoi_token_id": END,
    "image_token_id": IMAGE,
    "video_token_id": VOCAB_SIZE + 1,  # those of a text would read the token that pads
    "audio_token_id": VOCAB_SIZE + 2,
}


def qwen2_vl() -> Any:
    """A config: sections of positions in order."""
    vision = {
        "depth": 2,
        "embed_dim": 24,
        "hidden_size": 48,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return transformers.Qwen2VLConfig(text_config=_QWEN2_TEXT, vision_config=vision, **_IDS)


def qwen2_5_vl() -> Any:
    """A config: sections of positions in order, and a tower with windows of 2 x 2 tokens."""
    vision: dict[str, Any] = {**_VISION}
    del vision["num_position_embeddings"]
    vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(text_config=_QWEN2_TEXT, vision_config=vision, **_IDS)


def qwen3_vl() -> Any:
    """A config: four layers, of which two get features of the tower's layers."""
    rope = {**_ROPE, "mrope_section": [4, 2, 2]}
    return transformers.Qwen3VLConfig(
        text_config={**_TEXT, "num_hidden_layers": 4, "rope_parameters": rope},
        vision_config={**_VISION, "deepstack_visual_indexes": [0, 2]},
        **_IDS,
    )


def qwen3_vl_moe() -> Any:
    """A config: experts in three layers of four, of which one gets features of the tower."""
    rope = {**_ROPE, "mrope_section": [4, 2, 2]}
    text = {**_TEXT, "num_hidden_layers": 4, "rope_parameters": rope, "mlp_only_layers": [1]}
    return transformers.Qwen3VLMoeConfig(
        text_config={**text, **_EXPERTS},
        vision_config={**_VISION, "deepstack_visual_indexes": [0, 2]},
        **_IDS,
    )


def qwen3_5() -> Any:
    """A config: states in two layers of four."""
    return _qwen3_5(transformers.Qwen3_5Config, {})


def qwen3_5_moe() -> Any:
    """A config: states in two layers of four, and experts in all."""
    text = {**_EXPERTS, "shared_expert_intermediate_size": 20}
    return _qwen3_5(transformers.Qwen3_5MoeConfig, text)


def _qwen3_5(kind: Any, experts: dict[str, Any]) -> Any:
    rope = {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    kinds = ["linear_attention", "full_attention"] * 2
    text = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "layer_types": kinds,
        "num_hidden_layers": 4,
        "rope_parameters": rope,
    }
    return kind(text_config={**_TEXT, **text, **experts}, vision_config=_VISION, **_IDS)


def mistral3() -> Any:
    """A config: images with a token at the end of each row, features of two layers of the tower."""
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 12,
        "image_size": 64,
        "patch_size": 4,
    }
    return transformers.Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral", "num_hidden_layers": 4, "sliding_window": 9},
        vision_config={"model_type": "pixtral", **vision},
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )


def internvl() -> Any:
    """A config: tiles of 4 tokens, and a language model of Qwen3."""
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [16, 16],
        "patch_size": [4, 4],
    }
    return transformers.InternVLConfig(
        text_config={**_TEXT, "model_type": "qwen3", "num_hidden_layers": 4},
        vision_config=vision,
        image_token_id=IMAGE,
        image_seq_length=4,
    )


def gemma3() -> Any:
    """A config: images of 4 x 4 tokens, windows shorter than an image."""
    text = {**_TEXT, "num_hidden_layers": 4, "sliding_window": 10, "query_pre_attn_scalar": 16}
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
        "vision_use_head": False,
    }
    return transformers.Gemma3Config(
        text_config={**text, "layer_types": kinds},
        vision_config=vision,
        mm_tokens_per_image=16,
        boi_token_index=START,
        eoi_token_index=END,
        image_token_index=IMAGE,
    )


def gemma4() -> Any:
    """A config: windows shorter than an image, in which its tokens see each other, and a part that
    hears."""
    audio: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [4, 2],
        "output_proj_dims": 12,
    }
    text = {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0,
    }
    vision = {"use_clipped_linears": True, "standardize": True}
    return _gemma4(text, vision, transformers.Gemma4AudioConfig(**audio))


def gemma4_e() -> Any:
    """A config in the manner of E2B: inputs of single layers, shared caches, causal images."""
    text = {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "use_double_wide_mlp": True,
    }
    return _gemma4(text, {}, None)


def gemma4_unified() -> Any:
    """A config: no tower, and images whose tokens see each other in all layers."""
    text = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "sliding_window": 72}
    vision = {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 20, "output_proj_dims": 20}
    return transformers.Gemma4UnifiedConfig(
        text_config={**_GEMMA4_TEXT, **text},
        vision_config={**vision, "mm_posemb_size": 80},
        audio_config=None,
        **_GEMMA4_IDS,
    )


def _gemma4(text: dict[str, Any], vision: dict[str, Any], audio: Any) -> Any:
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 160,
    }
    return transformers.Gemma4Config(
        text_config={**_GEMMA4_TEXT, **text},
        vision_config={**sizes, **vision},
        audio_config=audio,
        **_GEMMA4_IDS,
    )


_CONFIGS = {
    "Qwen2VL": qwen2_vl,
    "Qwen2_5_VL": qwen2_5_vl,
    "Qwen3VL": qwen3_vl,
    "Qwen3VLMoe": qwen3_vl_moe,
    "Qwen3_5": qwen3_5,
    "Qwen3_5Moe": qwen3_5_moe,
    "Mistral3": mistral3,
    "InternVL": internvl,
    "Gemma3": gemma3,
    "Gemma4": gemma4,
    "Gemma4-E": gemma4_e,
    "Gemma4Unified": gemma4_unified,
}
FAMILIES = tuple(_CONFIGS)


def model_class(family: str) -> Any:
    """The class of transformers for a family."""
    return getattr(transformers, f"{family.split('-')[0]}ForConditionalGeneration")


def write(folder: Path, family: str = "Qwen3VL", seed: int = 1) -> Path:
    """A checkpoint of a family with its image processor."""
    config = _CONFIGS[family]()
    model = model_class(family)(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or ".norm" in name:
                centred = (
                    family in ("Qwen3_5", "Qwen3_5Moe", "Gemma3")
                    and "language_model" in name
                    and ".linear_attn." not in name
                )
                parameter.uniform_(0.5 - centred, 1.5 - centred, generator=generator)
            elif name.endswith("A_log"):
                parameter.uniform_(-4.0, 0.0, generator=generator)
            else:
                parameter.normal_(std=0.2 if parameter.ndim > 1 else 0.1, generator=generator)
        _fill_buffers(model, generator)
    model.save_pretrained(folder)
    if family == "Qwen3VLMoe":
        _transpose_experts(folder, "layers.0.")
    processor(family).save_pretrained(folder)
    if family == "InternVL":
        named = {str(START): {"content": "<img>"}, str(END): {"content": "</img>"}}
        told = json.dumps({"added_tokens_decoder": named})
        (folder / "tokenizer_config.json").write_text(told)
    return folder


def _transpose_experts(folder: Path, layer: str) -> None:
    """Store the experts of a layer as published checkpoints have them."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if f"{layer}mlp.experts" in name:
            weights[name] = tensor.transpose(1, 2).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_text_of(folder: Path, into: Path) -> Path:
    """The language model of a checkpoint of Gemma 4, as one that is text alone."""
    from safetensors.torch import load_file, save_file

    into.mkdir()
    config = json.loads((folder / "config.json").read_text())["text_config"]
    named = {**config, "architectures": ["Gemma4ForCausalLM"]}
    (into / "config.json").write_text(json.dumps(named))
    whole, prefix = load_file(folder / "model.safetensors"), "model.language_model."
    own = {name.replace(prefix, "model."): it for name, it in whole.items() if prefix in name}
    save_file(own, into / "model.safetensors", metadata={"format": "pt"})
    return into


def _fill_buffers(model: Any, generator: torch.Generator) -> None:
    """Fill the stored buffers: bounds that clamp, and scales of layers and of the tower."""
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_(-0.6 if name.endswith("_min") else 0.7)
        elif name.endswith(("std_scale", "std_bias", "layer_scalar")):
            buffer.uniform_(0.4, 1.2, generator=generator)


def processor(family: str) -> Any:
    if family.startswith("Gemma4"):
        return transformers.Gemma4ImageProcessorPil(
            patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
        )
    if family == "Gemma3":
        return transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    if family == "InternVL":
        return transformers.GotOcr2ImageProcessorPil(size={"height": 16, "width": 16})
    if family == "Mistral3":
        return transformers.PixtralImageProcessorPil(
            patch_size={"height": 4, "width": 4}, size={"longest_edge": 64}
        )
    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"shortest_edge": 64, "longest_edge": 4096}
    return transformers.Qwen2VLImageProcessorPil(**sizes, size=limits)


def images(count: int, seed: int = 0) -> list[Image.Image]:
    """Noise of odd sizes."""
    random = np.random.default_rng(seed)
    return [
        Image.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8))
        for size in SIZES[:count]
    ]


def prompt(count: int, num_after: int = 5) -> list[int]:
    """A prompt with this number of images in and between texts."""
    ids = [1, 2, 3]
    for number in range(count):
        ids += [START, IMAGE, END, *range(4 + number, 4 + 3 * number)]
    return [*ids, *range(20, 20 + num_after)]


def with_images(ids: Sequence[int], given: Sequence[Image.Image]) -> Any:
    return {"prompt_token_ids": list(ids), "multi_modal_data": {"image": list(given)}}


class Oracle:
    """The library's own processor and model."""

    def __init__(self, folder: Path, family: str = "Qwen3VL") -> None:
        self._model = model_class(family).from_pretrained(folder, dtype=torch.float32).eval()
        self._processor, self._family = processor(family), family
        if family == "Gemma4Unified":  # its own, of torchvision, merges patches to larger ones
            self._processor.patch_size, self._processor.pooling_kernel_size = 8, 1
        if family == "Mistral3":  # so does its processor
            self._processor.patch_size = {"height": 8, "width": 8}

    def generate(
        self, ids: Sequence[int], given: Sequence[Image.Image], count: int
    ) -> tuple[list[int], Tensor]:
        """Greedy tokens, and the logits [count, vocab] that they come from."""
        cuts = {"crop_to_patches": True} if self._family == "InternVL" else {}
        read = dict(self._processor(images=list(given), return_tensors="pt", **cuts))
        kinds: str | None = "mm_token_type_ids"
        if self._family == "Mistral3":
            grids, kinds = (read["image_sizes"] // 8).tolist(), None
            rows = [([*[IMAGE] * wide, ROW_END] * high)[:-1] for high, wide in grids]
            spelled = iter([[*row, IMAGE_END] for row in rows])
        else:
            if self._family == "InternVL":
                sizes, kinds = [4 * it for it in read.pop("num_patches").tolist()], None
            elif self._family == "Gemma3":
                sizes, kinds = [16] * len(given), "token_type_ids"
                read.pop("num_crops", None)
            elif self._family.startswith("Gemma4"):
                sizes = read.pop("num_soft_tokens_per_image")
            else:
                sizes = (read["image_grid_thw"].prod(-1) // 4).tolist()
            spelled = iter([[IMAGE] * size for size in sizes])
        whole = [it for known in ids for it in (next(spelled) if known == IMAGE else [known])]
        inputs = torch.tensor([whole])
        found = self._model.generate(
            input_ids=inputs,
            **({} if kinds is None else {kinds: (inputs == IMAGE).int()}),
            **read,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=count,
            do_sample=False,
            suppress_tokens=[IMAGE],  # which Gemma 4 would read as the token that pads
            return_dict_in_generate=True,
            output_logits=True,
        )
        return found.sequences[0, len(whole) :].tolist(), torch.cat(found.logits)


def write_tokenizer_of(folder: Path) -> Path:
    """A tokenizer of words and a chat template beside a checkpoint."""
    named = {IMAGE: "<image>", START: "<start>", END: "<end>"}
    words = [named.get(number, f"w{number}") for number in range(VOCAB_SIZE)]
    fields = {"single_word": False, "lstrip": True, "rstrip": True, "normalized": False}
    added = [{"id": it, "content": word, "special": True, **fields} for it, word in named.items()]
    write_tokenizer(folder, words, added_tokens=added, pre_tokenizer={"type": "WhitespaceSplit"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


TEMPLATE = """
{%- for message in messages %}w1 {% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{% if part.type == "image" %}<start><image><end>
{%- else %} {{ part.text }}{% endif %}{% endfor %}{% endif %} w2 {% endfor %}w3"""
