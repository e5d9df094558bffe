"""Reads the RoPE keys of config.json, in all their spellings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.layers.rope import RopeConfig
from slipstream.models.config_reader import ConfigReader

_ROTATED = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_KINDS = (
    *("default", "linear", "dynamic", "llama3", "yarn", "proportional", "longrope"),
    "su",  # longrope's name in older files
)


def read_rope(
    reader: ConfigReader,
    max_positions: int,
    default_theta: float,
    rotated: float | None = None,
    queries_grow: bool = False,
    sections: Sequence[int] = (),
    in_order: bool = False,
) -> RopeConfig:
    """Read `rope_theta` and `rope_scaling` (transformers 4), or `rope_parameters`, which has both.

    Args:
        max_positions: `max_position_embeddings`, for defaults of missing keys.
        rotated: default for the rotated share of a head; None: a config that asks for less than
            the whole head is refused.
        queries_grow: whether the architecture scales queries by their position.
        sections: default for the sections of positions with three axes; empty: positions have one
            axis.
        in_order: see `RopeConfig`.
    """
    theta = reader.take("rope_theta", float, default_theta)
    if rotated is not None:
        rotated = reader.take(_ROTATED, float, rotated)
    else:
        reader.expect(_ROTATED, 1.0)
    original = reader.take_optional(_ORIGINAL, int)
    parameters = _rope_reader(reader)
    given: list[int] = []
    if sections:
        given = parameters.take("mrope_section", list, list(sections))
        parameters.take("mrope_interleaved", bool, False)
        if len(given) != 3 or not all(type(size) is int and size >= 0 for size in given):
            raise parameters.error("mrope_section", f"must be three numbers, not {given}")
    growth = 0.0
    if queries_grow:
        parameters.take("max_position_embeddings", int, max_positions)
        growth = parameters.take("llama_4_scaling_beta", float)
    rope = read_rope_parameters(parameters, max_positions, theta, rotated, original, bool(sections))
    return replace(rope, query_growth=growth, sections=tuple(given), in_order=in_order)


@dataclass(frozen=True)
class RopesByType:
    """The RoPE of layers with full attention, and of layers with a window."""

    full: RopeConfig
    sliding: RopeConfig


def read_ropes_by_type(
    reader: ConfigReader, default_positions: int, default_theta: float
) -> RopesByType:
    """Read an object for each type in `rope_parameters`; or `rope_theta` for both types and
    `rope_scaling`, which applies only to layers with full attention."""
    positions = reader.take("max_position_embeddings", int, default_positions)
    theta = reader.take("rope_theta", float, default_theta)
    given = reader.nested("rope_parameters")
    names = ("full_attention", "sliding_attention")
    nested = [given.nested(name) for name in names]
    if not any(given.take(name, dict, {}) for name in names):
        return RopesByType(read_rope(reader, positions, default_theta), RopeConfig(theta))
    given.finish()
    full, sliding = (read_rope_parameters(each, positions, theta) for each in nested)
    return RopesByType(full, sliding)


def read_rope_parameters(
    reader: ConfigReader,
    max_positions: int,
    default_theta: float,
    rotated: float | None = None,
    original: int | None = None,
    has_sections: bool = False,
) -> RopeConfig:
    """Read one object of RoPE parameters and all its keys; arguments as in `read_rope`.

    Args:
        original: `original_max_position_embeddings` from outside the object, which takes
            precedence over the one inside.
        has_sections: whether positions may have three axes.
    """
    theta = reader.take("rope_theta", float, default_theta)
    kind = _kind(reader, has_sections)
    if rotated is None and kind != "proportional":
        reader.expect(_ROTATED, 1.0)
    share = reader.take(_ROTATED, float, 1.0 if rotated is None else rotated)
    rope = _rope_of_kind(reader, kind, theta, max_positions, share, original)
    reader.finish()
    return rope


def _rope_reader(reader: ConfigReader) -> ConfigReader:
    old = reader.take("rope_scaling", dict, {})
    new = reader.take("rope_parameters", dict, {})
    if old and new and old != new:
        raise reader.error(
            "rope_scaling", 'and "rope_parameters" contradict each other; remove one of them'
        )
    return reader.nested("rope_scaling" if old else "rope_parameters")


def _kind(inner: ConfigReader, has_sections: bool) -> str:
    kinds = [inner.take(key, str, "") for key in ("type", "rope_type")]
    if has_sections:  # as older files of Qwen2-VL say of them
        kinds = ["default" if kind == "mrope" else kind for kind in kinds]
    old_kind, new_kind = kinds
    kind = new_kind or old_kind or "default"
    if old_kind not in ("", kind):
        raise inner.error("type", f'is {old_kind!r}, but "rope_type" is {kind!r}; remove one')
    if kind not in _KINDS:
        raise inner.error(
            "rope_type" if new_kind else "type",
            f"is {kind!r}, but only {', '.join(_KINDS[:-2])} and {_KINDS[-2]} are supported",
        )
    return kind


def _rope_of_kind(
    inner: ConfigReader,
    kind: str,
    theta: float,
    max_positions: int,
    rotated: float,
    original: int | None,
) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta, rotated=rotated)
    if kind == "proportional":
        return RopeConfig(theta, kind, inner.take("factor", float, 1.0), rotated=rotated)
    if kind == "linear":
        return RopeConfig(theta, kind, inner.take("factor", float), rotated=rotated)
    if kind == "dynamic":
        inner.expect(_ORIGINAL, max_positions)
        factor = inner.take("factor", float)
        return RopeConfig(
            theta, kind, factor, original_max_position_embeddings=max_positions, rotated=rotated
        )
    within = inner.take_optional(_ORIGINAL, int)
    original = within if original is None else original
    if kind == "yarn":
        return _yarn(inner, theta, max_positions, rotated, original)
    if kind in ("longrope", "su"):
        return _longrope(inner, theta, max_positions, rotated, original)
    assert kind == "llama3", kind
    return RopeConfig(
        theta,
        kind,
        inner.take("factor", float),
        inner.take("low_freq_factor", float),
        inner.take("high_freq_factor", float),
        max_positions if original is None else original,
        rotated,
    )


def _longrope(
    inner: ConfigReader, theta: float, max_positions: int, rotated: float, original: int | None
) -> RopeConfig:
    """Read LongRoPE, with the attention factor that follows from other keys."""
    original = max_positions if original is None else original
    factor = inner.take("factor", float, max_positions / original if original > 0 else 1.0)
    weight = 1.0
    if factor > 1 and original > 1:
        weight = math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (_factors(inner, key) for key in ("short_factor", "long_factor"))
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original_max_position_embeddings=original,
        rotated=rotated,
        attention_factor=inner.take("attention_factor", float, weight),
        short_factor=short,
        long_factor=long,
    )


def _factors(inner: ConfigReader, key: str) -> tuple[float, ...]:
    values = inner.take(key, list)
    if not all(type(value) in (int, float) for value in values):
        raise inner.error(key, "must be a list of numbers")
    return tuple(map(float, values))


def _yarn(
    inner: ConfigReader, theta: float, max_positions: int, rotated: float, original: int | None
) -> RopeConfig:
    """Read YaRN, with the factors that follow from other keys."""
    factor = inner.take_optional("factor", float)
    if factor is None:
        if not original:
            raise inner.error("factor", "is missing; add it, or original_max_position_embeddings")
        factor = max_positions / original
    inner.take("finetuned", bool, True)  # only describes how the model was trained
    one, other = (inner.take(key, float, 0.0) for key in ("mscale", "mscale_all_dim"))
    weight = _mscale(factor, one) / _mscale(factor, other) if one and other else _mscale(factor)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position_embeddings=max_positions if original is None else original,
        rotated=rotated,
        beta_fast=inner.take("beta_fast", float, 0.0) or 32.0,
        beta_slow=inner.take("beta_slow", float, 0.0) or 1.0,
        truncate=inner.take("truncate", bool, True),
        attention_factor=inner.take("attention_factor", float, weight),
        score_factor=_mscale(factor, other) ** 2,
    )


def _mscale(factor: float, mscale: float = 1.0) -> float:
    """The attention factor for a scaled context (Peng et al. 2023)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
