"""Checks that the C++ module was built from the same sources as this Python code."""

import re
from collections.abc import Iterator
from hashlib import sha256
from types import ModuleType
from typing import Any

from slipstream.core.errors import UsageError

INTERFACE = "003b3d408984f42a"
"""Digest of the functions that the modules here call; change it with them: the message of
`require_current` tells it."""

_PARAMETER = re.compile(r"(\w+):")
_UNNAMED = re.compile(r"arg\d*")


def require_current(module: ModuleType) -> None:
    """Raise UsageError unless the module has the functions that these sources call: their names and
    parameters. Types are not compared, since versions of nanobind spell them differently."""
    found = sha256("\n".join(_functions(module)).encode()).hexdigest()[:16]
    if found != INTERFACE:
        raise UsageError(
            f"the C++ kernels in {module.__file__} were built from other sources than these "
            f"(interface {found}, not {INTERFACE}); build them again: scripts/build_cpu in a "
            "checkout, else install Slipstream again"
        )


def _functions(owner: Any, place: str = "") -> Iterator[str]:
    """`name(parameters)` of all functions and methods, sorted."""
    for name, member in sorted(vars(owner).items()):
        if isinstance(member, type):
            yield from _functions(member, f"{name}.")
        for signature, *_ in getattr(member, "__nb_signature__", ()):
            names = [_UNNAMED.sub("_", it) for it in _PARAMETER.findall(signature)]
            yield f"{place}{name}({', '.join(names)})"
