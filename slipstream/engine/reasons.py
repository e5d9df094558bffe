"""What was derived, and why."""

import logging

logger = logging.getLogger("slipstream")


class Reasons:
    """Collects what was derived and why, and logs it."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str]] = []

    def add(self, name: str, value: object, why: str) -> None:
        self._rows.append((name, str(value), why))
        logger.info("%s = %s (%s)", name, value, why)

    @property
    def rows(self) -> tuple[tuple[str, str, str], ...]:
        return tuple(self._rows)
