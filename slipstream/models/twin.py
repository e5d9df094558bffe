"""Random weights of any geometry, whose first layers make a drafter with accepted tokens.

With ordinary random weights drafts are never accepted, so that only forced acceptance could be
timed. Here the next token depends almost entirely on the first layer, and all later layers together
change the residual stream by a small, fixed share. A model of only the first layers, with the same
embedding, final norm and head, then agrees with the whole model most of the time, whatever the
number of layers of either. The text is meaningless.

Routers are random, too, so rows choose experts almost independently of each other.
docs/measurements/gpu_experts.md has the number of distinct experts that adjacent rows use.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.kernels.reference.experts import choose, gated
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.experts import ExpertsSpec
from slipstream.layers.layer_inputs import LayerInputSublayerSpec
from slipstream.layers.parameters import WHOLE, FusedExperts, Interleaved, Part, Share
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.parameter_sources import FACTORS

_SLICE = 1 << 24  # numbers that are drawn at a time

# Scales of activations in a network whose norms all have unit output.
LOGIT_STD = 6.0
# Ratio of the first layer's output to the embedding, so large that a tied head, whose rows are
# those of the embedding, does not just repeat the last token.
FIRST_LAYER_GAIN = 40.0
# Ratio of all later layers' output to the first one's. About 70 percent of greedy draft tokens are
# then accepted, with 8 to 28 layers and 8,192 to 32,000 tokens; 78 percent at 0.1, and 62 at 0.2.
LATE_SHARE = 0.14
# Standard deviation of attention scores: rows attend to few tokens, so that the next token
# depends on the whole text and greedy output does not fall into a loop at once.
SHARPNESS = 4.0
# Logarithm of the decay rate of recurrent states, so that they remember some dozens of tokens.
SLOW_DECAY = -3.0


class TwinSource:
    """Draws each tensor with its own generator, seeded by its name; the experts of a layer count as
    one tensor.

    So a target and a drafter that are built separately have equal numbers in tensors of equal
    names, up to rounding to their dtypes.

    Args:
        target: the whole network, even if only its first layers are built.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        target: DecoderConfig,
        share: Share = WHOLE,
    ) -> None:
        self._dtype, self._device, self._seed, self._target = dtype, device, seed, target
        self._share = share

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        rows = sum(part.rows for part in parts)
        parameter = torch.empty((rows, columns), dtype=self._dtype, device=self._device)
        fused = parts[0].fused
        if isinstance(fused, FusedExperts):
            # With one generator: hundreds per layer would take most of the time.
            self._draw(fused.name, parameter)
            return self._share.cut(parameter, parts)
        start = 0
        for part in parts:
            self._draw(part.name, parameter[start : start + part.rows], part.within)
            start += part.rows
        return self._share.cut(parameter, parts)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        rows = sum(part.rows for part in parts)
        value = self._constant(parts[0].name)
        vector = torch.full((rows,), value, dtype=self._dtype, device=self._device)
        return self._share.cut(vector, parts)

    def _draw(self, name: str, out: Tensor, within: Interleaved | None = None) -> None:
        own = name if within is None else f"{name}/{within.start}"
        generator = torch.Generator(self._device).manual_seed(_seed(self._seed, own))
        std = self._gain(name) / out.shape[1] ** 0.5  # a gain of 1 keeps the scale of the input
        step = max(1, _SLICE // out.shape[1])
        for start in range(0, len(out), step):
            rows = out[start : start + step]
            # In float32 for all dtypes, so that drafter and target with different dtypes agree.
            numbers = torch.empty(rows.shape, dtype=torch.float32, device=self._device)
            rows.copy_(numbers.normal_(std=std, generator=generator))

    def _gain(self, name: str) -> float:
        if not name.startswith("model.layers."):
            return LOGIT_STD / self._target.logit_scale  # embedding and head
        modules = name.removesuffix(".weight").split(".")
        matrix, layer = modules[-1], self._target.layers[int(modules[2])]
        mixer = layer.mixer
        if matrix == "q_proj" and isinstance(mixer, AttentionSpec) and not mixer.qk_norm:
            return SHARPNESS
        if matrix not in ("o_proj", "out_proj", "down_proj", "c_proj"):
            return 1.0
        part = layer.feed_forward
        weight = 1.0
        if matrix == "down_proj" and isinstance(part, ExpertsSpec):
            weight = _weight_of_experts(part, modules[-2] == "experts")
        return weight * self._strength(int(modules[2]))

    def _strength(self, layer: int) -> float:
        """The scale of what a sublayer of this layer adds to the stream."""
        first = FIRST_LAYER_GAIN * (self._target.embedding_scale or 1.0) / self._target.logit_scale
        if layer == 0:
            return first
        # The layers' outputs are independent, so their squares add up.
        return first * LATE_SHARE / math.sqrt(self._target.num_layers - 1)

    def _constant(self, name: str) -> float:
        """The value of a vector's numbers; norms after sublayers set the scale of the sublayers."""
        modules = name.removesuffix(".weight").split(".")
        if name.startswith("model.layers."):
            layer = self._target.layers[int(modules[2])]
            post_norms = [layer.norms.post_mixer, layer.norms.post_feed_forward]
            if isinstance(layer.feed_forward, LayerInputSublayerSpec):
                post_norms.append(layer.feed_forward.post_norm)
            if ".".join(modules[3:]) in post_norms:
                return self._strength(int(modules[2]))
        return _constant(name)


@cache
def _weight_of_experts(spec: ExpertsSpec, routed: bool) -> float:
    """The gain with which experts, or the shared expert, have outputs as large as a dense part.

    The output of k independent experts scales with the root of the sum of their squared weights,
    and a clamped gate has another scale than SiLU. Both are measured on random numbers.
    """
    share = 1.0 if spec.shared_size is None else math.sqrt(0.5)
    if not routed:
        return share
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1024, spec.routing.num_experts, generator=generator)
    weights = choose(logits, spec.routing, None)[1]
    gate, up = torch.randn(2, 1 << 16, generator=generator)
    passed, by_silu = (gated(gate, up, clamp).square().mean() for clamp in (spec.clamp, None))
    return share * math.sqrt(float(by_silu / passed / weights.square().sum(-1).mean()))


def _constant(name: str) -> float:
    if name.endswith("q_norm.weight"):
        return SHARPNESS
    if name.endswith("A_log"):
        return SLOW_DECAY
    return 1.0 if name.endswith(FACTORS) else 0.0


def _seed(seed: int, name: str) -> int:
    """A 63-bit seed for each name, equal in all processes."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def require_twin(draft: DecoderConfig, target: DecoderConfig, file: Path) -> None:
    """Raise CheckpointError unless `draft` has the target's geometry, maybe with fewer layers."""
    if draft.num_layers > target.num_layers:
        raise _mismatch(file, "num_hidden_layers", draft.num_layers, target.num_layers)
    cut = replace(
        target,
        layers=target.layers[: draft.num_layers],
        # These do not affect the numbers of the layers.
        max_position_embeddings=draft.max_position_embeddings,
        dtype=draft.dtype,
    )
    difference = _difference(draft, cut)
    if difference is not None:
        raise _mismatch(file, *difference)


def _difference(ours: object, theirs: object) -> tuple[str, object, object] | None:
    """The first field, possibly of a nested config, in which two configs differ."""
    for field in fields(ours):  # type: ignore[arg-type]
        one, two = getattr(ours, field.name), getattr(theirs, field.name)
        if one == two:
            continue
        if field.name == "layers":
            one, two = next(pair for pair in zip(one, two, strict=True) if pair[0] != pair[1])
        if is_dataclass(one) and type(one) is type(two):
            return _difference(one, two)
        return field.name, one, two
    return None


def _mismatch(file: Path, name: str, ours: object, theirs: object) -> CheckpointError:
    return CheckpointError(
        f"{file}: load_format=twin makes the drafter of the target's first layers, so its config "
        f"must be the target's with a smaller num_hidden_layers, but {name} is {ours} here and "
        f"{theirs} in the target; copy the target's config.json, or use load_format=dummy"
    )
