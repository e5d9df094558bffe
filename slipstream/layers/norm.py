"""Root mean square norms, and those of a layer."""

from dataclasses import dataclass

from slipstream.kernels.table import Norm
from slipstream.layers.parameters import ParameterSource, Part, require_positive


@dataclass(frozen=True)
class LayerNorms:
    """The norms before the halves of a layer, by their names in a checkpoint.

    Attributes:
        eps: of these and of the query and key heads.
        mixer: None where it reads the stream as it is.
        beside: of a second input of the mixer, as wide as the stream; None without such an input.
        keeps_normed: what the mixer's norm gives takes the place of the stream.
    """

    eps: float
    mixer: str | None = "input_layernorm"
    feed_forward: str = "post_attention_layernorm"
    beside: str | None = None
    keeps_normed: bool = False

    def __post_init__(self) -> None:
        require_positive(rms_norm_eps=self.eps)


def rms_norm(source: ParameterSource, name: str, width: int, eps: float) -> Norm:
    """The norm over `width` numbers whose weight a checkpoint calls `name`."""
    return Norm(source.vector([Part(f"{name}.weight", width)]), eps)
