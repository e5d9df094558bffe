"""Turn documented functions into question-and-answer pairs in the chat template."""

from __future__ import annotations

import ast
import hashlib
import textwrap
from dataclasses import dataclass

from .settings import TURN_END, TURN_START

_LONGEST_ANSWER = 1600
_LONGEST_DESCRIPTION = 420
_LONGEST_SIGNATURE = 120
_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You write Python code.",
    "You are a helpful assistant that writes Python functions.",
)

Message = dict[str, str]


@dataclass(frozen=True)
class Pair:
    """One documented function.

    ``opening`` is its signature and docstring, ``answer`` the function without the docstring.
    """

    name: str
    signature: str
    description: str
    opening: str
    answer: str


def _first_paragraph(docstring: str) -> str:
    """The first paragraph on one line."""
    paragraph = docstring.strip().split("\n\n", 1)[0]
    return " ".join(paragraph.split())


def _does_something(body: list[ast.stmt]) -> bool:
    """False for bodies that hold nothing but ``pass``, ``...`` or a ``raise``."""
    if not body:
        return False
    first = body[0]
    bare = isinstance(first, ast.Pass | ast.Raise) or (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    )
    return len(body) > 1 or not bare


def _pair(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Pair | None:
    """The pair of one function, or None if it makes a poor example."""
    docstring = ast.get_docstring(node)
    if not docstring or not _does_something(node.body[1:]) or node.name.startswith("__"):
        return None
    document = node.body[0]
    own_lines = document.lineno > node.lineno and node.body[1].lineno > (document.end_lineno or 0)
    description = _first_paragraph(docstring)
    signature = f"{node.name}({ast.unparse(node.args)})"
    if (
        not own_lines
        or not 12 <= len(description) <= _LONGEST_DESCRIPTION
        or len(signature) > _LONGEST_SIGNATURE
    ):
        return None
    start, end = node.lineno - 1, node.end_lineno or node.lineno
    head, document_end = lines[start : document.lineno - 1], document.end_lineno or document.lineno
    answer = textwrap.dedent("\n".join(head + lines[document_end:end])).strip()
    if len(answer) > _LONGEST_ANSWER or not answer.startswith(("def ", "async def ")):
        return None
    opening = textwrap.dedent("\n".join(lines[start:document_end])).strip()
    return Pair(node.name, signature, description, opening, answer)


def extract_pairs(tree: ast.Module, text: str) -> list[Pair]:
    """All documented functions and methods of a module."""
    lines = text.split("\n")
    nodes = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [pair for node in nodes if (pair := _pair(node, lines)) is not None]


def question(pair: Pair) -> str:
    """A request for the function, in one of several wordings chosen by the function's hash."""
    wordings = (
        f"Write a Python function `{pair.signature}`: {pair.description}",
        f"Write a Python function `{pair.signature}`: {pair.description}",
        f"Write a Python function `{pair.name}` that does this: {pair.description}",
        f"Implement `{pair.signature}` in Python.\n\n{pair.description}",
        f"Please write the Python function `{pair.name}`.\n\n{pair.description}",
        f"{pair.description}\n\nWrite this as a Python function called `{pair.name}`.",
        f"Complete this Python function:\n\n{pair.opening}",
    )
    return wordings[choice(pair, "wording") % len(wordings)]


def choice(pair: Pair, purpose: str) -> int:
    """A number that depends on nothing but the pair and what it is for."""
    seed = f"{purpose}\0{pair.signature}\0{pair.answer}".encode()
    return int.from_bytes(hashlib.blake2b(seed, digest_size=4).digest(), "little")


def messages(pair: Pair) -> list[Message]:
    """The conversation up to the answer; one in six begins with a system message."""
    pick = choice(pair, "system")
    system = (
        [{"role": "system", "content": _SYSTEM_MESSAGES[pick // 6 % len(_SYSTEM_MESSAGES)]}]
        if pick % 6 == 0
        else []
    )
    return [*system, {"role": "user", "content": question(pair)}]


def render(conversation: list[Message]) -> str:
    """The text that the chat template makes of a conversation, generation prompt included."""
    turns = (f"{TURN_START}{turn['role']}\n{turn['content']}{TURN_END}\n" for turn in conversation)
    return "".join(turns) + f"{TURN_START}assistant\n"
