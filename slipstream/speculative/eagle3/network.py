"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and the variants that its trainers have added.

    g = fc[streams of three layers of the target], at token t - 1
    u = norm(g), e = norm(embedding of token t)
    x = g + attention[e, u]                       the first layer's input is twice as wide
    x = x + mlp(norm(x)), and plain layers if there are more
    logits = lm_head(norm(x))                     often over some of the tokens only

x takes the place of g in the next row of a chain.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Norm
from slipstream.layers.layer import LayerSpec
from slipstream.layers.linear import Linear, column_linear
from slipstream.layers.norm import rms_norm
from slipstream.layers.parameters import Part
from slipstream.layers.stack import Stack
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import head_reader, is_wrapped, read_layers
from slipstream.speculative.heads.feature_rows import FeatureNetwork, FeatureRowsDrafter
from slipstream.speculative.heads.kinds import StreamHeadConfig, stream_fields, width_problem
from slipstream.speculative.heads.loading import HeadContext, load_network
from slipstream.speculative.heads.method import HeadMethod
from slipstream.speculative.model_options import ModelKeys
from slipstream.speculative.trees.drafter import TreeDrafter

_AUX_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(StreamHeadConfig):
    """The config of an EAGLE-3 head.

    Attributes:
        use_aux_hidden_state: false: it reads the target's last hidden state, without fc.
        norm_before_residual: the residual stream begins with the normed feature.
        norm_before_fc: there is one norm over the concatenated streams.
        fc_norm: there is a norm for each stream.
        norm_output: the next feature is the output of the final norm.
    """

    use_aux_hidden_state: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @property
    def features(self) -> str:
        if not self.use_aux_hidden_state:
            return super().features
        layers = ", ".join(map(str, self.entered_layers or ("2", "n // 2", "n - 3")))
        return f"the residual streams that enter layers {layers}"

    @property
    def num_read(self) -> int:
        return len(self.entered_layers) if self.entered_layers else 3

    def stream_layers(self, target_layers: int) -> tuple[int, ...]:
        if not self.use_aux_hidden_state:
            return ()
        if self.entered_layers is not None:
            return self.entered_layers
        return (2, target_layers // 2, target_layers - 3)

    def problems(self, target: DecoderConfig) -> list[str]:
        problems = super().problems(target)
        layers = self.stream_layers(target.num_layers)
        wrong = [layer for layer in layers if not 0 <= layer <= target.num_layers]
        if wrong or len(set(layers)) < len(layers):
            usual = "" if self.entered_layers else ", which is what a head without a list reads"
            problems.append(
                f"it reads the streams of the layers {', '.join(map(str, layers))}{usual}; a "
                f"target of {target.num_layers} layers has those of 0 to {target.num_layers} (list "
                f"them as {_AUX_KEY} in its config.json)"
            )
        return problems

    def _widths(self, target: DecoderConfig) -> list[str]:
        if self.use_aux_hidden_state or self.target_hidden_size not in (None, target.hidden_size):
            return super()._widths(target)
        problem = width_problem(self.layers.hidden_size, target)
        return [problem] if problem else []


def read_eagle3_config(
    checkpoint: HeadCheckpoint, read_elsewhere: Collection[str] = ()
) -> Eagle3Config:
    """Flags are in the config, in its `eagle_config`, or follow from the tensors.

    Args:
        read_elsewhere: keys that do not change the network and are read elsewhere.
    """
    reader = head_reader(checkpoint, read_elsewhere)
    inner = reader.nested("eagle_config")
    names = checkpoint.tensor_names
    flags: dict[str, Any] = {
        "use_aux_hidden_state": _flag(reader, inner, "use_aux_hidden_state", True),
        "norm_before_residual": _flag(
            reader, inner, "norm_before_residual", is_wrapped(checkpoint.config)
        ),
        "norm_before_fc": _flag(reader, inner, "norm_before_fc", "input_norm.weight" in names),
        "fc_norm": _flag(reader, inner, "fc_norm", "fc_norm.0.weight" in names),
        "norm_output": _flag(reader, inner, "norm_output", False),
    }
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise reader.error("fc_norm", "and norm_before_fc exclude each other; set one of them")
    aux_layers = _aux_layers(reader, inner)
    count = len(aux_layers) if aux_layers else 3
    if (stated := reader.take_optional("num_aux_hidden_states", int)) not in (None, count):
        raise reader.error("num_aux_hidden_states", f"is {stated}, but {count} layers are read")
    for key in ("bias", "eagle_fc_bias"):
        reader.take(key, bool, False)
    _expect_usual(reader, inner)
    draft_vocab_size = reader.take_optional("draft_vocab_size", int)
    target_hidden_size = reader.take_optional("target_hidden_size", int)
    inner.finish()
    layers = read_layers(reader, names)
    return Eagle3Config(
        **stream_fields(checkpoint, layers, draft_vocab_size, own_head=True),
        **flags,
        entered_layers=aux_layers,
        target_hidden_size=target_hidden_size,
    )


def _flag(reader: ConfigReader, inner: ConfigReader, key: str, default: bool) -> bool:
    outer = reader.take_optional(key, bool)
    return inner.take(key, bool, default if outer is None else outer)


def _aux_layers(reader: ConfigReader, inner: ConfigReader) -> tuple[int, ...] | None:
    """Layers whose incoming stream is read, rising.

    The nested list has two meanings in the field, and its first number tells them apart: 1 stands
    for the output of layer 1, which enters layer 2 (SpecForge); 2 is meant as it is.
    """
    outer = reader.take_optional(_AUX_KEY, list)
    nested = inner.take_optional(_AUX_KEY, list)
    ids = outer or nested
    if not ids:
        return None
    if not all(type(index) is int for index in ids):
        raise reader.error(_AUX_KEY, f"must be a list of layer numbers, not {ids}")
    shift = 1 if not outer and min(ids) == 1 else 0
    return tuple(sorted(index + shift for index in ids))


def _expect_usual(reader: ConfigReader, inner: ConfigReader) -> None:
    """Switches of one trainer, of which only the defaults are supported."""
    for key, value in (
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("use_mtp_layernorm", False),
        ("next_layer_regular", True),
        ("parallel_draft_step", 1),
    ):
        reader.expect(key, value)
        inner.expect(key, value)
    for keys in (reader, inner):  # of heads that a parallel_draft_step of 1 has none of
        keys.take_optional("parallel_draft_heads_num_layers", int)


class FeatureFusion:
    """The target's streams to one feature of the head's width, with the norms before it."""

    def __init__(self, context: HeadContext, config: Eagle3Config) -> None:
        width, eps, count = config.layers.hidden_size, config.layers.rms_norm_eps, config.num_read
        source, target_width = context.source, context.target_width
        self._ops = context.ops
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
        second_norm="input_layernorm",
        keeps_normed=config.norm_before_residual,
    )
    return [replace(first, norms=norms), *others]


class Eagle3Head(FeatureNetwork):
    """The layers, and the fusion of the streams that they read."""

    def __init__(self, context: HeadContext, config: Eagle3Config) -> None:
        super().__init__(context, config)
        layers, width = config.layers, config.layers.hidden_size
        self._fusion: FeatureFusion | None = None
        if config.use_aux_hidden_state:
            self._fusion = FeatureFusion(context, config)
        built = context.layers(layers, head_layers(config), shifted=True)
        last = rms_norm(context.source, "norm", width, layers.rms_norm_eps)
        self._stack = Stack(context.ops, built, last)
        # The feature for the next position: the residual stream after all layers, or its norm.
        self._wanted = () if config.norm_output else (layers.num_layers,)

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        return hidden if self._fusion is None else self._fusion(streams)

    def __call__(
        self, token_ids: Tensor, features: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        sources = [self.embedded(token_ids, inputs), features]
        normed, streams = self._stack(sources, inputs, caches, self._wanted)
        return normed, streams[0] if streams else normed


HEAD = HeadMethod(
    name="eagle3",
    read=read_eagle3_config,
    network=partial(load_network, Eagle3Head),
    drafter=FeatureRowsDrafter,
    tree_drafter=TreeDrafter,
    adapts=True,
    keys=ModelKeys(cache=True, window=True),
)
