"""MTP modules (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2), trained with their target.

    x = projection[norm(embedding of token t), norm(feature of token t - 1)]
    x = layer(x)                                  a decoder layer of the target's kind
    y = norm(x)
    logits = lm_head(y)                           mostly the target's lm_head

The feature is the target's hidden state after its final norm; in a chain, y is the feature of the
next row. A second module predicts one token further: its feature for token t is the first module's
output at t - 1. Publishers differ in names, order and norms (`config.py`).

Modules are stored in the target's checkpoint or in their own directory. A single module drafts all
tokens, each from its previous output. With several modules the first drafts token 1, the second
token 2 and so on, and the last also all further tokens. Since a module reads the previous module's
outputs of earlier tokens, every pass also runs the later modules over its rows, and their outputs
are stored by slot in the blocks, with their keys and values.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.core.errors import CheckpointError
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import InputProjection, Norm
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.layers.layer import BuildContext
from slipstream.layers.linear import column_linear
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.layers.rope import RopeTables
from slipstream.layers.stack import Stack
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.speculative.drafter import Drafter, DrafterResources
from slipstream.speculative.heads.feature_rows import (
    FIRST_ROW,
    FeatureNetwork,
    FeatureRowsDrafter,
)
from slipstream.speculative.heads.loading import HeadContext, load_head
from slipstream.speculative.heads.method import Head, HeadMethod
from slipstream.speculative.model_options import ModelKeys
from slipstream.speculative.mtp.config import ModuleNames, MtpCheckpoint, MtpConfig, read_mtp_config


def load_mtp(
    checkpoint: MtpCheckpoint, config: MtpConfig, target: DecoderConfig, options: LoadOptions
) -> "MtpHead":
    copies, stored = _copies(checkpoint, config), checkpoint.quantization
    build = partial(MtpHead, config=config)
    return load_head(checkpoint, target, options, build, ignored=copies, stored=stored)


def _copies(checkpoint: MtpCheckpoint, config: MtpConfig) -> list[str]:
    """Redundant embeddings and lm_heads of later modules; CheckpointError if they differ."""
    found, first = [], config.modules[0]
    for names in config.modules[1:] if checkpoint.has_weights else ():
        for name, other in ((names.embedding, first.embedding), (names.head, first.head)):
            if name == other or f"{name}.weight" not in checkpoint.entries:
                continue
            if not checkpoint.holds_copy(f"{name}.weight", f"{other}.weight"):
                raise CheckpointError(
                    f"tensor {name}.weight in {checkpoint.path} is no copy of {other}.weight, and "
                    "modules with embeddings or heads of their own are not supported; keep the "
                    "first module only"
                )
            found.append(f"{name}.weight")
    return found


def _read_ends(
    source: ParameterSource, config: MtpConfig, names: ModuleNames
) -> tuple[InputProjection, Norm]:
    """What a module has before and after its decoder layer."""
    width, norms = config.layers.hidden_size, config.norms
    embedding = norms.load(source, names.embedding_norm, width)
    feature = norms.load(source, names.feature_norm, width)
    projection = column_linear(source, [Part(names.projection, width)], 2 * width, False)
    last = norms.load(source, names.final_norm, width)
    both = (feature, embedding) if config.style.feature_first else (embedding, feature)
    return InputProjection(projection.product, both), last


class MtpHead(FeatureNetwork):
    """Maps token ids and features to the lm_head's input, which is also the next feature."""

    def __init__(self, context: HeadContext, config: MtpConfig) -> None:
        layers, first, options = config.layers, config.modules[0], context.options
        super().__init__(context, config, names=(first.embedding, first.head))
        if config.drafted is not None:
            self.vocabulary = torch.tensor(config.drafted, device=options.device)
            self.num_legal_tokens = len(config.drafted)
        self.num_modules = len(config.modules)
        self._feature_first = config.style.feature_first
        self._blanks_first = config.style.blanks_first
        ropes = RopeTables(options.max_positions, options.device, shifted=True)
        slots = context.adapters
        built = BuildContext(context.source, layers.hidden_size, ropes, adapters=slots)
        known: dict[str, tuple[InputProjection, Norm]] = {}  # Qwen's share all but the layer
        self._modules: list[Stack] = []
        for spec, names in zip(layers.layers, config.modules, strict=True):
            ends = known.get(names.projection) or _read_ends(context.source, config, names)
            known[names.projection] = entry, last = ends
            layer = replace(spec, norms=config.norms).build(built, names.layer)
            self._modules.append(Stack(context.ops, [layer], last, entry))

    def share(self, embedding: Embedding, head: LanguageModelHead) -> None:
        super().share(embedding, head)
        if self.vocabulary is not None:
            self._head = self.head.over(self.vocabulary)
            self.vocabulary = self._head.tokens
            self.num_legal_tokens = self._head.num_tokens

    def __call__(
        self, token_ids: Tensor, features: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """Run the first module."""
        following = self.run(0, token_ids, features, inputs, caches[0])
        return following, following

    def run(
        self, index: int, token_ids: Tensor, features: Tensor, inputs: PassInputs, cache: LayerCache
    ) -> Tensor:
        """Run module `index`: token_ids [T], features [T, H] of the previous tokens -> [T, H].

        The module's first row of a text belongs to token `FIRST_ROW + index`; outputs of earlier
        rows are undefined.
        """
        embedded = self.embedded(token_ids, inputs)
        if self._blanks_first:
            is_first = inputs.rows.positions == FIRST_ROW + index
            embedded = embedded.masked_fill(is_first.unsqueeze(1), 0.0)
        sources = [features, embedded] if self._feature_first else [embedded, features]
        return self._modules[index](sources, inputs, [cache])[0]


class ModulesDrafter(FeatureRowsDrafter):
    """Drafts with several modules.

    `_given[slot of a token, i]` is the output of module i (from 0) for that token's row. The last
    module's outputs are not stored, as no module reads them. Rows without a slot write to the last
    entry.
    """

    def __init__(self, head: Head[MtpConfig, MtpHead], resources: DrafterResources) -> None:
        super().__init__(head, resources)
        self._mtp = head.network
        shape = (
            resources.cache_sizes.num_blocks * self._state.block_size + 1,
            self._mtp.num_modules - 1,
            self._mtp.feature_size,
        )
        self._given = torch.zeros(shape, dtype=self._features.dtype, device=self._state.device)

    def _pass(
        self, inputs: PassInputs, token_ids: Tensor, features: Tensor, draft: int
    ) -> tuple[Tensor, Tensor]:
        first, last = min(draft, self._mtp.num_modules - 1), self._mtp.num_modules - 1
        slots = inputs.paging.slots
        places = torch.where(slots < 0, len(self._given) - 1, slots)
        before = self._place_before(inputs)
        result = features
        for index in range(first, last + 1):
            # Rows before a module's first row are computed too, but masked out of attention.
            first_seen = FIRST_ROW + index
            own = replace(inputs, sees=replace(inputs.sees, first_seen=first_seen))
            taken = features if index == first else self._given[before, index - 1]
            given = self._mtp.run(index, token_ids, taken, own, self._cache.layers[index])
            means = (inputs.rows.positions >= first_seen).unsqueeze(1)
            given = torch.where(means, given, 0.0)
            if index < last:
                self._given[places, index] = given
            if index == first:
                result = given
        return result, result

    def _place_before(self, inputs: PassInputs) -> Tensor:
        """[T] int64, the slot of each row's previous token."""
        size, tables = self._state.block_size, inputs.paging.block_tables
        before = (inputs.rows.in_context - 1).clamp_min(0)
        return tables[inputs.rows.request, before // size].long() * size + before % size


def _build(head: Head[MtpConfig, MtpHead], resources: DrafterResources) -> Drafter:
    kind = FeatureRowsDrafter if head.network.num_modules == 1 else ModulesDrafter
    return kind(head, resources)


HEAD = HeadMethod(
    name="mtp",
    read=read_mtp_config,
    network=load_mtp,
    drafter=_build,
    checkpoint=MtpCheckpoint,
    adapts=True,
    keys=ModelKeys(vocabulary=True, cache=True, window=True, in_target=True),
)
