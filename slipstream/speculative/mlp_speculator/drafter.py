"""`mlp_speculator`: a small recurrent network on the target's last hidden state (Wertheimer et al.
2024), whose steps see the tokens that were guessed before.
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
from slipstream.speculative.mlp_speculator.network import (
    MLPSpeculatorCheckpoint,
    load_mlp_speculator,
    read_mlp_speculator_config,
    require_fit,
)
from slipstream.speculative.options import Options, TargetModel

METHOD = "mlp_speculator"


def read_options(options: Options) -> HeadOptions:
    """Nothing beside what every head takes."""
    return read_head_options(options, METHOD)


def describe(checkpoint: HeadCheckpoint) -> HeadFacts:
    """Without its weights."""
    config = read_mlp_speculator_config(checkpoint)

    def problems(target: DecoderConfig) -> list[str]:
        try:
            require_fit(config, target.hidden_size, target.vocab_size)
        except CheckpointError as error:
            return [str(error)]
        return []

    sizes = {"hidden_size": config.emb_dim, "vocab_size": config.vocab_size}
    return HeadFacts(None, FEATURES, problems, config.n_predict, sizes)


def load(config: HeadOptions, target: TargetModel) -> LoadedHeads:
    """The network, checked against the target."""
    checkpoint = MLPSpeculatorCheckpoint(open_head(config, METHOD).path)
    shape, network_config = target_config(target), read_mlp_speculator_config(checkpoint)
    require_fit(network_config, shape.hidden_size, shape.vocab_size)
    network = load_mlp_speculator(checkpoint, network_config, load_options(config, target))
    return LoadedHeads(config, network, shape)
