"""GLM: <tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>, </tool_call>."""

from typing import Final

from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.tagged import BEGIN, END, TaggedParser, Tags
from slipstream.serve.tools.tagged_rules import TaggedRules

TAGS: Final = Tags(
    name="",
    name_end="",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    end=END,
    newlines=False,
)
_RULES: Final = TaggedRules("glm45", TAGS)

FORMAT: Final = ToolFormat(
    name="glm45",
    marks=TAGS.marks,
    parser=lambda functions, dropped: TaggedParser(TAGS, functions, dropped),
    shown_by=lambda template, _: all(map(template.mentions, (BEGIN, TAGS.key, TAGS.value))),
    only=_RULES.only,
    amid=_RULES.amid,
    calls=_RULES.calls,
)
