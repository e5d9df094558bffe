"""Write the table of request fields in docs/protocol.md, from the types that requests are read by.

python -m scripts.protocol_fields
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slipstream.core.sampling_params import SamplingParams
from slipstream.serve.protocol.chat import ChatRequest
from slipstream.serve.protocol.completions import CompletionRequest

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"
BEGIN, END = "<!-- fields: written by scripts/protocol_fields.py -->\n", "<!-- end of fields -->\n"

# Defaults that follow from more than the field; others are those of `SamplingParams`, false for a
# boolean, and none.
DEFAULTS: Mapping[str, str] = {
    "add_generation_prompt": "true, but false with `continue_final_message`",
    "add_special_tokens": "true for completions, false for chats",
    "best_of": "`n`",
    "chat_template": "the model's, or `--chat-template`",
    "chat_template_kwargs": "`--default-chat-template-kwargs`",
    "include_reasoning": "true",
    "max_completion_tokens": "what `max_model_len` leaves",
    "max_tokens": "16 for completions, what `max_model_len` leaves for chats",
    "messages": "required",
    "model": "the served one",
    "parallel_tool_calls": "true",
    "priority": "0",
    "prompt": "required",
    "reasoning_effort": "the template's",
    "request_id": "a random one",
    "return_tokens_as_token_ids": "`--return-tokens-as-token-ids`",
    "response_format": "`text`",
    "seed": "random numbers of its own for each request",
    "spaces_between_special_tokens": "true",
    "speculative": "the server's K",
    "stream_interval": "`--stream-interval`",
    "thinking_token_budget": "no limit",
    "tool_choice": "`auto` with `tools`, else `none`",
    "top_logprobs": "0",
    "truncation_side": "`left`",
}
_LARGE = 1 << 31  # larger bounds are those of the number's kind
_KINDS = {"array": "list", "boolean": "true or false", "string": "text"}
_LIMITS = {
    "array": ("minItems", "maxItems", "entries"),
    "string": ("minLength", "maxLength", "characters"),
}
_OF_NUMBERS = ("minimum", "maximum", "")
_EMPTY = ("", "empty ")


def table() -> str:
    """The table of all fields."""
    schemas: dict[str, type[BaseModel]] = {"completions": CompletionRequest, "chats": ChatRequest}
    found: dict[str, dict[str, str]] = {}
    for kind, body in schemas.items():
        schema = body.model_json_schema()
        for name, it in schema["properties"].items():
            values = " or ".join(dict.fromkeys(_values(it, schema["$defs"])))
            found.setdefault(name, {})[kind] = values
    assert not DEFAULTS.keys() - found.keys(), "a default of no field"
    lines = ["| field | of | values | default |", "|---|---|---|---|"]
    for name, of in sorted(found.items()):
        values = next(iter(of.values()))
        if len({*of.values()}) > 1:
            values = "; ".join(f"{kind}: {it}" for kind, it in of.items())
        kinds = "both" if len(of) > 1 else next(iter(of))
        lines.append(f"| `{name}` | {kinds} | {values} | {_default(name, values)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with its table as it should be."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def _default(name: str, values: str) -> str:
    if name in DEFAULTS:
        return DEFAULTS[name]
    own = {it.name: it.default for it in fields(SamplingParams)}.get(name, MISSING)
    if own is MISSING or own is None or own == ():
        return "false" if values.endswith("false") else "none"
    return str(own).lower() if isinstance(own, bool) else f"{own:g}"


def _values(schema: Mapping[str, Any], types: Mapping[str, Any]) -> Iterator[str]:
    """The values that a field may have, in words."""
    if "$ref" in schema:
        schema = types[schema["$ref"].rpartition("/")[2]]
    options = schema.get("anyOf") or schema.get("oneOf")
    kind = schema.get("type")
    if options is not None:
        for option in options:
            yield from _values(option, types)
    elif "const" in schema or "enum" in schema:
        for value in schema.get("enum", [schema.get("const")]):
            yield f"`{value}`" if isinstance(value, str) else str(value).lower()
    elif kind == "object":
        yield _object(schema)
    elif kind not in (None, "null"):
        yield _KINDS.get(kind, kind) + _bounds(schema, *_LIMITS.get(kind, _OF_NUMBERS))


def _object(schema: Mapping[str, Any]) -> str:
    named = ", ".join(f"`{name}`" for name in schema.get("properties", ()))
    return f"object with {named}" if named else f"{_EMPTY[schema.get('maxProperties') == 0]}object"


def _bounds(schema: Mapping[str, Any], low: str, high: str, unit: str) -> str:
    least = schema.get(low, schema.get("exclusiveMinimum"))
    most = schema.get(high, schema.get("exclusiveMaximum"))
    least = None if least is None or abs(least) >= _LARGE or (unit and least <= 1) else least
    most = None if most is None or most >= _LARGE - 1 else most
    end = f" {unit}" if unit else ""
    if least is not None and "exclusiveMinimum" in schema:
        return f" above {least:g}" + (f", at most {most:g}{end}" if most is not None else "")
    if least is not None and most is not None:
        return f" from {least:g} to {most:,g}{end}"
    if least is not None:
        return f" of at least {least:g}{end}"
    return "" if most is None else f" of at most {most:,}{end}"


if __name__ == "__main__":
    PAGE.write_text(page())
