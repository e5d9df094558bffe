"""Qwen3-Next: three gated delta nets to one layer of attention, and mixtures of experts."""

from slipstream.models.config_keys import read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.delta_keys import DELTA_DEFAULTS, read_experts, read_hybrid
from slipstream.models.expert_keys import read_softmax_routing, read_sparse_layers


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Its projections into the delta nets are packed by key head."""
    reader.expect("model_type", "qwen3_next")
    common = read_common(reader, architecture, DELTA_DEFAULTS)
    experts = read_experts(reader, read_softmax_routing(reader, "num_experts", normalised=True))
    sparse = read_sparse_layers(reader, common.num_layers)
    feed_forwards = [experts if has_experts else common.feed_forward for has_experts in sparse]
    return read_hybrid(reader, common, feed_forwards, packed=True)
