"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and the variants that its trainers have added.

    g = fc[streams of three layers of the target], at token t - 1
    u = norm(g), e = norm(embedding of token t)
    x = g + attention[e, u]                       the first layer's input is twice as wide
    x = x + mlp(norm(x)), and plain layers if there are more
    logits = lm_head(norm(x))                     often over some of the tokens only

x takes the place of g in the next row of a chain.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Norm, Ops
from slipstream.layers.layer import BuildContext, LayerSpec, build_layers
from slipstream.layers.linear import Linear, column_linear
from slipstream.layers.norm import rms_norm
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.layers.rope import RopeTables
from slipstream.layers.stack import Stack
from slipstream.models.loading import LoadOptions
from slipstream.speculative.eagle3.config import Eagle3Config, read_eagle3_config
from slipstream.speculative.heads.feature_rows import FeatureRowsDrafter
from slipstream.speculative.heads.loading import HeadNetwork, load_network
from slipstream.speculative.heads.method import HeadMethod
from slipstream.speculative.model_options import ModelKeys
from slipstream.speculative.trees.drafter import TreeDrafter


class FeatureFusion:
    """The target's streams to one feature of the head's width, with the norms before it."""

    def __init__(
        self, ops: Ops, source: ParameterSource, config: Eagle3Config, target_width: int
    ) -> None:
        width, eps, count = config.layers.hidden_size, config.layers.rms_norm_eps, config.num_read
        self._ops = ops
        self._fc: Linear = column_linear(
            source, [Part("fc", width)], count * target_width, config.parts.fc_bias
        )
        self._whole: Norm | None = None
        self._each: list[Norm | None] = [None] * count
        if config.norm_before_fc:
            self._whole = rms_norm(source, "input_norm", count * target_width, eps)
        if config.fc_norm:
            self._each = [
                rms_norm(source, f"fc_norm.{index}", target_width, eps) for index in range(count)
            ]

    def __call__(self, streams: Sequence[Tensor]) -> Tensor:
        """[T, target width] each -> [T, H]."""
        weight, bias = self._fc.weight, self._fc.bias
        if self._whole is not None:
            joined = torch.cat(list(streams), -1)
            return self._ops.norm_linear(joined, None, self._whole, weight, bias)[0]
        sides = list(zip(streams, self._each, strict=True))
        return self._ops.joined_linear(sides, weight, bias)


def head_layers(config: Eagle3Config) -> list[LayerSpec]:
    """The first reads [embedding, feature], both normed; the feature is the residual stream."""
    first, *others = config.layers.layers
    norms = replace(
        first.norms,
        mixer="hidden_norm",
        beside="input_layernorm",
        keeps_normed=config.norm_before_residual,
    )
    return [replace(first, norms=norms), *others]


class Eagle3Head(HeadNetwork):
    """(tokens, features) to what enters the lm_head and the next feature."""

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        config: Eagle3Config,
        target_width: int,
        options: LoadOptions,
    ) -> None:
        super().__init__(ops, source, config)
        layers, width = config.layers, config.layers.hidden_size
        self._fusion: FeatureFusion | None = None
        if config.use_aux_hidden_state:
            self._fusion = FeatureFusion(ops, source, config, target_width)
        ropes = RopeTables(options.max_positions, options.device, shifted=True)
        built = build_layers(head_layers(config), BuildContext(source, width, ropes))
        last = rms_norm(source, "norm", width, layers.rms_norm_eps)
        self._stack = Stack(ops, built, last)
        # What is the next feature: the stream behind all layers, or what the norm makes of it.
        self._wanted = () if config.norm_output else (layers.num_layers,)

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        return hidden if self._fusion is None else self._fusion(streams)

    def __call__(
        self,
        token_ids: Tensor,
        features: Tensor,
        inputs: PassInputs,
        caches: Sequence[LayerCache],
    ) -> tuple[Tensor, Tensor]:
        """token_ids [T], features [T, H] -> (what enters the lm_head, next features), [T, H]."""
        sources = [self.embedded(token_ids, inputs), features]
        normed, streams = self._stack(sources, inputs, caches, self._wanted)
        return normed, streams[0] if streams else normed


HEAD = HeadMethod(
    name="eagle3",
    read=read_eagle3_config,
    network=partial(load_network, Eagle3Head),
    drafter=FeatureRowsDrafter,
    tree_drafter=TreeDrafter,
    keys=ModelKeys(window=True),
)
