"""The shape of an attention layer, and what all attention launches read of a pass."""

from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.pass_inputs import Paging, Visibility
from slipstream.kernels.triton.launch import next_power_of_2

SHORT_ROWS = 16  # a request of more rows is a prompt chunk
LEAST_ROOM = 64  # requests; for fewer a kernel would be no faster, but compiled once more
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class AttentionShape:
    """Shapes of an attention layer, and how its scores are masked and scaled.

    Attributes:
        sinks: see `Heads`.
        softcap: scores become softcap * tanh(score / softcap).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    sinks: Tensor | None
    softcap: float | None = None

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads

    @property
    def block_d(self) -> int:
        """Columns of a tile: a power of two, at least 32, as tensor cores take 16 of each half."""
        return int(max(32, next_power_of_2(self.head_dim)))


def room_for(requests: int) -> int:
    """The number of requests that a kernel over all of them is compiled for."""
    return int(max(LEAST_ROOM, next_power_of_2(requests)))


def most_tokens_of(paging: Paging, block_size: int) -> int:
    """The largest number of tokens that the context of one request may have."""
    return int(paging.block_tables.shape[1]) * block_size


def tree_of(sees: Visibility) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(index of each row's token, bits of its ancestors, first token of each tree), or Nones."""
    tree = sees.tree
    if tree is None:
        return None, None, None
    assert tree.tokens.is_contiguous()
    assert tree.ancestors.is_contiguous()
    assert tree.starts.is_contiguous()
    return tree.tokens, tree.ancestors, tree.starts
