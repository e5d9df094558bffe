"""The language models of InternVL 3 and 3.5, in the form that transformers has of them (-HF)."""

from dataclasses import replace

from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.gpt_oss import decoder_config as gpt_oss
from slipstream.models.llama import llama
from slipstream.models.qwen import qwen2, qwen3, qwen3_moe

_LANGUAGES = {
    "gpt_oss": (gpt_oss, "GptOssForCausalLM"),
    "llama": (llama, "LlamaForCausalLM"),
    "qwen2": (qwen2, "Qwen2ForCausalLM"),
    "qwen3": (qwen3, "Qwen3ForCausalLM"),
    "qwen3_moe": (qwen3_moe, "Qwen3MoeForCausalLM"),
}


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    kind = reader.take("model_type", str, "qwen2")
    if kind not in _LANGUAGES:
        raise reader.error("model_type", f"is {kind!r}, not one of {', '.join(_LANGUAGES)}")
    read, name = _LANGUAGES[kind]
    return replace(read(reader, name), architecture=architecture)
