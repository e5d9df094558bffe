"""Lark rules (of llguidance) of outputs that begin with a thought between two marks.

Within a thought any token may stand but its closing mark, and end tokens where more has to follow.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ThoughtRules:
    """Rules for marks that are tokens.

    Args:
        opening, closing: the marks.
        ends: end tokens of the model.
        breaks: tokens that are nothing but line breaks.
        begun: the output begins in a thought, of which an opening mark is then part.
        budget: most tokens of the thought; None if there is no limit.
    """

    opening: int
    closing: int
    ends: Sequence[int]
    breaks: Sequence[int]
    begun: bool
    budget: int | None

    def before_body(self) -> str:
        """A frame of `StructuredOutput`: the rule `body` begins behind the thought."""
        start = "thought" if self.begun else f"(space <[{self.opening}]> thought)?"
        rules = [f"start: {start} body", f"thought: {_free(self.budget)} <[{self.closing}]> space"]
        return "\n".join([*rules, self._free_rule, self._space("{0,2}")])

    def budget_alone(self) -> str:
        """A grammar of outputs that may be anything once the thought is closed."""
        assert self.budget is not None
        # An output may end within its thought, but not where the closing mark is due.
        early = f" | {_free(self.budget - 1)}" if self.budget else ""
        rules = [
            f"thought: {_free(self.budget)} <[{self.closing}]> any*{early}",
            self._free_rule,
            f"any: {_none_of(self.ends)}",
        ]
        if self.begun:
            return "\n".join(["start: thought", *rules])
        start = f"start: space (<[{self.opening}]> thought | (other any*)?)"
        other = f"other: {_none_of([self.opening, *self.breaks, *self.ends])}"
        return "\n".join([start, *rules, other, self._space("*")])

    @property
    def _free_rule(self) -> str:
        return f"free: {_none_of([self.closing, *self.ends])}"

    def _space(self, times: str) -> str:
        return f"space: <[{_list(self.breaks)}]>{times}" if self.breaks else 'space: ""'


def _free(most: int | None) -> str:
    if most == 0:
        return '""'
    return "free*" if most is None else f"free{{0,{most}}}"


def before_body_in_text(opening: str, closing: str, begun: bool) -> str:
    """A frame like that of `ThoughtRules`, for marks that are texts.

    Args:
        begun: as of `ThoughtRules`.
    """
    gap = '("\\n" | "\\n\\n")?'
    rule = _up_to("thought", "" if begun else opening, closing)
    start = "thought" if begun else f"({gap} thought)?"
    return f"start: {start} {gap} body\n{rule}"


def _up_to(rule: str, opening: str, closing: str) -> str:
    first, last = (re.escape(mark).replace("/", "\\/") for mark in (opening, closing))
    return f"{rule}[lazy]: /{first}(.|\\n)*{last}/"


def _none_of(tokens: Collection[int]) -> str:
    return f"<[^{_list(tokens)}]>" if tokens else "<[*]>"


def _list(tokens: Collection[int]) -> str:
    return ",".join(map(str, sorted(set(tokens))))
