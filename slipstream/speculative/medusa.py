"""`medusa`: heads on the target's last hidden state (Cai et al. 2024).

They guess all tokens at once. One token of each head makes a chain of guesses; there is no tree.
"""

from collections.abc import Collection, Mapping
from typing import Any

from slipstream.models.drafters.medusa import load_medusa
from slipstream.models.drafters.medusa_checkpoint import names_medusa
from slipstream.speculative.last_hidden import (
    HeadsConfig,
    LoadedHeads,
    open_heads,
    read_heads_options,
)
from slipstream.speculative.options import Options, TargetModel


def recognises(config: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
    """Whether a checkpoint is of this kind, by its config.json and the names in its files."""
    return names_medusa(config, tensor_names)


def read_options(options: Options) -> HeadsConfig:
    """As for every drafter that reads one hidden state."""
    return read_heads_options(options, "medusa")


def load(config: HeadsConfig, target: TargetModel) -> LoadedHeads:
    """The heads, checked against the target."""
    checkpoint, shape, options = open_heads(config, target)
    network = load_medusa(checkpoint, shape.hidden_size, shape.vocab_size, options)
    return LoadedHeads(config, network, shape)
