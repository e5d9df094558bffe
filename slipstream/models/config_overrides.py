"""A user's values in place of those in a config.json."""

from collections.abc import Mapping
from typing import Any

_OLD, _NEW = "rope_scaling", "rope_parameters"
_KINDS = {"rope_type", "type"}
_OF_EVERY_KIND = ("rope_theta", "partial_rotary_factor")


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values: objects are merged key by key, all else is replaced.

    Both spellings of rope parameters mean the one that the config has. An object of them that
    names a kind replaces the one of the config, all but what every kind has: other keys of the
    file may belong to its own kind.
    """
    result, given = dict(config), dict(overrides)
    rope = {**(given.pop(_OLD, None) or {}), **(given.pop(_NEW, None) or {})}
    name = _NEW if _NEW in config else _OLD
    inner: Mapping[str, Any] = config.get(name) or {}
    if "rope_theta" in inner and "rope_theta" in given:
        rope.setdefault("rope_theta", given.pop("rope_theta"))
    if rope:
        if rope.keys() & _KINDS:
            inner = {key: inner[key] for key in _OF_EVERY_KIND if key in inner}
        result[name] = _merged(inner, rope)
    elif overrides.keys() & {_OLD, _NEW}:  # null, or nothing: no stretching
        result[name] = {key: inner[key] for key in _OF_EVERY_KIND if key in inner}
    return _merged(result, given)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        result[key] = value
    return result
