"""`eagle`: EAGLE-1 heads, and those of EAGLE-2, which are the same, drafting in a chain."""

from functools import partial

from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.drafter import Needs
from slipstream.speculative.eagle.network import eagle1_problems, load_eagle1, read_eagle1_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import wrapped_num_tokens
from slipstream.speculative.heads.feature_rows import LoadedFeatureDrafter
from slipstream.speculative.heads.options import (
    HeadFacts,
    HeadOptions,
    head_layout,
    head_limits,
    load_options,
    open_head,
    read_head_options,
    require_fit,
    require_shared_dtype,
    target_config,
)
from slipstream.speculative.options import Options, TargetModel

METHOD = "eagle"


def read_options(options: Options) -> HeadOptions:
    """Nothing beside what every head takes."""
    return read_head_options(options, METHOD)


def describe(checkpoint: HeadCheckpoint) -> HeadFacts:
    """Without its weights."""
    head = read_eagle1_config(checkpoint)
    features = "the last hidden state, behind the final norm"
    return HeadFacts(
        head.layers,
        features,
        partial(eagle1_problems, head),
        wrapped_num_tokens(checkpoint.config),
    )


def load(config: HeadOptions, target: TargetModel) -> LoadedFeatureDrafter:
    """Load the head and check that it fits the target."""
    checkpoint = open_head(config, METHOD)
    head = read_eagle1_config(checkpoint)
    require_fit(checkpoint, target, eagle1_problems(head, target_config(target)))
    load = load_options(config, target)
    require_shared_dtype(head.parts, load.dtype, target)
    return LoadedFeatureDrafter(
        network=load_eagle1(checkpoint, head, load),
        sampling=DraftSampling(None, target.vocab_size, config.greedy_only),
        limits=head_limits(config, METHOD, checkpoint, target),
        needs=Needs(features=True),
        layout=head_layout(head.layers, load.dtype),
    )
