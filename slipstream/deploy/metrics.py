"""The metrics of all replicas as one page, with a label that tells them apart; and the front's."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+.*)")
_ENDINGS = ("_total", "_created", "_bucket", "_sum", "_count")


def merged(pages: Mapping[str, str]) -> str:
    """The pages of all replicas as one, in Prometheus's text format, by family."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        for line in page.splitlines():
            comment = _COMMENT.match(line)
            if comment:
                lines = comments.setdefault(comment[1], [])
                if line not in lines:
                    lines.append(line)
                continue
            sample = _SAMPLE.fullmatch(line)
            if sample:
                name, labels, value = sample.groups()
                family = _family(name, comments)
                own = f'replica="{replica}"' + (f",{labels}" if labels else "")
                samples.setdefault(family, []).append(f"{name}{{{own}}} {value}")
    lines = [line for name in comments for line in (*comments[name], *samples.pop(name, ()))]
    return "\n".join([*lines, *(line for left in samples.values() for line in left), ""])


def _family(name: str, known: Mapping[str, object]) -> str:
    if name in known:
        return name
    for ending in _ENDINGS:
        if name.endswith(ending) and name.removesuffix(ending) in known:
            return name.removesuffix(ending)
    return name


@dataclass
class Counts:
    """Counters of the front's requests.

    Attributes:
        retried: requests that were sent to another replica because the first had died.
        refused: requests sent to another replica because the first was full or about to stop.
        lost: answers that ended early.
    """

    retried: int = 0
    refused: int = 0
    lost: int = 0
    sent: Counter[str] = field(default_factory=Counter)

    def page(self) -> str:
        """The metrics in Prometheus's text format."""
        lines = []
        for name, text, value in (
            ("requests_retried", "Requests sent again because a replica had died", self.retried),
            ("requests_rerouted", "Requests that a stopping or full replica refused", self.refused),
            ("answers_lost", "Answers that broke off with their replica", self.lost),
        ):
            full = f"slipstream:front_{name}"
            lines += [f"# HELP {full}_total {text}", f"# TYPE {full}_total counter"]
            lines.append(f"{full}_total {value}.0")
        full = "slipstream:front_requests_total"
        lines += [f"# HELP {full} Requests sent to a replica", f"# TYPE {full} counter"]
        lines += [f'{full}{{replica="{name}"}} {count}.0' for name, count in self.sent.items()]
        return "\n".join([*lines, ""])
