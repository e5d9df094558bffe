"""Root mean square norms."""

from torch import Tensor

from slipstream.kernels.table import Ops
from slipstream.layers.parameters import ParameterSource, Part


class RMSNorm:
    """Norm over the last axis, with or without adding a residual first."""

    def __init__(
        self, ops: Ops, source: ParameterSource, name: str, width: int, eps: float
    ) -> None:
        self._norm, self._add_norm = ops.norm, ops.add_norm
        self.weight = source.vector([Part(f"{name}.weight", width)])
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self._add_norm(x, residual, self.weight, self.eps)
