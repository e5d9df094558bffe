"""Tables of rotary position embeddings."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.layers.parameters import InvalidSizesError, require_positive


@dataclass(frozen=True)
class RopeConfig:
    """The base of a rotary embedding and how its frequencies are stretched.

    kind "default" leaves them; "linear" divides all by `factor`; "llama3" divides the low ones by
    `factor`, keeps the high ones and blends between; "proportional" does as "linear" and turns the
    first `rotated` of all pairs only.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rotated: float = 1.0

    def __post_init__(self) -> None:
        require_positive(
            rope_theta=self.theta,
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            original_max_position_embeddings=self.original_max_position_embeddings,
        )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise InvalidSizesError(
                f'"high_freq_factor" ({self.high_freq_factor}) must be above '
                f'"low_freq_factor" ({self.low_freq_factor})'
            )


class RopeTables:
    """The tables of one network: layers that are rotated alike share one.

    Args:
        shifted: rows stand at the place of a token and belong, like their features, to the token
            before: entry t turns by the angles of t - 1.
    """

    def __init__(self, max_positions: int, device: torch.device, shifted: bool = False) -> None:
        self._max_positions, self._device, self._shifted = max_positions, device, shifted
        self._tables: dict[tuple[RopeConfig, int], Tensor] = {}

    def table(self, config: RopeConfig, head_dim: int) -> Tensor:
        """See `rope_table`."""
        key = config, head_dim
        if key not in self._tables:
            table = rope_table(head_dim, config, self._max_positions, self._device)
            self._tables[key] = table.roll(1, 0) if self._shifted else table
        return self._tables[key]


def rope_table(
    head_dim: int, config: RopeConfig, max_positions: int, device: torch.device
) -> Tensor:
    """[max_positions, head_dim] float32: head_dim/2 cosines, then head_dim/2 sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = _stretched(1.0 / (config.theta**exponents), config)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _stretched(frequencies: Tensor, config: RopeConfig) -> Tensor:
    if config.kind == "default":
        return frequencies
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "proportional":
        turning = torch.arange(len(frequencies)) < int(config.rotated * len(frequencies))
        return torch.where(turning, frequencies / config.factor, 0.0)
    assert config.kind == "llama3", config.kind
    original = config.original_max_position_embeddings
    turns = original * frequencies / (2 * math.pi)  # turns within the original context
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / config.factor)
