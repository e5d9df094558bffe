"""DFlash2: DFlash with convolutions around each sublayer of a layer, and a selector of candidates.

    sublayer of a layer: h = norm(x);  x += conv_1(sublayer(conv_0(h)))
    conv_s(y)_r = sum over t of (base_s[t] + delta_s,t(h_r)) * y_(r - t), over rows of r's block
    candidates of position i: the k most probable tokens c by u_i = logits of row i
    score_i(c) = u_i(c) + sum of P[previous token] * (W h_i) * S[c]

The scores are the logits of the candidates; all other tokens have probability 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.cache.spec import LayerCache
from slipstream.core.errors import CheckpointError
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs, RowPlaces
from slipstream.kernels.table import Norm
from slipstream.layers.attention import Attention
from slipstream.layers.linear import Linear, column_linear
from slipstream.layers.mlp import MLP
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.safetensors_file import TensorEntry
from slipstream.speculative.dflash.drafter import BlockChainDrafter
from slipstream.speculative.dflash.network import (
    BlockKeys,
    DFlashConfig,
    DFlashNetwork,
    read_block_config,
)
from slipstream.speculative.draft_sampling import Places
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import is_wrapped
from slipstream.speculative.heads.loading import HeadContext, load_network
from slipstream.speculative.heads.method import HeadMethod
from slipstream.speculative.model_options import ModelKeys

# Key: field, type, and default.
_OWN: dict[str, tuple[str, type[Any], float]] = {
    "conv_kernel_size": ("taps", int, 2),
    "conv_group_size": ("group_size", int, 16),
    "selector_rank": ("rank", int, 256),
    "selector_top_k": ("num_candidates", int, 16),
    "input_embedding_scale": ("embedding_scale", float, 1.0),
    "output_multiplier": ("logit_scale", float, 1.0),
    "final_logit_softcapping": ("softcap", float, 0.0),
}


class DFlash2Checkpoint(HeadCheckpoint):
    """A DFlash2 checkpoint. Base kernels are stored as [2, taps, H] and read as [2 taps, H]."""

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        return {
            name: replace(entry, shape=(prod(entry.shape[:-1]), entry.shape[-1]))
            if name.endswith(".base_kernel") and len(entry.shape) == 3
            else entry
            for name, entry in super().entries.items()
        }


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """The config of a DFlash2 network.

    Attributes:
        taps: kernel size of each convolution, including the tap of the row itself.
        group_size: number of channels that share a row's addend to the kernel.
        rank: rank of the scores of token pairs.
        num_candidates: number of candidates of each position, k.
        embedding_scale, logit_scale: factors of embeddings and logits.
        softcap: soft cap of the logits; 0 for none.
    """

    parallel: ClassVar[bool] = False

    taps: int
    group_size: int
    rank: int
    num_candidates: int
    embedding_scale: float
    logit_scale: float
    softcap: float

    def problems(self, target: DecoderConfig) -> list[str]:
        problems = super().problems(target)
        if self.draft_vocab_size != self.layers.vocab_size:
            problems.append("it drafts some of the tokens only, which its selector does not know")
        return problems


def read_dflash2_config(checkpoint: HeadCheckpoint) -> DFlash2Config:
    """Read the keys of DFlash, of the convolutions and of the selector."""
    free_windows = True if is_wrapped(checkpoint.config) else None
    config = read_block_config(
        checkpoint, DFlash2Config, "dflash2", _read_own, free_windows=free_windows
    )
    width, vocab_size = config.layers.hidden_size, config.layers.vocab_size
    if width % config.group_size or config.num_candidates > vocab_size:
        raise CheckpointError(
            f"{checkpoint.config_file}: conv_group_size must divide the hidden size {width}, and "
            f"selector_top_k must not be above the {vocab_size} tokens of the vocabulary"
        )
    return config


def _read_own(keys: BlockKeys) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for key, (field, kind, usual) in _OWN.items():
        own[field] = value = keys.take_or(key, kind, usual)
        if value < 0 or (value == 0 and field != "softcap"):
            raise keys.outer.error(key, f"must be above 0, not {value}")
    return own


@dataclass(frozen=True, eq=False)
class BlockConvolutions:
    """The two convolutions around one sublayer of a layer.

    Attributes:
        base: [2, taps, H], the kernels of the convolutions before and after the sublayer.
        deltas: H -> 2 * taps * groups, a row's addends to both kernels.
    """

    base: Tensor
    deltas: Linear

    @classmethod
    def read(cls, source: ParameterSource, name: str, config: DFlash2Config) -> "BlockConvolutions":
        width, taps = config.layers.hidden_size, config.taps
        base = source.table([Part(f"{name}.base_kernel", 2 * taps)], width).values
        groups = width // config.group_size
        part = Part(f"{name}.kernel_projection", 2 * taps * groups)
        deltas = column_linear(source, [part], width, bias=False)
        return cls(base.view(2, taps, width), deltas)

    def kernels(self, ops: Ops, normed: Tensor) -> Tensor:
        """The kernels of every row: normed [T, H] -> [2, taps, T, groups, H / groups]."""
        _, taps, width = self.base.shape
        deltas = ops.joined_linear([(normed, None)], *self.deltas.product)
        deltas = deltas.view(len(normed), 2, taps, -1).permute(1, 2, 0, 3)
        base = self.base.view(2, taps, 1, deltas.shape[-1], -1)
        assert base.shape[-1] * base.shape[-2] == width
        return base + deltas.unsqueeze(-1)


def convolve(rows: Tensor, kernels: Tensor, offsets: Tensor) -> Tensor:
    """Convolve rows [T, H] of several blocks with kernels [taps, T, groups, H / groups]; offsets
    [T] int64 are the rows' positions in their blocks. Returns [T, H]."""
    grouped = rows.view(kernels.shape[1:])
    total = torch.zeros_like(grouped)
    for tap, kernel in enumerate(kernels):
        # Rows that wrapped around would be before the block's first row, and are masked out.
        before = grouped.roll(tap, 0).masked_fill((offsets < tap).view(-1, 1, 1), 0.0)
        total = total + kernel * before
    return total.view_as(rows)


def block_offsets(rows: RowPlaces) -> Tensor:
    """[T] int64, each row's index among the rows of its request."""
    index = torch.arange(len(rows.positions), device=rows.positions.device)
    request = torch.searchsorted(rows.query_start[1:], index, right=True)
    return index - rows.query_start[:-1][request.clamp_max(len(rows.query_start) - 2)]


class DFlash2Network(DFlashNetwork):
    """A DFlash network with convolutions, whose tokens a selector chooses in turn."""

    def __init__(self, context: HeadContext, config: DFlash2Config) -> None:
        super().__init__(context, config)
        self._config, source = config, context.source
        layers, vocab_size = config.layers, config.layers.vocab_size
        self._convolutions = [
            [
                BlockConvolutions.read(source, f"model.layers.{index}.{sublayer}_conv", config)
                for sublayer in ("attention", "mlp")
            ]
            for index in range(layers.num_layers)
        ]
        name = "candidate_selector"
        self._predecessors, self._successors = (
            source.table([Part(f"{name}.{book}_codebook", vocab_size)], config.rank).values
            for book in ("predecessor", "successor")
        )
        part = Part(f"{name}.hidden_projection", config.rank)
        self._projection = column_linear(source, [part], layers.hidden_size, bias=False)

    def embedded(self, token_ids: Tensor, inputs: PassInputs | None = None) -> Tensor:
        return super().embedded(token_ids, inputs) * self._config.embedding_scale

    def __call__(
        self, token_ids: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]
    ) -> Tensor:
        stream, offsets = self.embedded(token_ids), block_offsets(inputs.rows)
        parts = zip(self._layers, self._convolutions, caches, self._causal, strict=True)
        for layer, (around_attention, around_mlp), cache, causal in parts:
            mixer, mlp = layer.mixer, layer.feed_forward
            assert isinstance(mixer, Attention)
            assert isinstance(mlp, MLP)
            assert mixer.norm is not None, "layers norm what they read"
            assert mlp.norm is not None, "layers norm what they read"
            own = replace(inputs, sees=replace(inputs.sees, causal=causal))
            kernels, rows = self._entered(stream, mixer.norm, around_attention, offsets)
            rows = self._attended(rows, mixer, own, cache)
            stream = stream + convolve(rows, kernels, offsets)
            kernels, rows = self._entered(stream, mlp.norm, around_mlp, offsets)
            rows = self._fed_forward(rows, mlp)
            stream = stream + convolve(rows, kernels, offsets)
        return self._ops.norm(stream, None, self._norm)[0]

    def _entered(
        self, stream: Tensor, norm: Norm, around: BlockConvolutions, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The kernels of the convolution after a sublayer, and the sublayer's input [T, H]."""
        normed = self._ops.norm(stream, None, norm)[0]
        entering, leaving = around.kernels(self._ops, normed)
        return leaving, convolve(normed, entering, offsets)

    def _attended(
        self, rows: Tensor, mixer: Attention, inputs: PassInputs, cache: LayerCache
    ) -> Tensor:
        qkv = self._ops.joined_linear([(rows, None)], *mixer.qkv.product)
        inputs = inputs.within_window(mixer.heads.window)
        mixed = self._ops.attend(qkv, mixer.heads, inputs, cache)
        return self._ops.joined_linear([(mixed, None)], *mixer.output.product)

    def _fed_forward(self, rows: Tensor, mlp: MLP) -> Tensor:
        gate, up = self._ops.joined_linear([(rows, None)], *mlp.inner.product).chunk(2, -1)
        return self._ops.joined_linear([(F.silu(gate) * up, None)], *mlp.down.product)

    def places(self, hidden: Tensor) -> Places:
        """Begin a round; hidden [R, K, H] is the final hidden state of the rows that predict."""
        config, shape = self._config, hidden.shape[:2]
        logits = self.head(hidden.flatten(0, 1)) * config.logit_scale
        if config.softcap:
            logits = config.softcap * (logits / config.softcap).tanh()
        columns = self.head.columns
        best, candidates = columns.top(logits, config.num_candidates)
        read = self._ops.joined_linear(
            [(hidden.flatten(0, 1).contiguous(), None)], *self._projection.product
        )
        after = self._successors[candidates]  # [R K, k, rank]
        best, candidates, read, after = (
            values.view(*shape, *values.shape[1:]) for values in (best, candidates, read, after)
        )

        def place(index: int, last: Tensor) -> tuple[Tensor, None]:
            pairs = (self._predecessors[last] * read[:, index]).unsqueeze(1) * after[:, index]
            scores = best[:, index] + pairs.float().sum(-1)
            alone = scores.new_full((len(last), logits.shape[-1]), -torch.inf)
            column, is_own = columns.places(candidates[:, index], alone)
            scores = scores.masked_fill(~is_own, -torch.inf)
            return alone.scatter_reduce_(1, column, scores, "amax"), None

        return place


HEAD = HeadMethod(
    name="dflash2",
    read=read_dflash2_config,
    network=partial(load_network, DFlash2Network),
    drafter=BlockChainDrafter,
    checkpoint=DFlash2Checkpoint,
    keys=ModelKeys(
        parallel=True, remedy="its layers run once for all tokens; leave it out", cache=True
    ),
)
