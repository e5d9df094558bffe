"""`medusa`: heads on the target's last hidden state (Cai et al. 2024).

They guess all tokens at once. One token of each head makes a chain of guesses; there is no tree.
"""

from slipstream.core.errors import CheckpointError
from slipstream.models.decoder_config import DecoderConfig
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.last_hidden import FEATURES, LoadedHeads
from slipstream.speculative.heads.options import (
    HeadFacts,
    HeadOptions,
    load_options,
    open_head,
    read_head_options,
    target_config,
)
from slipstream.speculative.medusa.checkpoint import MedusaCheckpoint, read_shape
from slipstream.speculative.medusa.network import load_medusa
from slipstream.speculative.options import Options, TargetModel

METHOD = "medusa"


def read_options(options: Options) -> HeadOptions:
    """Nothing beside what every head takes."""
    return read_head_options(options, METHOD)


def describe(checkpoint: HeadCheckpoint) -> HeadFacts:
    """Without its weights."""
    heads = MedusaCheckpoint(checkpoint.path)
    first = heads.entries.get("blocks.0.layers.0.weight") if heads.has_weights else None

    def problems(target: DecoderConfig) -> list[str]:
        try:
            if heads.has_weights:
                read_shape(heads, target.hidden_size, target.vocab_size)
        except CheckpointError as error:
            return [str(error)]
        return []

    sizes = {
        "hidden_size": None if first is None else first.shape[-1],
        "vocab_size": heads.num_rows() if heads.has_weights else None,
    }
    return HeadFacts(None, FEATURES, problems, heads.num_heads(), sizes)


def load(config: HeadOptions, target: TargetModel) -> LoadedHeads:
    """The heads, checked against the target."""
    checkpoint = MedusaCheckpoint(open_head(config, METHOD).path)
    shape = target_config(target)
    options = load_options(config, target)
    network = load_medusa(checkpoint, shape.hidden_size, shape.vocab_size, options)
    return LoadedHeads(config, network, shape)
