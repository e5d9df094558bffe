"""The formats of tool calls by name, and the search for a model's format.

To add a format, write a file with its parser and its `ToolFormat`, and add a line here.
"""

from typing import Final

from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.tools import hermes, llama3, mistral, pythonic
from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.tagged_formats import GLM45, QWEN3_CODER

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
