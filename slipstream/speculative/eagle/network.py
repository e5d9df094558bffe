"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077), whose weights EAGLE-2 (2406.16858) uses as well.

    x = fc[embedding of token t, feature of token t - 1]      the feature behind the final norm
    x = x + attention(x)                                      no norm before it in layer 0
    x = x + mlp(norm(x))
    logits = lm_head(x)                                       the target's, without a norm

x takes the place of the feature in the next row of a chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Ops
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.layers.layer import BuildContext, build_layers
from slipstream.layers.linear import column_linear
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.layers.rope import RopeTables
from slipstream.layers.stack import Entry, Stack
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import head_reader, read_layers
from slipstream.speculative.heads.loading import (
    HeadEnds,
    HeadParts,
    load_head,
    sharing_problems,
    vocabulary_problem,
)


@dataclass(frozen=True)
class Eagle1Config:
    """What the head is made of; its vocabulary is the target's."""

    layers: DecoderConfig
    parts: HeadParts


def read_eagle1_config(checkpoint: HeadCheckpoint) -> Eagle1Config:
    """Whether fc has a bias is read from the tensors: old heads have one and do not say so."""
    reader = head_reader(checkpoint)
    for key in ("bias", "eagle_fc_bias", "fusion_bias"):
        reader.take(key, bool, False)
    reader.expect("layernorms", False)  # norms that speculators once put around the layer
    vocab_size = reader.take("vocab_size", int)
    reader.expect("truncated_vocab_size", vocab_size)
    layers = read_layers(reader, checkpoint.tensor_names)
    return Eagle1Config(layers, HeadParts.of(checkpoint, head_by_default=False))


def eagle1_problems(config: Eagle1Config, target: DecoderConfig) -> list[str]:
    """Why the head cannot draft for this target."""
    layers = config.layers
    if layers.hidden_size != target.hidden_size:
        return [
            f"it reads features of {layers.hidden_size} numbers and the target's have "
            f"{target.hidden_size}; it was trained for another target"
        ]
    mismatch = vocabulary_problem(layers, target)
    problems = [] if mismatch is None else [mismatch]
    return problems + sharing_problems(config.parts, layers, layers.vocab_size, target)


def load_eagle1(
    checkpoint: HeadCheckpoint, config: Eagle1Config, options: LoadOptions
) -> "Eagle1Head":
    """The network with its weights."""
    return load_head(
        checkpoint, options, lambda ops, source: Eagle1Head(ops, source, config, options)
    )


class Eagle1Head:
    """(tokens, features) to what enters the lm_head, which is the next feature too."""

    def __init__(
        self, ops: Ops, source: ParameterSource, config: Eagle1Config, options: LoadOptions
    ) -> None:
        layers, parts = config.layers, config.parts
        width = layers.hidden_size
        self.feature_size = width
        self._ends = HeadEnds(ops, source, parts, layers.vocab_size, layers.vocab_size, width)
        fc = column_linear(source, [Part("fc", width)], 2 * width, parts.fc_bias)
        ropes = RopeTables(options.max_positions, options.device, shifted=True)
        first, *others = layers.layers
        unnormed = replace(first, norms=replace(first.norms, mixer=None))
        built = build_layers([unnormed, *others], BuildContext(source, width, ropes))
        self._stack = Stack(ops, built, None, Entry(fc.product, (None, None)))

    def share(self, embedding: Embedding, head: LanguageModelHead) -> None:
        """Take from the target what the head has not."""
        self._ends.share(embedding, head)

    @property
    def head(self) -> LanguageModelHead:
        return self._ends.head

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """[T, H]: the target's hidden states behind the final norm are the features."""
        del streams
        return hidden

    def __call__(
        self,
        token_ids: Tensor,
        features: Tensor,
        inputs: PassInputs,
        caches: Sequence[LayerCache],
    ) -> tuple[Tensor, Tensor]:
        """token_ids [T], features [T, H] -> twice [T, H]."""
        x, _ = self._stack([self._ends.embedded(token_ids), features], inputs, caches)
        return x, x
