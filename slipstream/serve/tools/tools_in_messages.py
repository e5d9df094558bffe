"""Tools for chat templates without support for them: messages describe them in Hermes format."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from slipstream.core.errors import UsageError
from slipstream.serve.tools.hermes import BEGIN, END

Messages = Sequence[dict[str, Any]]

_RESULT, _RESULT_END = "<tool_response>", "</tool_response>"
_INSTRUCTIONS: Final = f"""# Tools

You may call functions to answer. Each line between <tools> and </tools> describes one:
<tools>
TOOLS
</tools>

To call a function, write its name and its arguments as one JSON object between {BEGIN} tags:
{BEGIN}
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
{END}
Several calls may follow each other. What they return comes between {_RESULT} tags."""


def write_with_tools(
    write: Callable[[Messages], str], messages: Messages, tools: Sequence[Mapping[str, Any]] | None
) -> str:
    """Render a conversation with a chat template that supports neither tools nor calls.

    Tools are described at the end of the system message, or else in the first user message. Calls
    become part of the text of their answers, and results become user messages.

    Args:
        write: renders the template, which may refuse roles (UsageError).
        tools: the tools that may be called.

    Raises:
        UsageError: the template refuses the messages, or leaves the tools out.
    """
    plain = _as_text(messages)
    if not tools:
        return write(plain)
    instructions = _INSTRUCTIONS.replace("TOOLS", "\n".join(_json(tool) for tool in tools))
    try:
        text = write(_with_system(plain, instructions))
        if instructions in text:
            return text
    except UsageError:
        pass
    text = write(_with_first_user(plain, instructions))
    if instructions not in text:
        raise UsageError(
            "the chat template of this model does not support tools, and drops the message that "
            "describes them; leave tools out, or use a chat template that supports them"
        )
    return text


def _with_system(messages: Messages, instructions: str) -> Messages:
    first, *others = messages
    if first["role"] != "system":
        return [{"role": "system", "content": instructions}, *messages]
    return [{**first, "content": _joined(first["content"], f"\n\n{instructions}")}, *others]


def _with_first_user(messages: Messages, instructions: str) -> Messages:
    found = [*messages]
    for place, message in enumerate(found):
        if message["role"] == "user":
            content = _joined(f"{instructions}\n\n", message["content"])
            found[place] = {**message, "content": content}
            break
    return found


def _as_text(messages: Messages) -> list[dict[str, Any]]:
    """Convert calls and their results to text; results of an answer's calls share a message."""
    plain: list[dict[str, Any]] = []
    in_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            result = _joined(f"{_RESULT}\n", message["content"], f"\n{_RESULT_END}")
            if in_results:
                plain[-1]["content"] = _joined(plain[-1]["content"], "\n", result)
            else:
                plain.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            calls = (f"{BEGIN}\n{_json(it['function'])}\n{END}" for it in message["tool_calls"])
            texts = [_joined(message["content"])] if message.get("content") else []
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append({**kept, "content": "\n".join([*texts, *calls])})
        else:
            plain.append(message)
        in_results = is_result
    return plain


def _joined(*contents: str | list[dict[str, Any]]) -> Any:
    """Join contents to a text, or to a list of parts if there are images."""
    if all(isinstance(it, str) or all("text" in part for part in it) for it in contents):
        texts = (it if isinstance(it, str) else "\n".join(x["text"] for x in it) for it in contents)
        return "".join(texts)
    parts = ([{"type": "text", "text": it}] if isinstance(it, str) else it for it in contents)
    return [part for it in parts for part in it]


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
