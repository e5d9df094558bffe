"""The formats of whole answers by their names, and the one of a model."""

from collections.abc import Callable
from typing import Final

from slipstream.core.errors import UsageError
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.harmony import START, find_harmony
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.output.harmony import Harmony
from slipstream.serve.output.parts import OutputFormat

OFF: Final = "none"


def _harmony(tokenizer: Tokenizer) -> OutputFormat | None:
    tokens = find_harmony(tokenizer)
    return None if tokens is None else Harmony(tokens, tokenizer)


# The format, if a tokenizer has its tokens, by its name in --reasoning-parser.
OUTPUT_FORMATS: Final[dict[str, Callable[[Tokenizer], OutputFormat | None]]] = {
    Harmony.name: _harmony
}
# Formats of calls that go with a format of whole answers, by their names in --tool-call-parser.
CALLS_WITHIN: Final = {"openai": Harmony.name}


def choose_output_format(
    reasoning_parser: str | None,
    tool_call_parser: str | None,
    template: ChatTemplate,
    tokenizer: Tokenizer,
) -> OutputFormat | None:
    """The format of a model's answers; None for plain text.

    Args:
        reasoning_parser: a name, `OFF`, or None for what tokenizer and template show.
        tool_call_parser: a name, or None.

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
    if wanted is None:
        # A template without the marks writes another format, whatever the vocabulary holds.
        found = _harmony(tokenizer) if template.mentions(START) else None
    else:
        found = OUTPUT_FORMATS[wanted](tokenizer)
        if found is None:
            raise UsageError(
                f"{wanted} does not fit this model, whose tokenizer lacks the format's special "
                "tokens; leave --reasoning-parser and --tool-call-parser out"
            )
    if found is not None and tool_call_parser not in (None, *CALLS_WITHIN):
        raise UsageError(
            f"this model's answers are in the format {found.name}, which has tool calls of its "
            f"own; leave --tool-call-parser {tool_call_parser} out, or add --reasoning-parser {OFF}"
        )
    return found
