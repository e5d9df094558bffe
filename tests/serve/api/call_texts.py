"""Tool calls as the families of models write them."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

Call = tuple[str, dict[str, Any]]  # name and arguments


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json(call, 'arguments')}\n</tool_call>" for call in calls)


def _llama3(calls: Sequence[Call]) -> str:
    return "; ".join(_json(call, "parameters") for call in calls)


def _mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS][{', '.join(_json(call, 'arguments') for call in calls)}]"


def newer_mistral(calls: Sequence[Call]) -> str:
    """Mistral's calls since its vocabulary has a mark before the arguments."""
    told = (f"{name}[ARGS]{json.dumps(it, ensure_ascii=False)}" for name, it in calls)
    return "".join(f"[TOOL_CALLS]{it}" for it in told)


def _qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        "".join(
            [
                f"<tool_call>\n<function={name}>\n",
                *(f"<parameter={key}>\n{_text(it)}\n</parameter>\n" for key, it in given.items()),
                "</function>\n</tool_call>",
            ]
        )
        for name, given in calls
    )


def _glm45(calls: Sequence[Call]) -> str:
    return "\n".join(
        "".join(
            [
                f"<tool_call>{name}\n",
                *(
                    f"<arg_key>{key}</arg_key>\n<arg_value>{_text(it)}</arg_value>\n"
                    for key, it in given.items()
                ),
                "</tool_call>",
            ]
        )
        for name, given in calls
    )


def _pythonic(calls: Sequence[Call]) -> str:
    told = (f"{name}({', '.join(map(_keyword, given.items()))})" for name, given in calls)
    return f"[{', '.join(told)}]"


def _keyword(argument: tuple[str, object]) -> str:
    return f"{argument[0]}={json.dumps(argument[1], ensure_ascii=False)}"


def _json(call: Call, arguments: str) -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


SAID: Final[dict[str, Callable[[Sequence[Call]], str]]] = {
    "hermes": _hermes,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
    "pythonic": _pythonic,
}
