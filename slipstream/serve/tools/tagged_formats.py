"""The formats of `tagged.py`, each given by its tags."""

from typing import Final

from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.tagged import BEGIN, END, TaggedParser, Tags
from slipstream.serve.tools.tagged_rules import TaggedRules


def _format(name: str, tags: Tags, *shown: str) -> ToolFormat:
    """Make a format; `shown` are the tags that, with `BEGIN`, identify it in a template."""
    rules = TaggedRules(name, tags)
    return ToolFormat(
        name=name,
        marks=tags.marks,
        parser=lambda functions, dropped: TaggedParser(tags, functions, dropped),
        shown_by=lambda template, _: all(map(template.mentions, (BEGIN, *shown))),
        only=rules.only,
        in_text=rules.in_text,
        calls=rules.calls,
    )


# <tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>, </tool_call>.
GLM45: Final = _format(
    "glm45",
    Tags(
        name="",
        name_end="",
        key="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        end=END,
        newlines=False,
    ),
    "<arg_key>",
    "<arg_value>",
)

# <tool_call><function=NAME>, <parameter=KEY>VALUE</parameter>, and closing tags. Another family has
# tags of another name around the rest.
QWEN3_CODER: Final = _format(
    "qwen3_coder",
    Tags(
        name="<function=",
        name_end=">",
        key="<parameter=",
        key_end=">",
        value="",
        value_end="</parameter>",
        end="</function>",
        newlines=True,
    ),
    "<function=",
    "<parameter=",
)
