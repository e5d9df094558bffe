"""The supported architectures, and the function that reads a config of any of them."""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from slipstream.core.errors import CheckpointError
from slipstream.layers.parameters import InvalidSizesError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config_reader import HARMLESS_KEYS, ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.own_drafter import OWN_DRAFTER_KEYS
from slipstream.models.quantized.catalogue import QUANTIZATION_KEYS, read_quantization

# To add an architecture, write a function (`decoder_config` in its own file, or any name in its
# family's file) and add one line here.
ARCHITECTURES: Final = {
    "DeepseekV3ForCausalLM": "slipstream.models.deepseek_v3",
    "Exaone4ForCausalLM": "slipstream.models.llama:exaone4",
    "Gemma2ForCausalLM": "slipstream.models.gemma:gemma2",
    "Gemma3ForCausalLM": "slipstream.models.gemma:gemma3",
    "Gemma3ForConditionalGeneration": "slipstream.models.gemma:gemma3",
    "Gemma4ForCausalLM": "slipstream.models.gemma4",
    "Gemma4ForConditionalGeneration": "slipstream.models.gemma4",
    "Gemma4UnifiedForConditionalGeneration": "slipstream.models.gemma4",
    "Glm4ForCausalLM": "slipstream.models.glm:glm",
    "Glm4MoeForCausalLM": "slipstream.models.glm:glm4_moe",
    "Glm4MoeLiteForCausalLM": "slipstream.models.glm:glm4_moe_lite",
    "GlmForCausalLM": "slipstream.models.glm:glm",
    "GptOssForCausalLM": "slipstream.models.gpt_oss",
    "GraniteForCausalLM": "slipstream.models.llama:granite",
    "InternVLForConditionalGeneration": "slipstream.models.internvl",
    "LlamaForCausalLM": "slipstream.models.llama:llama",
    "MiMoForCausalLM": "slipstream.models.qwen:qwen2",
    "Ministral3ForCausalLM": "slipstream.models.mistral:ministral3",
    "Mistral3ForConditionalGeneration": "slipstream.models.mistral:mistral3",
    "MistralForCausalLM": "slipstream.models.mistral:mistral",
    "Mistral4ForCausalLM": "slipstream.models.mistral:mistral4",
    "MixtralForCausalLM": "slipstream.models.mistral:mixtral",
    "Olmo2ForCausalLM": "slipstream.models.llama:olmo2",
    "Olmo3ForCausalLM": "slipstream.models.llama:olmo2",
    "Phi3ForCausalLM": "slipstream.models.llama:phi3",
    "Qwen2ForCausalLM": "slipstream.models.qwen:qwen2",
    "Qwen2MoeForCausalLM": "slipstream.models.qwen:qwen2_moe",
    "Qwen2VLForConditionalGeneration": "slipstream.models.qwen:qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "slipstream.models.qwen:qwen2_vl",
    "Qwen3ForCausalLM": "slipstream.models.qwen:qwen3",
    "Qwen3MoeForCausalLM": "slipstream.models.qwen:qwen3_moe",
    "Qwen3NextForCausalLM": "slipstream.models.qwen:qwen3_next",
    "Qwen3VLForConditionalGeneration": "slipstream.models.qwen:qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "slipstream.models.qwen:qwen3_vl_moe",
    "Qwen3_5ForCausalLM": "slipstream.models.qwen:qwen3_5",
    "Qwen3_5ForConditionalGeneration": "slipstream.models.qwen:qwen3_5",
    "Qwen3_5MoeForCausalLM": "slipstream.models.qwen:qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "slipstream.models.qwen:qwen3_5_moe",
    "SeedOssForCausalLM": "slipstream.models.llama:seed_oss",
    "SmolLM3ForCausalLM": "slipstream.models.llama:smollm3",
    "Starcoder2ForCausalLM": "slipstream.models.llama:starcoder2",
}


def read_decoder_config(
    source: Checkpoint | Mapping[str, Any], read_elsewhere: Collection[str] = ()
) -> DecoderConfig:
    """Read the decoder config of a checkpoint, or of the content of a config.json.

    Args:
        read_elsewhere: keys that do not affect the network and are read by the caller.

    Raises:
        CheckpointError: an unsupported architecture, or a key that is missing, of the wrong type,
            unsupported or unknown.
    """
    harmless = HARMLESS_KEYS.union(read_elsewhere, OWN_DRAFTER_KEYS, QUANTIZATION_KEYS)
    if isinstance(source, Checkpoint):
        reader = ConfigReader(_with_dtype(source), source.config_file, harmless=harmless)
    else:
        reader = ConfigReader(source, "config.json", harmless=harmless)
    config = decoder_config(reader)
    reader.finish()
    read_quantization(source.config if isinstance(source, Checkpoint) else source, reader.file)
    if config.tie_word_embeddings and isinstance(source, Checkpoint) and source.has_own_head:
        return replace(config, tie_word_embeddings=False)
    return config


def decoder_config(reader: ConfigReader) -> DecoderConfig:
    """Read a decoder config from the reader's keys; the caller calls `finish`, and may take more
    keys before."""
    architecture = _architecture(reader)
    module, _, function = ARCHITECTURES[architecture].partition(":")
    found = getattr(importlib.import_module(module), function or "decoder_config")
    read = cast(Callable[[ConfigReader, str], DecoderConfig], found)
    try:
        return read(reader, architecture)
    except InvalidSizesError as error:
        raise CheckpointError(f"{reader.file}: {reader.named(str(error))}") from error


def _architecture(reader: ConfigReader) -> str:
    supported = f"supported are {', '.join(sorted(ARCHITECTURES))}"
    names = reader.take("architectures", list, [])
    if len(names) != 1 or not isinstance(names[0], str):
        raise reader.error("architectures", f"must name one architecture, not {names}; {supported}")
    if names[0] not in ARCHITECTURES:
        raise reader.error("architectures", f"names {names[0]}; {supported}")
    return names[0]


def _with_dtype(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The config; if it names no dtype, the dtype of the stored weights is added."""
    config = checkpoint.config
    if config.get("dtype") or config.get("torch_dtype") or checkpoint.weights_dtype is None:
        return config
    return {**config, "dtype": str(checkpoint.weights_dtype)}
