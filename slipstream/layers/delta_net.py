"""Gated delta nets as mixers (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from slipstream.cache.recurrent import RecurrentSpec
from slipstream.cache.spec import LayerCache
from slipstream.core.errors import UsageError
from slipstream.kernels.delta_net import DeltaCache, DeltaHeads
from slipstream.kernels.norm import SublayerOutput
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces, StateInputs
from slipstream.kernels.table import DeltaNetParts
from slipstream.layers.layer import BuildContext, MatrixShape, SublayerInput
from slipstream.layers.linear import column_linear, row_linear
from slipstream.layers.norm import LayerNorms, rms_norm
from slipstream.layers.parameters import (
    ROWS,
    WHOLE,
    Interleaved,
    InvalidSizesError,
    Part,
    Share,
    require_positive,
)


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec:
    """Sizes of a gated delta net.

    Attributes:
        num_taps: width of the causal convolution, the current row included.
        packed: the checkpoint's projection has the rows of a key head together (its queries, keys,
            values and z), instead of all queries, then all keys and so on; likewise the gates.
        name: name of the module within its layer, in a checkpoint.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    packed: bool = False
    name: str = "linear_attn"

    def __post_init__(self) -> None:
        require_positive(
            linear_num_key_heads=self.num_key_heads,
            linear_num_value_heads=self.num_value_heads,
            linear_key_head_dim=self.key_dim,
            linear_value_head_dim=self.value_dim,
            linear_conv_kernel_dim=self.num_taps,
        )
        if self.num_taps < 2:
            raise InvalidSizesError(f'"linear_conv_kernel_dim" ({self.num_taps}) must be above 1')
        if self.num_value_heads % self.num_key_heads:
            raise InvalidSizesError(
                f'"linear_num_value_heads" ({self.num_value_heads}) must be a multiple of '
                f'"linear_num_key_heads" ({self.num_key_heads})'
            )

    @property
    def key_rows(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_rows(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> tuple[int, int, int]:
        """Number of channels of queries, keys and values together."""
        return self.key_rows, self.key_rows, self.value_rows

    def projections(self, name: str) -> list[Part]:
        """The parts of the stacked projection: queries, keys, values and z."""
        kinds = (*self.channels, self.value_rows)
        if self.packed:
            return self._packed(f"{name}.in_proj_qkvz", kinds)
        own = _stacked(f"{name}.in_proj_qkv", self.channels)
        return [*own, Part(f"{name}.in_proj_z", self.value_rows)]

    def gates(self, name: str) -> list[Part]:
        """The parts of the gates' projection, which is never quantised, to keep outputs exact."""
        heads = self.num_value_heads
        parts = [Part(f"{name}.in_proj_{kind}", heads) for kind in "ba"]
        if self.packed:
            parts = self._packed(f"{name}.in_proj_ba", (heads, heads))
        return [replace(part, exact=True) for part in parts]

    def _packed(self, name: str, kinds: tuple[int, ...]) -> list[Part]:
        """Parts whose rows are interleaved in one tensor; the rows of a key head are a group."""
        total = sum(kinds)
        group, starts = total // self.num_key_heads, _starts(kinds)
        return [
            Part(name, rows, within=Interleaved(total, group, start // self.num_key_heads))
            for rows, start in zip(kinds, starts, strict=True)
        ]

    def matrices(self, norms: LayerNorms, width: int) -> tuple[MatrixShape, ...]:
        rows = sum(self.channels) + self.value_rows + 2 * self.num_value_heads
        return (rows, width), (width, self.value_rows)

    def numbers_per_row(self, width: int) -> int:
        return 2 * sum(self.channels) + 3 * self.value_rows + 2 * self.num_value_heads

    def cache(self, dtype: torch.dtype, share: Share = WHOLE) -> RecurrentSpec:
        if not dtype.is_floating_point:
            raise UsageError(
                "kv_cache_dtype=int8 and fp8 do not go with layers that keep a state of each "
                "request; leave it out"
            )
        value_heads = share.of(self.num_value_heads, "linear_num_value_heads")
        return RecurrentSpec(
            state=(value_heads, self.key_dim, self.value_dim),
            window=self.num_taps - 1,
            channels=share.of(sum(self.channels), "channels"),
            gates=2 * value_heads,
            dtype=dtype,
        )

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "DeltaNet":
        return DeltaNet(self, context, layer, norms)


@dataclass(frozen=True, eq=False)
class WaitingRows:
    """Accepted draft rows of the last pass that are included in copies of states, the checkpoints.

    Attributes:
        slots, places: [R] int64, the places of the states and of the checkpoints.
        owners, rows: [T] int64, the slot of each row, and its number among those of the slot.
        inputs: a pass over these rows, with the states 0 to R - 1.
    """

    slots: Tensor
    places: Tensor
    owners: Tensor
    rows: Tensor
    inputs: PassInputs


def waiting_rows(
    slots: Sequence[int], counts: Sequence[int], places: Sequence[int]
) -> list[Sequence[int]]:
    """The tensors of `waiting_inputs`, as numbers, for the first counts[r] rows that wait in each
    of these slots."""
    owners = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
    rows = [row for count in counts for row in range(count)]
    return [slots, places, owners, rows, counts, [0, *accumulate(counts)]]


def waiting_inputs(tensors: Sequence[Tensor], most_rows: int) -> WaitingRows:
    """Args:
    tensors: int64: slots, places, owners and rows of `WaitingRows`, how many rows each slot has,
        [R], and where these begin, [R + 1].
    most_rows: at least the largest number of rows of a slot.
    """
    slots, places, owners, rows, known, starts = tensors
    none, nowhere = torch.zeros_like(known), torch.full_like(known, -1)
    tables = torch.zeros((len(slots), 1), dtype=torch.int32, device=slots.device)
    own = torch.arange(len(slots), device=slots.device)
    inputs = PassInputs(
        RowPlaces(starts, torch.zeros_like(rows), max_rows=most_rows),
        Paging(tables, known, torch.full_like(rows, -1)),
        states=StateInputs(own, known, pending=none, save_at=nowhere, saved=none),
    )
    return WaitingRows(slots, places, owners, rows, inputs)


class DeltaNet:
    """The mixer: input projections (stacked if possible), recurrence, output projection."""

    def __init__(
        self, spec: DeltaNetSpec, context: BuildContext, layer: str, norms: LayerNorms
    ) -> None:
        source, name, width = context.source, f"{layer}.{spec.name}", context.width
        norm = norms.load_optional(source, layer, norms.mixer, width)
        assert norm is not None, "gated delta nets read a normed stream"
        self.norm = norm
        inputs, gates, share = spec.projections(name), spec.gates(name), context.share
        is_one = source.alike(
            [replace(part, name=f"{part.name}.weight") for part in inputs + gates]
        )
        self.inputs = column_linear(source, inputs + gates if is_one else inputs, width, False)
        self.gates = None if is_one else column_linear(source, gates, width, False)
        self.output = row_linear(source, f"{name}.out_proj", width, spec.value_rows, False, share)
        taps = [replace(it, split=ROWS) for it in _stacked(f"{name}.conv1d.weight", spec.channels)]
        decay, step_bias = (
            source.vector([Part(f"{name}.{kind}", spec.num_value_heads, ROWS, dtype=torch.float32)])
            for kind in ("A_log", "dt_bias")
        )
        self.heads = DeltaHeads(
            num_key_heads=share.of(spec.num_key_heads, "linear_num_key_heads"),
            num_value_heads=share.of(spec.num_value_heads, "linear_num_value_heads"),
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            taps=source.table(taps, spec.num_taps).values,
            decay=-decay.float().exp(),
            step_bias=step_bias.float(),
            norm_weight=rms_norm(source, f"{name}.norm", spec.value_dim, norms.eps).weight,
            eps=norms.eps,
        )

    @property
    def parts(self) -> object:
        if self.output.is_shared:
            return self
        gates = None if self.gates is None else self.gates.product
        return DeltaNetParts(self.norm, self.heads, self.inputs.product, gates, self.output.product)

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs, cache: LayerCache
    ) -> tuple[SublayerOutput, Tensor]:
        """See `Mixer`; updates the requests' states in `cache`."""
        addend, residual, second = entering
        assert second is None, "a gated delta net has one input"
        heads = self.heads
        if self.gates is None:
            rows, stream = ops.norm_linear(addend, residual, self.norm, *self.inputs.product)
            gates = rows[:, -2 * heads.num_value_heads :]
        else:
            normed, stream = ops.norm(addend, residual, self.norm)
            rows, gates = (
                ops.joined_linear([(normed, None)], *linear.product)
                for linear in (self.inputs, self.gates)
            )
        end = heads.num_channels + heads.num_value_heads * heads.value_dim
        mixed, z = rows[:, : heads.num_channels], rows[:, heads.num_channels : end]
        read = ops.delta_net(mixed, gates, z, heads, inputs, cache)
        return self.output.apply(ops, read, inputs), stream

    def save(self, ops: Ops, waiting: WaitingRows, cache: DeltaCache) -> None:
        """Write checkpoints, with the arithmetic of passes; states stay as they are."""
        heads, count = self.heads, len(waiting.slots)
        # The op writes the states that it begins with, so it is given copies. States are copied
        # first: kernels may load them before the work right in front of them has ended.
        states, windows = cache.states[waiting.slots], cache.windows[waiting.slots]
        copies = DeltaCache(states, windows, cache.drafted[:count], cache.drafted_gates[:count])
        mixed = cache.drafted[waiting.owners, waiting.rows]
        gates = cache.drafted_gates[waiting.owners, waiting.rows]
        z = mixed.new_zeros(len(mixed), heads.num_value_heads * heads.value_dim)
        ops.delta_net(mixed, gates, z, heads, waiting.inputs, copies)  # outputs are not read
        cache.states[waiting.places], cache.windows[waiting.places] = states, windows


def _stacked(name: str, kinds: tuple[int, ...]) -> list[Part]:
    """Parts that follow each other in one tensor."""
    total = sum(kinds)
    return [
        Part(name, rows, within=Interleaved(total, total, start))
        for rows, start in zip(kinds, _starts(kinds), strict=True)
    ]


def _starts(sizes: tuple[int, ...]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]
