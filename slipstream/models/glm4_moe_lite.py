"""GLM-4.7-Flash: latent attention, and experts chosen by corrected scores."""

from slipstream.models.config_keys import Defaults, read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.expert_keys import read_corrected_experts
from slipstream.models.latent_keys import latent_decoder


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The first layer is dense."""
    reader.expect("model_type", "glm4_moe_lite")
    defaults = Defaults(max_position_embeddings=202752, head_dim=64, rms_norm_eps=1e-5, rotated=1.0)
    common = read_common(reader, architecture, defaults)
    experts = read_corrected_experts(reader, scale=1.8)
    return latent_decoder(reader, common, experts, num_dense=1)
