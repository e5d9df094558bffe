"""Choose prompts from held-out files: beginnings of files, function heads, chat questions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from .pairs import Message, Pair, messages, render
from .sources import Source

_SHORTEST, _LONGEST = 64, 512
_FILE_LENGTHS = (96, 128, 192, 256, 320, 400)
_PER_FILE, _PER_PACKAGE = 3, 12
_SHARES = {"file": 28, "function": 36, "chat": 16}


@dataclass(frozen=True)
class Prompt:
    """One prompt with where it comes from."""

    kind: str
    source: Source = field(repr=False)
    text: str
    ids: list[int] = field(repr=False)
    conversation: list[Message] | None = None

    def order(self) -> bytes:
        """A sort key that mixes packages but never changes."""
        return hashlib.blake2b(f"{self.source.name}\0{self.text}".encode()).digest()

    def as_json(self, identifier: str) -> dict[str, Any]:
        """The line for the prompts file."""
        body: dict[str, Any] = (
            {"messages": self.conversation} if self.conversation else {"prompt": self.text}
        )
        return {
            "id": identifier,
            "kind": self.kind,
            "source": f"{self.source.package} {self.source.version}: {self.source.name}",
            "licence": self.source.licence,
            **({"notice": self.source.notice} if self.source.notice else {}),
            **body,
        }


def _file_prompt(source: Source, tokenizer: Tokenizer) -> Prompt | None:
    """The first lines of a file, up to about a length drawn from the file's name."""
    wanted = _FILE_LENGTHS[len(source.text) % len(_FILE_LENGTHS)]
    encoding = tokenizer.encode(source.text)
    if len(encoding.ids) < wanted + 128:
        return None
    cut = encoding.offsets[wanted][0]
    text = source.text[:cut].rpartition("\n")[0].rstrip()
    ids = tokenizer.encode(text).ids
    return Prompt("file", source, text, ids) if len(ids) >= _SHORTEST else None


def _function_prompt(source: Source, pair: Pair, tokenizer: Tokenizer) -> Prompt | None:
    """Signature and docstring of a function whose body is worth writing."""
    ids = tokenizer.encode(pair.opening).ids
    if not _SHORTEST <= len(ids) <= _LONGEST or pair.answer.count("\n") < 3:
        return None
    return Prompt("function", source, pair.opening, ids)


def _chat_prompt(source: Source, pair: Pair, tokenizer: Tokenizer) -> Prompt | None:
    """A question whose answer is a held-out function."""
    conversation = messages(pair)
    text = render(conversation)
    ids = tokenizer.encode(text).ids
    return Prompt("chat", source, text, ids, conversation) if len(ids) <= _LONGEST else None


def all_prompts(held_out: list[Source], tokenizer: Tokenizer) -> list[Prompt]:
    """Every prompt that held-out files offer, in a fixed mixed order."""
    found: list[Prompt | None] = []
    for source in held_out:
        found.append(_file_prompt(source, tokenizer))
        for pair in source.pairs:
            found.append(_function_prompt(source, pair, tokenizer))
            found.append(_chat_prompt(source, pair, tokenizer))
    distinct = {prompt.text: prompt for prompt in found if prompt is not None}
    return sorted(distinct.values(), key=Prompt.order)


def balanced(prompts: Iterable[Prompt], count: int) -> list[Prompt]:
    """About ``count`` prompts, the kinds in the shipped file's proportions."""
    total = sum(_SHARES.values())
    left = {kind: round(count * share / total) for kind, share in _SHARES.items()}
    chosen = []
    for prompt in prompts:
        if left[prompt.kind] > 0:
            left[prompt.kind] -= 1
            chosen.append(prompt)
    return chosen


def shipped(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts file's choice: few of any one file or package."""
    files: Counter[str] = Counter()
    packages: Counter[str] = Counter()
    few = []
    for prompt in prompts:
        file = f"{prompt.source.package}/{prompt.source.name}"
        if files[file] < _PER_FILE and packages[prompt.source.package] < _PER_PACKAGE:
            files[file] += 1
            packages[prompt.source.package] += 1
            few.append(prompt)
    return balanced(few, sum(_SHARES.values()))
