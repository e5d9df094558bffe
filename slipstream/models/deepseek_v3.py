"""DeepSeek-V3, R1 and V3.1, and Kimi-K2: latent attention (MLA) and group-limited experts."""

from slipstream.models.config_keys import Defaults, read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.expert_keys import latent_decoder, read_corrected_experts


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """`head_dim`, if the config has it, is the size of a head's rotary part."""
    defaults = Defaults(max_position_embeddings=4096, head_dim=64, rotated=1.0)
    common = read_common(reader, architecture, defaults)
    experts = read_corrected_experts(reader, scale=2.5, groups=(8, 4))
    return latent_decoder(reader, common, experts, num_dense=3)
