"""A chat about the weather with a model that thinks and calls a tool, whole and in pieces."""

from typing import Any

import openai

from tests.serve.api.live import call_api

MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


def create(client: openai.OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_completion_tokens": 120, **fields}
    return call_api(client.chat.completions.create, messages=messages, **given)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, str, list[list[str]], str]:
    """Reasoning, content, calls and the finish reason, put together as clients do."""
    reasoning, content, reason = "", "", ""
    calls: list[list[str]] = []
    for chunk in create(client, stream=True, **fields):
        for piece in chunk.choices:
            thought = getattr(piece.delta, "reasoning", None)
            assert thought == getattr(piece.delta, "reasoning_content", None)
            reasoning += thought or ""
            content += piece.delta.content or ""
            reason = piece.finish_reason or reason
            for call in piece.delta.tool_calls or []:
                if call.index == len(calls):
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments
    return reasoning, content, calls, reason
