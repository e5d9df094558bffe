"""The tools of a request, and what `tool_choice` asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.conversation import require_tools
from slipstream.serve.errors import bad_request
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol.chat import ChatRequest, ChosenTool, Tool
from slipstream.serve.tools.call_format import CallFormat, Schemas, ToolFormat
from slipstream.serve.tools.call_rules import require_well_formed
from slipstream.serve.tools.events import ToolParser


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request.

    Attributes:
        in_prompt: the tools that the chat template writes into the prompt.
        format: the format of tool calls; None if the answer has none.
        functions: the functions that may be called, with the schemas of their arguments.
        single: whether the answer ends after its first call.
        grammar: the grammar that constrains the answer; None if it may be any text.
        only_calls: whether the answer consists of calls, so that it has no content.
    """

    in_prompt: Sequence[Tool] | None = None
    format: CallFormat | None = None
    functions: Schemas = field(default_factory=dict)
    single: bool = False
    grammar: str | None = None
    only_calls: bool = False

    def keeps_special(self, tokenizer: Tokenizer) -> bool:
        """Whether marks of calls are special tokens, so that the text must include these."""
        return not self.marks(tokenizer).isdisjoint(tokenizer.special_token_ids)

    def marks(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The marks of calls that are single tokens."""
        marks = self.format.marks if isinstance(self.format, ToolFormat) else ()
        found = (tokenizer.token_to_id(mark) for mark in marks)
        return frozenset(token for token in found if token is not None)

    def parser(self, tokenizer: Tokenizer, skip_special: bool) -> ToolParser | None:
        """A parser for the text of one answer; None without tools."""
        if not isinstance(self.format, ToolFormat):
            return None
        dropped: list[str] = []
        if skip_special and self.keeps_special(tokenizer):
            spelled = map(tokenizer.id_to_token, sorted(tokenizer.special_token_ids))
            dropped = [token for token in spelled if token is not None]
        return self.format.parser(_functions(self.in_prompt or ()), dropped)


def choose_tools(body: ChatRequest, model: ModelService) -> ToolUse:
    """The tools of a request; raises ApiError if `tool_choice` is not possible."""
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if not body.tools:
        if choice != "none":
            raise bad_request(
                "tool_choice goes with tools; give tools, or leave it out", "tool_choice"
            )
        if body.parallel_tool_calls is not None:
            raise bad_request(
                "parallel_tool_calls goes with tools; give tools, or leave it out",
                "parallel_tool_calls",
            )
        return ToolUse()
    functions = _functions(body.tools)
    if choice == "none":
        return ToolUse()
    require_tools(model)
    format = model.tool_format
    if format is None:
        raise bad_request(
            "the format of this model's tool calls is not known; start the server with "
            "--tool-call-parser, or ask for tool_choice none",
            "tools",
        )
    single = body.parallel_tool_calls is False
    if choice == "auto":
        grammar = None
        strict = [tool.function.name for tool in body.tools if tool.function.strict]
        if strict:  # other functions may have any arguments
            schemas = {name: functions[name] if name in strict else {} for name in functions}
            grammar = format.calls_in_text(_well_formed(schemas), model.tokenizer)
        return ToolUse(body.tools, format, functions, single, grammar)
    if isinstance(choice, ChosenTool):
        name = choice.function.name
        if name not in functions:
            raise bad_request(f"tool_choice names {name}, which is not in tools", "tool_choice")
        functions, single = {name: functions[name]}, True
    grammar = format.only_calls(_well_formed(functions), model.tokenizer, several=not single)
    return ToolUse(body.tools, format, functions, single, grammar, only_calls=True)


def _functions(tools: Sequence[Tool]) -> Schemas:
    functions = {tool.function.name: tool.function.parameters or {} for tool in tools}
    if len(functions) < len(tools):
        raise bad_request("two tools have the same name; give each its own", "tools")
    return functions


def _well_formed(functions: Schemas) -> Schemas:
    for name, schema in functions.items():
        require_well_formed(name, schema)
    return functions
