"""What a decoder of the Llama family is made of."""

from dataclasses import dataclass
from math import isfinite

import torch

from slipstream.layers.rope import RopeConfig

__all__ = ["DecoderConfig", "InvalidSizesError", "RopeConfig"]


class InvalidSizesError(ValueError):
    """Numbers of a config that no network can have; whoever knows the file says so to the user."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that a decoder's network is built from, checked when it is made.

    Attributes:
        architecture: its Hugging Face name.
        qkv_bias: of the query, key and value projections.
        o_bias: of the attention's output projection.
        mlp_bias: of all three projections of the feed-forward part.
        qk_norm: query and key heads are normalised before they are rotated.
        sliding_windows: per layer, how many tokens a row sees, itself included; None sees all.
        dtype: that the checkpoint is meant to run in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    dtype: torch.dtype
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters of the matrices, which are all but a few."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return vocabulary + self.num_layers * layer

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_windows()
        self._check_rope()

    def _check_sizes(self) -> None:
        for key, value in (
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_layers),
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
            ("rms_norm_eps", self.rms_norm_eps),
        ):
            _require_positive(key, value)
        if self.num_heads % self.num_kv_heads:
            raise InvalidSizesError(
                f'"num_attention_heads" ({self.num_heads}) must be a multiple of '
                f'"num_key_value_heads" ({self.num_kv_heads})'
            )
        if self.head_dim % 2:
            raise InvalidSizesError(f'"head_dim" must be even to be rotated, not {self.head_dim}')

    def _check_windows(self) -> None:
        if len(self.sliding_windows) != self.num_layers:
            raise InvalidSizesError(
                f"{len(self.sliding_windows)} layer types are given for "
                f'"num_hidden_layers" {self.num_layers}'
            )
        for window in self.sliding_windows:
            if window is not None:
                _require_positive("sliding_window", window)

    def _check_rope(self) -> None:
        rope = self.rope
        for key, value in (
            ("rope_theta", rope.theta),
            ("factor", rope.factor),
            ("low_freq_factor", rope.low_freq_factor),
            ("high_freq_factor", rope.high_freq_factor),
            ("original_max_position_embeddings", rope.original_max_position_embeddings),
        ):
            _require_positive(key, value)
        if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
            raise InvalidSizesError(
                f'"high_freq_factor" ({rope.high_freq_factor}) must be above '
                f'"low_freq_factor" ({rope.low_freq_factor})'
            )


def _require_positive(key: str, value: float) -> None:
    if not (value > 0 and isfinite(value)):
        raise InvalidSizesError(f'"{key}" must be above 0, not {value}')
