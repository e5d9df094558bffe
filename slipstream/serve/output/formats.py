"""The formats of whole answers by their names, and the one of a model."""

from collections.abc import Sequence
from typing import Final

from slipstream.core.errors import UsageError
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.harmony import START, find_harmony
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.output.harmony import Harmony
from slipstream.serve.output.parts import OutputFormat
from slipstream.serve.output.thinking import STYLES, ThinkingFormat

OFF: Final = "none"


_STYLES: Final = {style.name: style for style in STYLES}
# In --reasoning-parser.
OUTPUT_FORMATS: Final = (*_STYLES, Harmony.name)
# Formats of calls that go with a format of whole answers, by their names in --tool-call-parser.
CALLS_WITHIN: Final = {"openai": Harmony.name}


def choose_output_format(
    reasoning_parser: str | None,
    tool_call_parser: str | None,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    ends: Sequence[int] = (),
) -> OutputFormat | None:
    """The format of a model's answers; None for plain text.

    Args:
        reasoning_parser: a name, `OFF`, or None for what tokenizer and template show.
        ends: end tokens of the model.

    Raises:
        UsageError: names that contradict each other, or the tokenizer.
    """
    wanted = reasoning_parser
    if tool_call_parser in CALLS_WITHIN:
        wanted = CALLS_WITHIN[tool_call_parser]
        if reasoning_parser not in (None, wanted):
            raise UsageError(
                f"--tool-call-parser {tool_call_parser} goes with --reasoning-parser {wanted}, not "
                f"{reasoning_parser}; leave one of them out"
            )
    if wanted == OFF:
        return None
    # A template without the marks writes another format, whatever the vocabulary holds.
    if wanted == Harmony.name or (wanted is None and template.mentions(START)):
        tokens = find_harmony(tokenizer)
        if tokens is not None:
            return _with_calls(Harmony(tokens, tokenizer), tool_call_parser)
        if wanted is not None:
            raise UsageError(
                f"{wanted} does not fit this model, whose tokenizer lacks the format's special "
                "tokens; leave --reasoning-parser and --tool-call-parser out"
            )
    if wanted is not None:
        return ThinkingFormat(_STYLES[wanted], tokenizer, template, ends)
    found = next((style for style in STYLES if template.mentions(style.closing)), None)
    return None if found is None else ThinkingFormat(found, tokenizer, template, ends)


def _with_calls(found: Harmony, tool_call_parser: str | None) -> Harmony:
    if tool_call_parser not in (None, *CALLS_WITHIN):
        raise UsageError(
            f"this model's answers are in the format {found.name}, which has tool calls of its "
            f"own; leave --tool-call-parser {tool_call_parser} out, or add --reasoning-parser {OFF}"
        )
    return found
