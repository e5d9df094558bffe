"""The keys of config.json that families with mixtures of experts share."""

from slipstream.kernels.experts import Routing, Scores
from slipstream.layers.experts import ExpertsSpec
from slipstream.layers.parameters import require_positive
from slipstream.models.config_reader import ConfigReader


def read_softmax_routing(reader: ConfigReader, experts_key: str, normalised: bool) -> Routing:
    """Routing by probabilities over all experts.

    Args:
        experts_key: the family's name for the number of experts; transformers 5 writes
            `num_local_experts` as well.
        normalised: what a missing `norm_topk_prob` means.
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
    """Experts chosen by corrected scores, and one that every row passes.

    Args:
        scale: what a missing `routed_scaling_factor` means.
        groups: what missing `n_group` and `topk_group` mean.
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


def read_sparse_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Per layer whether it has experts, as Qwen has it: every n-th, but for those on a list."""
    step = reader.take("decoder_sparse_step", int, 1)
    require_positive(decoder_sparse_step=step)
    dense = reader.take("mlp_only_layers", list, [])
    if not all(type(layer) is int for layer in dense):
        raise reader.error("mlp_only_layers", f"must be a list of layers, not {dense}")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
