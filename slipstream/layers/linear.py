"""Linear layers, and how they are split over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.kernels.adapters import Adapted, LowRank
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.norm import SublayerOutput
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Product
from slipstream.layers.adapters import AdapterSlots
from slipstream.layers.parameters import COLUMNS, ROWS, WHOLE, Fused, ParameterSource, Part, Share


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x W^T + b, W [rows, columns].

    Attributes:
        ranks: the ranks whose partial results are summed; `WHOLE` if y is complete on each rank.
        adapters: slots for LoRA adapters; None: there are none.
    """

    weight: Weight
    bias: Tensor | None
    ranks: Share = WHOLE
    adapters: LowRank | None = None

    @property
    def is_shared(self) -> bool:
        """Whether y is a partial result, to be summed over ranks."""
        return self.ranks.reduce is not None

    @property
    def product(self) -> Product:
        """The arguments of ops that compute several products, without the sum over ranks."""
        return self.weight, self.bias

    def adapted(self, inputs: PassInputs) -> Adapted | None:
        """The adapters of the rows of a pass, in the form that ops take."""
        if self.adapters is None or inputs.adapters is None:
            return None
        return Adapted(self.adapters, inputs.adapters)

    def apply(self, ops: Ops, x: Tensor, inputs: PassInputs) -> SublayerOutput:
        """x [T, columns] -> y as an addend of the backend's ops (see `Ops.linear`)."""
        adapted = self.adapted(inputs)
        if not self.is_shared:
            return ops.linear(x, *self.product, adapted)
        if ops.sums_addends:
            partial = ops.linear(x, *self.product, adapted)
        else:
            partial = ops.joined_linear([(x, None)], *self.product, adapted)
        return self.ranks.addend(partial, x.dtype, ops.sums_addends)


def column_linear(
    source: ParameterSource,
    parts: Sequence[Part],
    columns: int,
    bias: bool,
    fused: str = "",
    adapters: AdapterSlots | None = None,
) -> Linear:
    """Make a layer whose W stacks several checkpoint tensors. The rows of each are split over
    ranks, and each rank computes its share of y.

    Args:
        fused: name of the module that has them stacked in some checkpoints; "": there is none.
        adapters: receives slots for adapters of W; None: there are no adapters.
    """
    stacked = Fused(fused) if fused else None
    parts = [replace(part, split=ROWS, fused=stacked) for part in parts]
    weight = source.matrix(_named(parts, "weight"), columns)
    own = None if adapters is None else adapters.matrix(parts, columns)
    return Linear(weight, source.vector(_named(parts, "bias")) if bias else None, adapters=own)


def row_linear(
    source: ParameterSource,
    name: str,
    rows: int,
    columns: int,
    bias: bool,
    share: Share = WHOLE,
    adapters: AdapterSlots | None = None,
    unit: int | None = None,
) -> Linear:
    """Make a layer whose columns, `columns` in all, are split over ranks; the partial y are summed,
    and the first rank adds the bias. `adapters`: see `column_linear`; `unit`: see `Part`."""
    parts = [Part(name, rows, COLUMNS, unit=unit)]
    weight = source.matrix(_named(parts, "weight"), columns)
    own_bias = source.vector(_named([Part(name, rows)], "bias")) if bias else None
    own = None if adapters is None else adapters.matrix(parts, columns)
    return Linear(weight, own_bias if share.rank == 0 else None, share, own)


def _named(parts: Sequence[Part], ending: str) -> list[Part]:
    named = []
    for part in parts:
        fused = part.fused and replace(part.fused, name=f"{part.fused.name}.{ending}")
        named.append(replace(part, name=f"{part.name}.{ending}", fused=fused))
    return named
