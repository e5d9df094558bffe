"""Tables of rotary position embeddings."""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.layers.parameters import InvalidSizesError, require_positive

_MOST_TURNS = 1e9  # a sanity limit, within which wavelengths have logarithms


@dataclass(frozen=True)
class RopeConfig:
    """The base of a rotary embedding and how its frequencies are scaled.

    kind "default" keeps them; "linear" divides all by `factor`; "llama3" and "yarn" (Peng et al.
    2023) divide low ones by `factor`, keep high ones and blend between; "proportional" is like
    "linear", but rotates only the first `rotated` of all pairs; "none" rotates nothing.

    Two kinds depend on the length of the context. They use the length of the table (the maximum
    length of a request), so that the angles of a token never depend on other tokens. "dynamic"
    raises theta if the table is longer than the original context; "longrope" (Ding et al. 2024)
    divides each frequency by a factor of its own, from `long_factor` for such a table, and from
    `short_factor` for shorter ones.

    Attributes:
        rotated: the share of a head's numbers that are rotated: the first ones, paired as if they
            were the whole head; "proportional" pairs the numbers of the whole head.
        beta_fast, beta_slow: for yarn: pairs with at least `beta_fast` turns within the original
            context keep their frequency; pairs with at most `beta_slow` turns have it divided.
        truncate: for yarn: the blend begins and ends at whole pairs.
        attention_factor: factor of cosines and sines.
        score_factor: factor of the scores of latent attention.
        short_factor, long_factor: for longrope, one number per pair.
        query_growth: queries at position p are multiplied by
            1 + query_growth * ln(1 + floor(p / original_max_position_embeddings)).
        sections: for positions with three axes (time, row, column), which are equal for text
            (M-RoPE, Bai et al. 2025): pairs 3i + 1 below 3 sections[1] are rotated by the row,
            pairs 3i + 2 below 3 sections[2] by the column, and others by the time.
        in_order: the first sections[0] pairs are rotated by the time, the next sections[1] by the
            row, and the rest by the column, as in Qwen2-VL (Wang et al. 2024).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rotated: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    score_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    query_growth: float = 0.0
    sections: tuple[int, ...] = ()
    in_order: bool = False

    def __post_init__(self) -> None:
        require_positive(
            rope_theta=self.theta,
            partial_rotary_factor=self.rotated,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            attention_factor=self.attention_factor,
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
        if self.rotated > 1.0:
            raise InvalidSizesError(
                f'"partial_rotary_factor" must be at most 1, not {self.rotated}'
            )
        require_positive(
            short_factor=min(self.short_factor, default=1.0),
            long_factor=min(self.long_factor, default=1.0),
        )
        if self.kind == "yarn" and self.theta == 1.0:
            raise InvalidSizesError('"rope_theta" must not be 1 for yarn')
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise InvalidSizesError(
                f'"beta_fast" ({self.beta_fast}) must not be below "beta_slow" ({self.beta_slow})'
            )
        least = 1 / _MOST_TURNS
        if self.kind == "yarn" and (self.beta_slow < least or self.beta_fast > _MOST_TURNS):
            raise InvalidSizesError(
                f'"beta_slow" ({self.beta_slow}) and "beta_fast" ({self.beta_fast}) must be from '
                f"{least:g} to {_MOST_TURNS:g}"
            )

    def rotary_dim(self, head_dim: int) -> int:
        """Number of rotated numbers of a head; two of them share an angle."""
        if self.kind == "none":
            return 2  # one pair whose angle is 0, so that backends need no special case
        return head_dim if self.kind == "proportional" else int(head_dim * self.rotated)

    def axes(self, num_pairs: int) -> list[int]:
        """The axis of the position by which each pair is rotated."""
        if self.in_order:
            time, rows, _ = self.sections
            return [(pair >= time) + (pair >= time + rows) for pair in range(num_pairs)]
        return [
            pair % 3 if self.sections and pair < 3 * self.sections[pair % 3] else 0
            for pair in range(num_pairs)
        ]

    @property
    def depends_on_length(self) -> bool:
        """Whether angles depend on the maximum length of requests."""
        return self.kind in ("dynamic", "longrope")

    def require_fit(self, head_dim: int) -> None:
        """Raise InvalidSizesError for heads that cannot be rotated in this way."""
        pairs = self.rotary_dim(head_dim) // 2
        for name, factors in (("short", self.short_factor), ("long", self.long_factor)):
            if self.kind == "longrope" and len(factors) != pairs:
                raise InvalidSizesError(
                    f'"{name}_factor" has {len(factors)} numbers, but heads have {pairs} pairs'
                )
        if self.in_order and sum(self.sections) != pairs:
            raise InvalidSizesError(
                f'"mrope_section" is {[*self.sections]}, but heads have {pairs} pairs'
            )
        if self.kind == "dynamic" and pairs < 2:
            raise InvalidSizesError('rope of the kind "dynamic" needs more than one pair a head')

    def longest(self, max_positions: int) -> int:
        """The maximum number of positions, if the config declares `max_positions`."""
        if self.kind in ("linear", "dynamic"):
            return int(max_positions * max(self.factor, 1.0))
        if self.kind == "yarn":
            return max(max_positions, int(self.original_max_position_embeddings * self.factor))
        return max_positions

    def usual(self, max_positions: int) -> int:
        """The default number of positions: with longrope, as many as the short factors serve, since
        these give better text."""
        if self.kind == "longrope":
            return min(max_positions, self.original_max_position_embeddings)
        return max_positions


NO_ROPE: Final = RopeConfig(theta=1.0, kind="none")
"""Stands for the rope of layers whose queries and keys are not rotated."""


class RopeTables:
    """The tables of a network; layers with equal settings share one.

    Args:
        shifted: entry t has the angles of position t - 1, for drafting heads, whose row of a token
            has the feature of the token before.
        num_composed: number of additional entries, which `compose` writes.
    """

    def __init__(
        self, max_positions: int, device: torch.device, shifted: bool = False, num_composed: int = 0
    ) -> None:
        self._max_positions, self._device, self._shifted = max_positions, device, shifted
        self.num_composed = num_composed
        self._tables: dict[tuple[RopeConfig, int], Tensor] = {}
        self._query_scales: dict[RopeConfig, Tensor] = {}

    def table(self, config: RopeConfig, head_dim: int) -> Tensor:
        key = config, head_dim
        if key not in self._tables:
            table = rope_table(head_dim, config, self._max_positions, self._device)
            table = table.roll(1, 0) if self._shifted else table
            room = (0, 0, 0, self.num_composed)
            self._tables[key] = pad(table, room) if self.num_composed else table
        return self._tables[key]

    def compose(self, axes: Tensor) -> Tensor:
        """Write entries for rows whose positions have three axes.

        Args:
            axes: [3, n] int64, the positions of each row on the three axes; n is at most
                `num_composed`.

        Returns:
            [n] int64, the indices of these entries in all tables, valid until the next call.
        """
        first, count = self._max_positions, axes.shape[1]
        assert count <= self.num_composed, "a pass has no more rows than that"
        for (config, _), table in self._tables.items():
            pairs = table.shape[1] // 2
            axis = torch.tensor(config.axes(pairs) * 2, device=axes.device)
            column = torch.arange(2 * pairs, device=axes.device)
            table[first : first + count] = table[axes[axis].T, column]
        return torch.arange(first, first + count, device=axes.device)

    def query_scales(self, config: RopeConfig) -> Tensor | None:
        """[max_positions] float32, factors of queries; None: all 1."""
        if not config.query_growth:
            return None
        if config not in self._query_scales:
            steps = torch.arange(self._max_positions) // config.original_max_position_embeddings
            scales = 1.0 + config.query_growth * (1.0 + steps).log()
            self._query_scales[config] = scales.to(self._device)
        return self._query_scales[config]


def rope_table(
    head_dim: int, config: RopeConfig, max_positions: int, device: torch.device
) -> Tensor:
    """[max_positions, D] float32: D/2 cosines, then D/2 sines; D is `config.rotary_dim`."""
    size = config.rotary_dim(head_dim)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    theta = _raised_theta(size, config, max_positions)
    frequencies = _stretched(1.0 / (theta**exponents), config, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (table * config.attention_factor).to(device)


def _raised_theta(size: int, config: RopeConfig, max_positions: int) -> float:
    """Theta; "dynamic" raises it so that the lowest frequency fits the length of the table."""
    longer = max_positions / config.original_max_position_embeddings
    if config.kind != "dynamic" or longer <= 1.0:
        return config.theta
    stretched = config.factor * longer - (config.factor - 1)
    return config.theta * math.pow(stretched, size / (size - 2))


def _stretched(frequencies: Tensor, config: RopeConfig, max_positions: int) -> Tensor:
    if config.kind in ("default", "dynamic"):
        return frequencies
    if config.kind == "none":
        return torch.zeros_like(frequencies)
    if config.kind == "longrope":
        is_long = max_positions > config.original_max_position_embeddings
        return frequencies / torch.tensor(config.long_factor if is_long else config.short_factor)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "proportional":
        turning = torch.arange(len(frequencies)) < int(config.rotated * len(frequencies))
        return torch.where(turning, frequencies / config.factor, 0.0)
    if config.kind == "yarn":
        divided = _divided_by_yarn(len(frequencies), config)
        return frequencies * (1.0 - divided) + frequencies / config.factor * divided
    assert config.kind == "llama3", config.kind
    original = config.original_max_position_embeddings
    turns = original * frequencies / (2 * math.pi)  # number of turns within the original context
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / config.factor)


def _divided_by_yarn(num_pairs: int, config: RopeConfig) -> Tensor:
    """[num_pairs]: 0 if yarn keeps a frequency, 1 if it divides it, and a ramp in between."""

    def pair_of(turns: float) -> float:
        """The pair that has this number of turns within the original context."""
        wavelength = config.original_max_position_embeddings / (2 * math.pi * turns)
        return num_pairs * math.log(wavelength) / math.log(config.theta)

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, 2 * num_pairs - 1.0)
    width = high - low or 0.001
    return ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
