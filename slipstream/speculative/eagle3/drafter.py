"""`eagle3`: EAGLE-3 and EAGLE-3.1 heads, drafting in a chain."""

from functools import partial

from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.drafter import Needs
from slipstream.speculative.eagle3.config import (
    Eagle3Config,
    eagle3_problems,
    read_eagle3_config,
)
from slipstream.speculative.eagle3.network import load_eagle3
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import wrapped_num_tokens
from slipstream.speculative.heads.feature_rows import LoadedFeatureDrafter
from slipstream.speculative.heads.loading import read_draft_ids
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

METHOD = "eagle3"


def read_options(options: Options) -> HeadOptions:
    """Nothing beside what every head takes."""
    return read_head_options(options, METHOD)


def describe(checkpoint: HeadCheckpoint) -> HeadFacts:
    """Without its weights."""
    head = read_eagle3_config(checkpoint)
    return HeadFacts(
        head.layers,
        features_read(head),
        partial(eagle3_problems, head),
        wrapped_num_tokens(checkpoint.config),
    )


def features_read(head: Eagle3Config) -> str:
    """What it reads of the target, in words."""
    if not head.use_aux_hidden_state:
        return "the last hidden state, behind the final norm"
    layers = ", ".join(map(str, head.aux_layers or ("2", "n // 2", "n - 3")))
    return f"the residual streams that enter layers {layers}"


def load(config: HeadOptions, target: TargetModel) -> LoadedFeatureDrafter:
    """Load the head and check that it fits the target."""
    checkpoint = open_head(config, METHOD)
    head, shape = read_eagle3_config(checkpoint), target_config(target)
    require_fit(checkpoint, target, eagle3_problems(head, shape))
    load = load_options(config, target)
    require_shared_dtype(head.parts, load.dtype, target)
    ids = read_draft_ids(checkpoint, head.draft_vocab_size, target.vocab_size, load.device)
    return LoadedFeatureDrafter(
        network=load_eagle3(checkpoint, head, shape.hidden_size, load),
        sampling=DraftSampling(ids, head.draft_vocab_size, config.greedy_only),
        limits=head_limits(config, METHOD, checkpoint, target),
        needs=Needs(stream_layers=head.stream_layers(shape.num_layers), features=True),
        layout=head_layout(head.layers, load.dtype),
    )
