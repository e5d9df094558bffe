"""Qwen3.5, 3.6 and 3.8 with mixtures of experts in all layers."""

from dataclasses import replace

from slipstream.models.config_keys import read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.delta_keys import DELTA_DEFAULTS, read_experts, read_hybrid
from slipstream.models.expert_keys import read_softmax_routing


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model alone; weights of the chosen experts add up to one."""
    reader.expect("model_type", "qwen3_5_moe_text")
    reader.expect("norm_topk_prob", True)
    defaults = replace(DELTA_DEFAULTS, intermediate_size=1)  # of dense parts, of which none is used
    common = read_common(reader, architecture, defaults)
    experts = read_experts(reader, read_softmax_routing(reader, "num_experts", normalised=True))
    return read_hybrid(reader, common, [experts] * common.num_layers)
