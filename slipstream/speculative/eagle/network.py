"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077); EAGLE-2 (2406.16858) uses the same weights.

    x = fc[embedding of token t, feature of token t - 1]      feature: after the final norm
    x = x + attention(x)                                      no norm before it in layer 0
    x = x + mlp(norm(x))
    logits = lm_head(x)                                       the target's lm_head, no norm

In a chain of draft tokens, x is the feature of the next row.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import InputProjection
from slipstream.layers.linear import column_linear
from slipstream.layers.parameters import Part
from slipstream.layers.stack import Stack
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import head_reader, read_layers, wrapped_num_tokens
from slipstream.speculative.heads.feature_rows import FeatureNetwork, FeatureRowsDrafter
from slipstream.speculative.heads.kinds import DecoderHeadConfig, HeadParts
from slipstream.speculative.heads.loading import HeadContext, load_network
from slipstream.speculative.heads.method import HeadMethod
from slipstream.speculative.model_options import ModelKeys
from slipstream.speculative.trees.drafter import TreeDrafter


def read_eagle1_config(checkpoint: HeadCheckpoint) -> DecoderHeadConfig:
    """Read the config. Whether fc has a bias is read from the tensors, as old configs omit it."""
    reader = head_reader(checkpoint)
    for key in ("bias", "eagle_fc_bias", "fusion_bias"):
        reader.take(key, bool, False)
    reader.expect("layernorms", False)  # norms that speculators once put around the layer
    vocab_size = reader.take("vocab_size", int)
    reader.expect("truncated_vocab_size", vocab_size)
    layers = read_layers(reader, checkpoint.tensor_names)
    return DecoderHeadConfig(
        layers=layers,
        num_tokens=wrapped_num_tokens(checkpoint.config),
        parts=HeadParts.of(checkpoint, head_by_default=False),
        draft_vocab_size=layers.vocab_size,
    )


class Eagle1Head(FeatureNetwork):
    """Maps token ids and features to the lm_head's input, which is also the next feature."""

    def __init__(self, context: HeadContext, config: DecoderHeadConfig) -> None:
        super().__init__(context, config)
        layers, width = config.layers, config.layers.hidden_size
        assert context.target_width == width
        fc = column_linear(context.source, [Part("fc", width)], 2 * width, config.parts.fc_bias)
        first, *others = layers.layers
        unnormed = replace(first, norms=replace(first.norms, mixer=None))
        built = context.layers(layers, [unnormed, *others], shifted=True)
        self._stack = Stack(context.ops, built, None, InputProjection(fc.product, (None, None)))

    def __call__(
        self, token_ids: Tensor, features: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        x, _ = self._stack([self.embedded(token_ids, inputs), features], inputs, caches)
        return x, x


HEAD = HeadMethod(
    name="eagle",
    read=read_eagle1_config,
    network=partial(load_network, Eagle1Head),
    drafter=FeatureRowsDrafter,
    tree_drafter=TreeDrafter,
    adapts=True,
    keys=ModelKeys(cache=True, window=True),
)
