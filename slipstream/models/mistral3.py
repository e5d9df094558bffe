"""Mistral Small 3.1 and Ministral 3 with pictures, whose language models are served."""

from slipstream.models import ministral3, mistral
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model alone; what reads pictures is left out."""
    if reader.take("model_type", str) == "ministral3":
        return ministral3.decoder_config(reader, architecture)
    return mistral.decoder_config(reader, architecture)
