"""`mtp`: the modules that a target was trained with to predict further than one token.

They lie in the target's own checkpoint, or in a folder of their own. One module drafts again and
again, each time on what it gave before. Several take turns: the first gives draft token 1, the
second draft token 2, and the last goes on alone. A row of a later module reads what the module
before gave for the token before; so every pass also runs the later modules over its rows, and what
they give is kept in the blocks, by slot, beside their keys and values.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import resolve_checkpoint
from slipstream.runner.rows import RowLayout
from slipstream.speculative.draft_model.draft_vocabulary import (
    DraftVocabularyConfig,
    choose_draft_vocabulary,
    read_draft_vocabulary,
)
from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.drafter import Drafter, DrafterResources, Needs
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import wrapped_num_tokens
from slipstream.speculative.heads.feature_rows import (
    FIRST_ROW,
    FeatureRowsDrafter,
    LoadedFeatureDrafter,
)
from slipstream.speculative.heads.options import (
    HeadFacts,
    HeadOptions,
    head_layout,
    head_limits,
    load_options,
    read_head_options,
    require_fit,
    require_shared_dtype,
    target_config,
)
from slipstream.speculative.mtp.checkpoint import MtpCheckpoint
from slipstream.speculative.mtp.config import mtp_problems, read_mtp_config
from slipstream.speculative.mtp.network import MtpHead, load_mtp
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.recognition import recognise

METHOD = "mtp"


@dataclass(frozen=True)
class MtpOptions:
    """How the modules are loaded and sampled.

    Attributes:
        vocabulary: the tokens to draft over; None is all.
    """

    head: HeadOptions
    vocabulary: DraftVocabularyConfig | None


def read_options(options: Options) -> MtpOptions:
    """What every head takes, and a draft vocabulary; without `model` the target's own checkpoint
    is read."""
    config = read_head_options(options, METHOD, of_target=True)
    if config.model is None and config.revision is not None:
        raise UsageError(
            "speculative_config: revision belongs to model, and without model the modules are "
            "those of the target's own checkpoint; leave it out"
        )
    return MtpOptions(config, read_draft_vocabulary(options))


def describe(checkpoint: HeadCheckpoint) -> HeadFacts:
    """Without its weights."""
    head = read_mtp_config(MtpCheckpoint(checkpoint.path))
    own = wrapped_num_tokens(checkpoint.config)
    return HeadFacts(head.layers, head.features, partial(mtp_problems, head), own)


def load(options: MtpOptions, target: TargetModel) -> LoadedFeatureDrafter:
    """Load the modules and check that they fit the target."""
    config = options.head
    checkpoint = _open(config, target)
    head, shape = read_mtp_config(checkpoint), target_config(target)
    require_fit(checkpoint, target, mtp_problems(head, shape))
    load = load_options(config, target)
    require_shared_dtype(head.parts, load.dtype, target)
    count, layout = len(head.modules), head_layout(head.layers, load.dtype)
    ids, num_ids = None, target.vocab_size
    if options.vocabulary is not None:
        chosen = choose_draft_vocabulary(options.vocabulary, target.path, num_ids)
        ids, num_ids = torch.tensor(chosen, device=load.device), len(chosen)
    return LoadedMtp(
        network=load_mtp(checkpoint, head, load, ids),
        sampling=DraftSampling(ids, num_ids, config.greedy_only),
        limits=head_limits(config, METHOD, checkpoint, target),
        needs=Needs(features=True),
        layout=replace(
            layout,
            extra_bytes_per_token=(count - 1) * head.layers.hidden_size * load.dtype.itemsize,
        ),
    )


def _open(config: HeadOptions, target: TargetModel) -> MtpCheckpoint:
    if config.model is None:
        return MtpCheckpoint(target.path)
    path = resolve_checkpoint(config.model, config.revision, pickled=True)
    checkpoint = MtpCheckpoint(path)
    kind = recognise(checkpoint.config, HeadCheckpoint(path).tensor_names)
    if kind != METHOD and not (checkpoint.is_whole_model and checkpoint.tensor_names):
        raise CheckpointError(
            f"{path} is no checkpoint for method {METHOD}: by its config.json and tensors it is "
            f"one for {kind}; leave method out, or choose another checkpoint"
        )
    return checkpoint


@dataclass(frozen=True, eq=False)
class LoadedMtp(LoadedFeatureDrafter):
    """The modules in memory, waiting for their share of the cache."""

    network: MtpHead

    def build(self, resources: DrafterResources) -> Drafter:
        if self.network.num_modules == 1:
            return super().build(resources)
        self.network.share(resources.target.embedding, resources.target.head)
        return ModulesDrafter(self, resources)


class ModulesDrafter(FeatureRowsDrafter):
    """Drafts with several modules.

    `_given[slot of a token, i]` is what module i gave for the row of that token, i counting from 0
    and without the last module, whom nobody follows. The last place takes what has no slot.
    """

    def __init__(self, loaded: LoadedMtp, resources: DrafterResources) -> None:
        super().__init__(loaded, resources)
        self._mtp = loaded.network
        shape = (
            resources.cache_sizes.num_blocks * self._state.block_size + 1,
            self._mtp.num_modules - 1,
            self._mtp.feature_size,
        )
        self._given = torch.zeros(shape, dtype=loaded.layout.dtype, device=self._state.device)

    def _pass(self, layout: RowLayout, features: Tensor, draft: int) -> tuple[Tensor, Tensor]:
        first, last = min(draft, self._mtp.num_modules - 1), self._mtp.num_modules - 1
        slots = layout.inputs.paging.slots
        places = torch.where(slots < 0, len(self._given) - 1, slots)
        before = self._place_before(layout)
        result = features
        for index in range(first, last + 1):
            # Rows before a module's first are computed with the others, and nobody sees them.
            first_seen = FIRST_ROW + index
            sees = replace(layout.inputs.sees, first_seen=first_seen)
            inputs = replace(layout.inputs, sees=sees)
            taken = features if index == first else self._given[before, index - 1]
            given = self._mtp.run(index, layout.token_ids, taken, inputs, self._cache.layers[index])
            means = (inputs.rows.positions >= first_seen).unsqueeze(1)
            given = torch.where(means, given, 0.0)
            if index < last:
                self._given[places, index] = given
            if index == first:
                result = given
        return result, result

    def _place_before(self, layout: RowLayout) -> Tensor:
        """[T] int64, the slot of the token before each row's."""
        inputs, size, request = layout.inputs, self._state.block_size, layout.request
        before = (inputs.rows.positions - 1).clamp_min(0)
        return inputs.paging.block_tables[request, before // size].long() * size + before % size
