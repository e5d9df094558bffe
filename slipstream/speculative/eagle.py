"""`eagle`: EAGLE-1 heads, and those of EAGLE-2, which are the same, drafting in a chain."""

from slipstream.models.drafters.eagle1 import eagle1_problems, load_eagle1, read_eagle1_config
from slipstream.speculative.drafter import Needs
from slipstream.speculative.feature_rows import DraftSampling, LoadedFeatureDrafter
from slipstream.speculative.head_options import (
    HeadOptions,
    head_layout,
    head_limits,
    load_options,
    open_head,
    read_head_options,
    require_fit,
    target_config,
)
from slipstream.speculative.options import Options, TargetModel

METHOD = "eagle"


def read_options(options: Options) -> HeadOptions:
    """Nothing beside what every head takes."""
    return read_head_options(options, METHOD)


def load(config: HeadOptions, target: TargetModel) -> LoadedFeatureDrafter:
    """Load the head and check that it fits the target."""
    checkpoint = open_head(config, METHOD)
    head = read_eagle1_config(checkpoint)
    require_fit(checkpoint, target, eagle1_problems(head, target_config(target)))
    load = load_options(config, target)
    return LoadedFeatureDrafter(
        network=load_eagle1(checkpoint, head, load),
        sampling=DraftSampling(None, target.vocab_size, config.greedy_only),
        limits=head_limits(config, METHOD, checkpoint, target),
        needs=Needs(features=True),
        layout=head_layout(head.layers, load.dtype),
    )
