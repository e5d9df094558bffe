"""The config keys of hybrid models: gated delta nets and gated attention."""

from collections.abc import Sequence
from dataclasses import replace

from slipstream.kernels.experts import Routing
from slipstream.layers.delta_net import DeltaNetSpec
from slipstream.layers.experts import ExpertNames, ExpertsSpec
from slipstream.layers.layer import FeedForwardSpec
from slipstream.layers.parameters import require_positive
from slipstream.models.config_keys import CommonKeys, Defaults, read_biases, read_layer_types
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig

DELTA_DEFAULTS = Defaults(
    max_position_embeddings=32768, num_kv_heads=2, head_dim=256, rotated=0.25, sections=(11, 11, 10)
)
_LAYER_TYPES = {"linear_attention": True, "full_attention": False}


def read_hybrid(
    reader: ConfigReader,
    common: CommonKeys,
    feed_forwards: FeedForwardSpec | Sequence[FeedForwardSpec] | None = None,
    packed: bool = False,
) -> DecoderConfig:
    """Read a decoder in which every fourth layer, or those in `layer_types`, has attention, and the
    others gated delta nets. All norms are zero-centred, except those of the delta nets' outputs.

    Args:
        feed_forwards: feed-forward parts of the layers; None: all are dense.
        packed: see `DeltaNetSpec`.
    """
    reader.expect("attn_output_gate", True)
    reader.expect("mamba_ssm_dtype", "float32")
    if reader.take("output_gate_type", str, "silu") not in ("silu", "swish"):
        raise reader.error("output_gate_type", "must be silu; use another model")
    common = read_biases(reader, common)
    attention = replace(common.attention, qk_norm=True, gated=True)
    delta = DeltaNetSpec(
        num_key_heads=reader.take("linear_num_key_heads", int, 16),
        num_value_heads=reader.take("linear_num_value_heads", int, 32),
        key_dim=reader.take("linear_key_head_dim", int, 128),
        value_dim=reader.take("linear_value_head_dim", int, 128),
        num_taps=reader.take("linear_conv_kernel_dim", int, 4),
        packed=packed,
    )
    interval = reader.take("full_attention_interval", int, 4)
    require_positive(full_attention_interval=interval)
    usual = [bool((layer + 1) % interval) for layer in range(common.num_layers)]
    are_delta = read_layer_types(reader, common.num_layers, _LAYER_TYPES) or usual
    common = replace(common, norms=replace(common.norms, zero_centred=True))
    return common.with_mixers([delta if it else attention for it in are_delta], feed_forwards)


def read_experts(reader: ConfigReader, routing: Routing) -> ExpertsSpec:
    return ExpertsSpec(
        routing=routing,
        intermediate_size=reader.take("moe_intermediate_size", int),
        shared_size=reader.take("shared_expert_intermediate_size", int),
        shared_gate=True,
        names=ExpertNames(shared="mlp.shared_expert"),
    )
