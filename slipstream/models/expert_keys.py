"""The keys of config.json that families with mixtures of experts or latent attention share."""

from dataclasses import replace

from slipstream.kernels.experts import Routing, Scores
from slipstream.layers.experts import ExpertsSpec
from slipstream.layers.latent_attention import LatentAttentionSpec
from slipstream.layers.layer import FeedForwardSpec
from slipstream.layers.parameters import require_positive
from slipstream.models.config_keys import CommonKeys
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def read_softmax_routing(reader: ConfigReader, experts_key: str, normalised: bool) -> Routing:
    """Read routing by a softmax over all experts.

    Args:
        experts_key: the family's name for the number of experts; transformers 5 writes
            `num_local_experts` as well.
        normalised: value of a missing `norm_topk_prob`.
    """
    reader.expect("scoring_func", "softmax")
    return Routing(
        num_experts=reader.take_named((experts_key, "num_local_experts"), int),
        num_chosen=reader.take("num_experts_per_tok", int),
        scores=Scores.SOFTMAX,
        normalised=reader.take("norm_topk_prob", bool, normalised),
    )


def read_corrected_experts(
    reader: ConfigReader, scale: float = 1.0, groups: tuple[int, int] = (1, 1)
) -> ExpertsSpec:
    """Read experts that are chosen by corrected scores, and a shared expert.

    Args:
        scale: value of a missing `routed_scaling_factor`.
        groups: values of missing `n_group` and `topk_group`.
    """
    reader.expect("scoring_func", "sigmoid")
    reader.expect("topk_method", "noaux_tc")
    routing = Routing(
        num_experts=reader.take_named(("n_routed_experts", "num_local_experts"), int),
        num_chosen=reader.take("num_experts_per_tok", int),
        scores=Scores.SIGMOID,
        normalised=reader.take("norm_topk_prob", bool, True),
        scale=reader.take("routed_scaling_factor", float, scale),
        num_groups=reader.take("n_group", int, groups[0]),
        kept_groups=reader.take("topk_group", int, groups[1]),
    )
    inner = reader.take("moe_intermediate_size", int)
    shared = reader.take("n_shared_experts", int, 1)
    return ExpertsSpec(
        routing=routing, intermediate_size=inner, corrected=True, shared_size=shared * inner or None
    )


def read_sparse_layers(
    reader: ConfigReader, common: CommonKeys, experts: ExpertsSpec
) -> list[FeedForwardSpec]:
    """Read which layers have experts, by Qwen's keys: every n-th layer (`decoder_sparse_step`),
    except those in `mlp_only_layers`."""
    step = reader.take("decoder_sparse_step", int, 1)
    require_positive(decoder_sparse_step=step)
    dense = reader.take("mlp_only_layers", list, [])
    if not all(type(layer) is int for layer in dense):
        raise reader.error("mlp_only_layers", f"must be a list of layers, not {dense}")
    return [
        common.feed_forward if layer in dense or (layer + 1) % step else experts
        for layer in range(common.num_layers)
    ]


def read_latent_attention(reader: ConfigReader, common: CommonKeys) -> LatentAttentionSpec:
    """Read latent attention (MLA) without biases; `num_key_value_heads` has no effect on it."""
    reader.expect("attention_bias", False)
    reader.expect("rope_interleave", True)
    spec = LatentAttentionSpec(
        num_heads=common.attention.num_heads,
        rank=reader.take("kv_lora_rank", int),
        plain_dim=reader.take("qk_nope_head_dim", int),
        rotary_dim=reader.take("qk_rope_head_dim", int),
        value_dim=reader.take("v_head_dim", int),
        query_rank=reader.take_optional("q_lora_rank", int),
        # `partial_rotary_factor` is relative to both parts of a head together.
        rope=replace(common.attention.rope, rotated=1.0),
    )
    reader.expect("qk_head_dim", spec.plain_dim + spec.rotary_dim)
    return spec


def latent_decoder(
    reader: ConfigReader, common: CommonKeys, experts: ExpertsSpec, num_dense: int
) -> DecoderConfig:
    """A decoder with latent attention whose first layers are dense: `num_dense` if the config does
    not say how many."""
    dense = _read_dense_layers(reader, common.num_layers, num_dense)
    attention = read_latent_attention(reader, common)
    return common.with_mixers(
        [attention] * common.num_layers,
        [common.feed_forward if is_dense else experts for is_dense in dense],
    )


def _read_dense_layers(reader: ConfigReader, num_layers: int, num_dense: int) -> list[bool]:
    """Read whether each layer is dense: `first_k_dense_replace`, or `mlp_layer_types` since
    transformers 5."""
    reader.expect("moe_layer_freq", 1)
    first = reader.take("first_k_dense_replace", int, num_dense)
    types = reader.take("mlp_layer_types", list, [])
    if not types:
        return [layer < first for layer in range(num_layers)]
    if len(types) != num_layers or any(kind not in ("dense", "sparse") for kind in types):
        raise reader.error(
            "mlp_layer_types", f'must be "dense" or "sparse" for {num_layers} layers'
        )
    return [kind == "dense" for kind in types]
