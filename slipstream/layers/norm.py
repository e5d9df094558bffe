"""Root mean square norms."""

from slipstream.kernels.table import Norm
from slipstream.layers.parameters import ParameterSource, Part


def rms_norm(source: ParameterSource, name: str, width: int, eps: float) -> Norm:
    """The norm that a checkpoint names."""
    return Norm(source.vector([Part(f"{name}.weight", width)]), eps)
