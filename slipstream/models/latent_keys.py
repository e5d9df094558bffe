"""The keys of config.json that families with latent attention share."""

from dataclasses import replace

from slipstream.layers.experts import ExpertsSpec
from slipstream.layers.latent_attention import LatentAttentionSpec
from slipstream.models.config_keys import CommonKeys
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def read_latent_attention(reader: ConfigReader, common: CommonKeys) -> LatentAttentionSpec:
    """Latent attention without biases; its heads have no keys and values of their own to count."""
    reader.expect("attention_bias", False)
    reader.expect("rope_interleave", True)
    spec = LatentAttentionSpec(
        num_heads=common.attention.num_heads,
        rank=reader.take("kv_lora_rank", int),
        plain_dim=reader.take("qk_nope_head_dim", int),
        rotary_dim=reader.take("qk_rope_head_dim", int),
        value_dim=reader.take("v_head_dim", int),
        query_rank=reader.take_optional("q_lora_rank", int),
        # A share of a head that turns is that of both parts of it.
        rope=replace(common.attention.rope, rotated=1.0),
    )
    reader.expect("qk_head_dim", spec.plain_dim + spec.rotary_dim)
    return spec


def latent_decoder(
    reader: ConfigReader, common: CommonKeys, experts: ExpertsSpec, num_dense: int
) -> DecoderConfig:
    """A decoder whose first layers are dense.

    Args:
        num_dense: how many, where no key says so.
    """
    dense = _read_dense_layers(reader, common.num_layers, num_dense)
    attention = read_latent_attention(reader, common)
    return common.of_mixers(
        [attention] * common.num_layers,
        [common.feed_forward if is_dense else experts for is_dense in dense],
    )


def _read_dense_layers(reader: ConfigReader, num_layers: int, num_dense: int) -> list[bool]:
    """Per layer whether it is dense: a count, or from transformers 5 on the types of layers."""
    reader.expect("moe_layer_freq", 1)
    first = reader.take("first_k_dense_replace", int, num_dense)
    types = reader.take("mlp_layer_types", list, [])
    if not types:
        return [layer < first for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
        raise reader.error(
            "mlp_layer_types", f'must be "dense" or "sparse" for {num_layers} layers'
        )
    return [kind == "dense" for kind in types]
