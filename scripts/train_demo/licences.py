"""Decide from package metadata whether a package's source may be used: permissive licences only."""

from __future__ import annotations

import re
from email.message import Message

# Any of these words settles the matter: copyleft, proprietary or data licences stay out.
_REFUSED = re.compile(
    r"gpl|general public|mozilla|\bmpl|eupl|cddl|\bepl|eclipse|proprietary|nvidia|commercial"
    r"|eula|cc-by|creative commons|sspl|busl|all rights reserved",
    re.IGNORECASE,
)
_PERMISSIVE = re.compile(
    r"\bmit\b|\bbsd|bsd\b|\b0bsd|apache|python software foundation|\bpsf\b|psf-2|python-2"
    r"|\bisc\b|\bzlib\b|unlicense|\bcc0|hpnd|historical permission",
    re.IGNORECASE,
)
# A file that talks about one of these near its top may carry that licence itself.
_REFUSED_IN_FILE = re.compile(
    r"\b[AL]?GPL(v?[23])?\b|GNU (Lesser|Library|General|Affero)|Mozilla Public|Creative Commons",
)
_LONGEST_NAME = 80


def _terms(expression: str) -> list[str]:
    """The licence names of an SPDX expression, exceptions left out."""
    without_exceptions = re.sub(r"\s+WITH\s+[\w.-]+", "", expression, flags=re.IGNORECASE)
    parts = re.split(r"\s+(?:AND|OR)\s+|[()/,;]", without_exceptions, flags=re.IGNORECASE)
    return [part.strip() for part in parts if part.strip()]


def _all_permissive(names: list[str]) -> bool:
    """True if there are names and each is of a permissive licence."""
    return bool(names) and all(
        _PERMISSIVE.search(name) and not _REFUSED.search(name) for name in names
    )


def permissive_licence(metadata: Message) -> str | None:
    """The package's licence if it is permissive beyond doubt, else None.

    The order is that of reliability: the SPDX ``License-Expression``, the trove classifiers, then
    a short ``License`` field. A dual licence with a copyleft half is refused, too: it is simpler
    to lose a package than to argue about it.
    """
    expression = str(metadata.get("License-Expression") or "").strip()
    if expression:
        return expression if _all_permissive(_terms(expression)) else None
    free_text = str(metadata.get("License") or "").strip()
    short = free_text if len(free_text) <= _LONGEST_NAME and "\n" not in free_text else ""
    if short and _REFUSED.search(short):
        return None
    classifiers = [
        str(value).rsplit("::", 1)[1].strip()
        for key, value in metadata.items()
        if key == "Classifier" and str(value).startswith("License ::") and "::" in str(value)
    ]
    classifiers = [name for name in classifiers if name not in {"OSI Approved", "Dual License"}]
    if classifiers:
        return " AND ".join(sorted(classifiers)) if _all_permissive(classifiers) else None
    return short if short and _all_permissive(_terms(short)) else None


def mentions_refused_licence(head: str) -> bool:
    """True if the top of a file names a licence that is not permissive."""
    return _REFUSED_IN_FILE.search(head) is not None
