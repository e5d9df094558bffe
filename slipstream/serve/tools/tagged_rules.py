"""The grammars of formats of `tagged.py`."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from slipstream.serve.tools.call_format import Schemas
from slipstream.serve.tools.call_rules import Literals, json_value, more_calls
from slipstream.serve.tools.tagged import BEGIN, END, Tags
from slipstream.serve.tools.typed_arguments import NOTES, SeparateArguments, resolved, types_of

_OF_TEXTS: Final = NOTES | {"minLength", "maxLength", "pattern", "format"}
_DATE: Final = (
    "[0-9]{4}-(02-(0[1-9]|[12][0-9])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01]))"
)
_HOUR: Final = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR})"
# Values of a schema's `format` (RFC 3339 and 9562) as regular expressions.
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
_MOST_BRANCHES = 64


@dataclass(frozen=True)
class TaggedRules:
    """Writes the grammars; UsageError for schemas that plain text cannot satisfy."""

    format: str
    tags: Tags

    @property
    def _gap(self) -> str:
        return '"\\n"' if self.tags.newlines else '"\\n"?'

    def _marked(self, literal: Literals, call: str) -> str:
        """An expression for the text after BEGIN."""
        end = "" if self.tags.end == END else f" {self._gap} {literal(END)}"
        return (f"{self._gap} " if self.tags.newlines else "") + call + end

    def only(self, literal: Literals, several: bool) -> list[str]:
        more = more_calls('"\\n" marked', several)
        return [f"start: marked{more}", f"marked: {literal(BEGIN)} {self._marked(literal, 'call')}"]

    def in_text(self, literal: Literals) -> list[str]:
        rules = [literal.up_to_mark("begun", BEGIN), f"marked: {self._marked(literal, 'call')}"]
        if not self.tags.name:
            return ["start: (begun marked)* TEXT", *rules]
        bare = literal.up_to_mark("bare", self.tags.name)
        return ["start: (begun marked | bare named)* TEXT", *rules, bare]

    def calls(self, literal: Literals, functions: Schemas) -> list[str]:
        tags, names = self.tags, [f"named_{index}" for index in range(len(functions))]
        opening = f"{literal(tags.name)} " if tags.name else ""
        rules = [f"call: {opening}named", f"named: {' | '.join(names)}"]
        for rule, (name, function) in zip(names, functions.items(), strict=True):
            named = json.dumps(name + tags.name_end)
            arguments = SeparateArguments(self.format, name, function)
            rules += _Function(self, literal, arguments).rules(
                rule, f"{named} {self._gap}", literal(tags.end)
            )
        return rules


@dataclass(frozen=True)
class _Function:
    """The rules of one function's arguments, in the order of its schema."""

    format: TaggedRules
    literal: Literals
    arguments: SeparateArguments

    def rules(self, rule: str, begin: str, end: str) -> list[str]:
        schemas = self.arguments.schemas()
        if schemas is None:
            key = f"/[^\\s{self.format.tags.key_end[0]}]{{1,64}}/"
            return [
                f"{rule}: {begin} {rule}_any* {end}",
                f"{rule}_any: {self._argument(key, f'{rule}_text')}",
                self._text(f"{rule}_text", {}),
            ]
        found, parts = [], []
        for index, (key, schema) in enumerate(schemas.items()):
            part = f"{rule}_{index}"
            parts.append(part if key in self.arguments.required else f"{part}?")
            spelled = self._spelled(key, self.format.tags.key_end)
            found.append(f"{part}: {self._argument(spelled, f'{part}_value')}")
            found += self._value(f"{part}_value", key, schema)
        return [f"{rule}: {begin} {' '.join(parts)} {end}", *found]

    def _argument(self, key: str, value: str) -> str:
        tags, gap = self.format.tags, self.format._gap
        between = f"{gap} {self.literal(tags.value)}" if tags.value else gap
        return (
            f"{self.literal(tags.key)} {key} {self.literal(tags.key_end)} {between} {value} {gap}"
        )

    def _value(self, rule: str, key: str, schema: object) -> list[str]:
        """Add the rule of an argument's text and the tag after it."""
        newline = '"\\n" ' if self.format.tags.newlines else ""
        end = f"{newline}{self.literal(self.format.tags.value_end)}"
        texts, choices, rules = [], [], []
        for index, branch in enumerate(self._branches(f"its argument {key!r}", schema)):
            if isinstance(branch, str):
                texts.append(self._spelled(branch, self.format.tags.value_end))
            elif "string" not in types_of(branch, self.arguments.schema):
                choices.append(f"{json_value(branch)} {end}")
            else:
                choices.append(f"{rule}_{index}")
                rules.append(self._text(f"{rule}_{index}", branch))
        if texts:  # one terminal, since the number of a rule's alternatives is limited
            choices.append(f"{rule.upper()}_ONE {end}")
            rules.append(f"{rule.upper()}_ONE: {' | '.join(texts)}")
        return [f"{rule}: {' | '.join(choices)}", *rules]

    def _branches(self, what: str, schema: object) -> Iterator[str | Mapping[str, Any]]:
        """The alternatives of an argument: fixed texts, schemas of texts, and schemas of JSON."""
        arguments, function = self.arguments, self.arguments.schema
        waiting, num_branches = [schema], 0
        while waiting:
            found, num_branches = resolved(waiting.pop(0), function), num_branches + 1
            if num_branches > _MOST_BRANCHES:
                raise arguments.error(what, f"more than {_MOST_BRANCHES} alternatives")
            types = types_of(found, function)
            union = "anyOf" if "anyOf" in found else "oneOf"
            if "string" not in types:
                yield arguments.whole(found)
            elif "enum" in found or "const" in found:
                for value in found.get("enum", [found.get("const")]):
                    yield value if isinstance(value, str) else json.dumps(value)
            elif union in found:
                arguments.require(what, found, NOTES | {union})
                waiting = [*found[union], *waiting]
            else:
                others = sorted(types - {"string"})
                if others:
                    yield arguments.whole({**found, "type": others})
                arguments.require(what, found, _OF_TEXTS)
                if found.get("format", "date") not in (*_FORMATS,):
                    raise arguments.error(what, f"the format {found['format']!r}")
                yield found

    def _text(self, rule: str, schema: Mapping[str, Any]) -> str:
        """A text that does not contain the tag after it, and the tag."""
        mark = self.format.tags.value_end
        limits = [_pattern(schema["pattern"])] if "pattern" in schema else []
        if "format" in schema:
            limits.append(_FORMATS[schema["format"]])
        if "minLength" in schema or "maxLength" in schema:
            limits.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
        if not limits:
            return self.literal.up_to_mark(rule, mark)
        return self.literal.limited(rule, mark, limits, self.format.tags.newlines)

    def _spelled(self, text: str, mark: str) -> str:
        if mark in text:
            raise self.arguments.error(f"the text {text!r}", mark)
        return json.dumps(text)


def _pattern(pattern: str) -> str:
    """Convert a schema's pattern, which may match anywhere in a text, to one for whole texts."""
    inner = pattern.removeprefix("^")
    end = "" if re.search(r"(?<!\\)(\\\\)*\$$", inner) else "(?s:.*)"
    start = "(?s:.*)" if inner == pattern else ""
    return f"{start}(?:{inner if end else inner[:-1]}){end}"
