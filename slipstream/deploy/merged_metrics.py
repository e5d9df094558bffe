"""The metrics of all replicas as one page, with a label that tells the replicas apart."""

import re
from collections.abc import Mapping

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
