"""The policy's work for each request and token in C++; None where this module was not built.

`choose_drafts` does what `choose` in choice.py does, `learn_drafts` and `draft_gains` what
`Acceptance` does with chains (acceptance.py).
"""

from collections.abc import Callable
from typing import Any

try:
    import _slipstream_cpu as cpp
except ImportError:
    cpp = None

choose_drafts: Callable[..., Any] | None = getattr(cpp, "choose_drafts", None)
learn_drafts: Callable[..., int] | None = getattr(cpp, "learn_drafts", None)
draft_gains: Callable[..., list[list[float]]] | None = getattr(cpp, "draft_gains", None)
