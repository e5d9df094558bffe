"""Granite (dense), which scales embeddings, residual additions, attention scores and logits."""

from dataclasses import replace

from slipstream.layers.parameters import require_positive
from slipstream.models.config_keys import Defaults, read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The network's residual stream is the original one divided by the residual multiplier m, so
    that layers need no multiplication; norms are unchanged if their eps is divided by m^2.
    """
    reader.expect("model_type", "granite")
    common = read_common(reader, architecture, Defaults(max_position_embeddings=2048))
    names = ("embedding", "residual", "attention")
    of_embeddings, of_addends, of_scores = (
        reader.take(f"{name}_multiplier", float, 1.0) for name in names
    )
    divisor = reader.take("logits_scaling", float, 1.0)
    require_positive(residual_multiplier=of_addends, logits_scaling=divisor)
    common = replace(common, norms=replace(common.norms, eps=common.norms.eps / of_addends**2))
    bias = reader.take("attention_bias", bool, False)
    attention = replace(common.attention, qkv_bias=bias, output_bias=bias, scale=of_scores)
    feed_forward = replace(common.feed_forward, bias=reader.take("mlp_bias", bool, False))
    return replace(
        common.decoder(attention, feed_forwards=[feed_forward] * common.num_layers),
        embedding_scale=of_embeddings / of_addends,
        embedding_scale_rounded=False,
        stream_scale=of_addends,
        logit_scale=1.0 / divisor,
    )
