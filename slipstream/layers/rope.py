"""Tables of rotary position embeddings."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
