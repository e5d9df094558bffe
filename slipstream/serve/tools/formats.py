"""The formats of tool calls by name, and the search for a model's format.

To add a format, write a file with its parser and its `ToolFormat`, and add a line here.
"""

from typing import Final

from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.tools import hermes, llama3, mistral, pythonic
from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.tagged import BEGIN, TaggedParser, Tags
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
        end="</tool_call>",
        newlines=False,
    ),
    "<arg_key>",
    "<arg_value>",
)

# <tool_call><function=NAME>, <parameter=KEY>VALUE</parameter>, and closing tags. One family has
# another name in place of tool_call.
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

# in the order in which a checkpoint is checked for them
FORMATS: Final = {
    it.name: it
    for it in (mistral.FORMAT, QWEN3_CODER, GLM45, hermes.FORMAT, pythonic.FORMAT, llama3.FORMAT)
}

# vLLM's names of formats
_ALIASES: Final = {
    "qwen3_xml": QWEN3_CODER,
    "qwen3_json": hermes.FORMAT,
    "glm47": GLM45,
    "llama4_json": llama3.FORMAT,
    "llama4_pythonic": pythonic.FORMAT,
}
NAMED: Final = {**FORMATS, **_ALIASES}


def find_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the model's template and vocabulary show; None if there is none."""
    return next((it for it in FORMATS.values() if it.shown_by(template, tokenizer)), None)
