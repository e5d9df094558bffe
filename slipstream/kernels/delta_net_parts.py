"""A gated delta net as a mixer that a backend may fuse."""

from dataclasses import dataclass

from slipstream.kernels.delta_net import DeltaHeads
from slipstream.kernels.table import Norm, Product


@dataclass(frozen=True, eq=False)
class DeltaNetParts:
    """See `layers/delta_net.py`.

    Attributes:
        inputs: its rows make queries, keys, values, then z, then the gates (b, a) of the op.
        gates: makes the gates where `inputs` does not; None: `inputs` does.
    """

    norm: Norm
    heads: DeltaHeads
    inputs: Product
    gates: Product | None
    output: Product

    @property
    def products(self) -> tuple[Product, ...]:
        gates = () if self.gates is None else (self.gates,)
        return self.inputs, *gates, self.output
