"""The demos that are bundled with the package."""

import re
from pathlib import Path

_DEMO = Path(__file__).parent.parent / "demo"


def bundled_path(name: str) -> Path | None:
    """The directory of the demo with this name; None for other names."""
    head, _, rest = name.partition("/")
    if head != "demo" or not re.fullmatch(r"[\w-]*", rest):
        return None
    return _DEMO / (rest or "target")


def bundled_names() -> list[str]:
    """The names of bundled demos; the first is the target, `demo`."""
    names = sorted(file.parent.name for file in _DEMO.glob("*/config.json"))
    target = ["demo"] if "target" in names else []
    return target + [f"demo/{name}" for name in names if name != "target"]
