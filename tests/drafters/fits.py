"""Matrices of drafters that are fitted to a target, once for checkpoints of the same bytes.

Many tests write the same tiny drafter for the same target, and a fit reads some hundred texts.
"""

from collections.abc import Callable
from functools import wraps
from hashlib import sha256
from pathlib import Path

from torch import Tensor

Fit = Callable[[Path, str | Path], Tensor]


def remembered(fit: Fit) -> Fit:
    """A fit that follows from the files of a drafter and of its target alone."""
    known: dict[str, Tensor] = {}

    @wraps(fit)
    def once(folder: Path, target: str | Path) -> Tensor:
        digest = sha256()
        for place in (folder, Path(target)):
            for file in sorted(place.glob("*.json")) + sorted(place.glob("*.safetensors")):
                digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
        key = digest.hexdigest()
        if key not in known:
            known[key] = fit(folder, target)
        return known[key].clone()

    return once
