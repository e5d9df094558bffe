"""Qwen3-Coder: <tool_call><function=NAME>, <parameter=KEY>VALUE</parameter>, and closing tags."""

from typing import Final

from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.tagged import BEGIN, TaggedParser, Tags
from slipstream.serve.tools.tagged_rules import TaggedRules

TAGS: Final = Tags(
    name="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value="",
    value_end="</parameter>",
    end="</function>",
    newlines=True,
)
_RULES: Final = TaggedRules("qwen3_coder", TAGS)

FORMAT: Final = ToolFormat(
    name="qwen3_coder",
    marks=TAGS.marks,
    parser=lambda functions, dropped: TaggedParser(TAGS, functions, dropped),
    # Another family has tags of another name around the rest.
    shown_by=lambda template, _: all(map(template.mentions, (BEGIN, TAGS.name, TAGS.key))),
    only=_RULES.only,
    amid=_RULES.amid,
    calls=_RULES.calls,
)
