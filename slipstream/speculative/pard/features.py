"""PARD-2's features: hidden states of the target, projected and added to the embeddings.

The input of token p is embedding(p) + pard2_scale * target_proj(feature of p - 1), where a feature
is the target's hidden states of `pard2_target_layers`, concatenated. The layers are indices
into what transformers calls hidden_states: i is the residual stream that enters layer i, and the
last one, n or -1, what leaves the final norm. `target_proj` lies in warp_model.bin.

The projected feature of every computed token is stored by slot, next to the drafter's keys and
values. So the features of cached tokens are also available after a prefix cache hit and after steps
without drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.spec import ModelCache
from slipstream.core.errors import CheckpointError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.ops import Ops
from slipstream.kernels.registry import kernels_for
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.rows import PassRows, lay_out
from slipstream.speculative.drafter import DrafterResources
from slipstream.speculative.heads.checkpoint import fill, read_pickled

WEIGHTS = "warp_model.bin"
_PROJECTION = "target_proj"


@dataclass(frozen=True)
class Pard2Config:
    """The config of PARD-2's features.

    Attributes:
        target_layers: indices from 0 to the target's number of layers, which denotes the output of
            the final norm.
        target_width: hidden size of the target.
        width: hidden size of the drafter.
    """

    target_layers: tuple[int, ...]
    target_width: int
    width: int
    scale: float
    bias: bool

    @property
    def stream_layers(self) -> tuple[int, ...]:
        """The residual streams among them, in order."""
        return tuple(layer for layer in self.target_layers if layer >= 0)


def read_pard2_config(checkpoint: Checkpoint, width: int, target: DecoderConfig) -> Pard2Config:
    """Read the config; raises CheckpointError if the drafter is for another target."""
    reader = ConfigReader(checkpoint.config, checkpoint.config_file)
    names = reader.take("pard2_target_layers", list)
    count = target.num_layers
    layers = []
    for name in names:
        if isinstance(name, bool) or not isinstance(name, int) or not -count - 1 <= name <= count:
            raise reader.error(
                "pard2_target_layers",
                f"holds {name!r}, but the target has hidden states 0 to {count} (or -1 to "
                f"{-count - 1}); use the drafter of this target",
            )
        index = name % (count + 1)
        layers.append(-1 if index == count else index)
    total = reader.take("pard2_target_dim", int)
    if not layers or total != len(layers) * target.hidden_size:
        raise reader.error(
            "pard2_target_dim",
            f"is {total}, but {len(layers)} hidden states of this target are "
            f"{len(layers) * target.hidden_size} numbers; use the drafter of this target",
        )
    return Pard2Config(
        target_layers=tuple(layers),
        target_width=target.hidden_size,
        width=width,
        scale=reader.take("pard2_scale", float),
        bias=reader.take("pard2_proj_bias", bool, False),
    )


class TargetProjection:
    """pard2_scale * target_proj, one matrix per layer of the target that is read."""

    def __init__(self, ops: Ops, config: Pard2Config, weight: Tensor, bias: Tensor | None) -> None:
        self._logits, self._config, self._bias = ops.logits, config, bias
        parts = torch.split(weight, config.target_width, dim=1)
        self._parts = [DenseMatrix(part.contiguous()) for part in parts]
        self.dtype = weight.dtype

    def __call__(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """[T, width] from the target's last hidden states and `stream_layers`, each [T, H]."""
        rest = iter(streams)
        total = hidden.new_zeros((len(hidden), self._config.width), dtype=torch.float32)
        for layer, part in zip(self._config.target_layers, self._parts, strict=True):
            state = hidden if layer < 0 else next(rest)
            total = total + self._logits(state.to(self.dtype), part)
        if self._bias is not None:
            total = total + self._bias
        return (self._config.scale * total).to(self.dtype)


def load_projection(
    checkpoint: Checkpoint, config: Pard2Config, options: LoadOptions
) -> TargetProjection:
    """Load the projection from warp_model.bin, or initialise it at random for dummy weights."""
    columns = len(config.target_layers) * config.target_width
    shapes: dict[str, tuple[int, ...]] = {f"{_PROJECTION}.weight": (config.width, columns)}
    if config.bias:
        shapes[f"{_PROJECTION}.bias"] = (config.width,)
    tensors = {name: torch.empty(shape, dtype=options.dtype) for name, shape in shapes.items()}
    if options.load_format in ("auto", "safetensors"):
        _read(checkpoint, tensors)
    else:
        generator = torch.Generator().manual_seed(options.seed)
        for tensor in tensors.values():
            tensor.normal_(std=columns**-0.5, generator=generator)
    weight, *bias = (tensor.to(options.device) for tensor in tensors.values())
    ops = kernels_for(options.device, options.dtype, options.batch_invariant).network
    return TargetProjection(ops, config, weight, bias[0] if bias else None)


def _read(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    file = checkpoint.path / WEIGHTS
    if not file.is_file():
        raise CheckpointError(
            f"{checkpoint.path} has no {WEIGHTS}, which holds the projection of the target's "
            "features; download it to the model's directory"
        )
    stored = read_pickled(file)
    for name, tensor in tensors.items():
        entry = stored.get(name)
        if entry is None or entry.shape != tuple(tensor.shape):
            found = "is missing" if entry is None else f"has shape {list(entry.shape)}"
            raise CheckpointError(
                f"tensor {name} {found} in {file}, where its config.json and this target ask for "
                f"{list(tensor.shape)}; use the drafter of this target"
            )
        fill(entry, tensor)
    if stored.keys() - tensors.keys():
        surplus = ", ".join(sorted(stored.keys() - tensors.keys()))
        raise CheckpointError(f"{file} holds {surplus}, which is unknown; use another checkpoint")


@dataclass(frozen=True, eq=False)
class FeaturePages:
    """Features by slot, [num_blocks * block_size + 1, width]; rows without a slot use the last."""

    pages: Tensor
    project: TargetProjection

    @staticmethod
    def empty(project: TargetProjection, width: int, resources: DrafterResources) -> "FeaturePages":
        state = resources.state
        shape = (resources.cache_sizes.num_blocks * state.block_size + 1, width)
        return FeaturePages(torch.zeros(shape, dtype=project.dtype, device=state.device), project)

    def write(self, forward: Forward) -> None:
        """Store the features of a target pass. Those of rejected tokens are overwritten before they
        are read, like their keys and values."""
        slots = forward.layout.inputs.paging.slots
        places = torch.where(slots < 0, len(self.pages) - 1, slots)
        self.pages.index_copy_(0, places, self.project(forward.hidden, forward.streams))

    def read(self, state: DeviceState, slots: Tensor, positions: Tensor) -> Tensor:
        """The features [T, width] for rows with these request slots [T] and positions [T]: that of
        the previous token, or the last computed one; zeros for a text's first token."""
        before = torch.minimum(positions, state.num_computed[slots]) - 1
        place = before.clamp_min(0)
        blocks = state.block_tables[slots, place // state.block_size].long()
        features = self.pages[blocks * state.block_size + place % state.block_size]
        return features.masked_fill((before < 0).unsqueeze(1), 0.0)


class FeatureFedRunner(ModelRunner):
    """Runs a decoder with the features added to its embeddings."""

    def __init__(
        self, network: Decoder, cache: ModelCache, features: FeaturePages, given: DrafterResources
    ) -> None:
        super().__init__(network, cache, given.state, record=given.record)
        self._decoder, self._features = network, features

    def forward(self, rows: PassRows) -> Forward:
        layout = self._adapted(lay_out(self._state, rows), rows)
        slots = rows.slots[layout.request]
        embedded = self._decoder.embed(layout.token_ids)
        embedded = embedded + self._features.read(self._state, slots, layout.inputs.rows.positions)
        hidden, *_ = self._compute(layout, layout.token_ids, embedded)
        return Forward(hidden, layout)
