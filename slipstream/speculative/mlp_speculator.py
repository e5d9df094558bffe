"""`mlp_speculator`: a small recurrent network on the target's last hidden state (Wertheimer et al.
2024), whose steps see the tokens that were guessed before.
"""

from collections.abc import Collection, Mapping
from typing import Any

from slipstream.models.drafters.mlp_speculator import (
    load_mlp_speculator,
    read_mlp_speculator_config,
    require_fit,
)
from slipstream.speculative.last_hidden import (
    HeadsConfig,
    LoadedHeads,
    open_heads,
    read_heads_options,
)
from slipstream.speculative.options import Options, TargetModel


def recognises(config: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
    """Whether a checkpoint is of this kind, by its config.json and the names in its files."""
    architectures = config.get("architectures") or []
    named = {str(it) for it in architectures} | {str(config.get("model_type"))}
    return "mlp_speculator" in named or "MLPSpeculatorPreTrainedModel" in named


def read_options(options: Options) -> HeadsConfig:
    """As for every drafter that reads one hidden state."""
    return read_heads_options(options, "mlp_speculator")


def load(config: HeadsConfig, target: TargetModel) -> LoadedHeads:
    """The network, checked against the target."""
    checkpoint, shape, options = open_heads(config, target)
    network_config = read_mlp_speculator_config(checkpoint)
    require_fit(network_config, shape.hidden_size, shape.vocab_size)
    return LoadedHeads(config, load_mlp_speculator(checkpoint, network_config, options), shape)
