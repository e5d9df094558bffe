"""Paths as users write them."""

from pathlib import Path


def user_path(given: str | Path) -> Path:
    """The path, with the home directory in place of `~` or `~NAME`.

    If there is no such user the path stays as it is, so that the caller reports it as missing.
    """
    path = Path(given)
    try:
        return path.expanduser()
    except RuntimeError:
        return path
