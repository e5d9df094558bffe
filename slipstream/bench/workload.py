"""What a benchmark asks of an engine: prompts from a file, and how much is to be said to each."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.core.outputs import RequestOutput
    from slipstream.engine.llm import LLM

Message = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Prompts to continue and chats to answer, all with the same parameters."""

    texts: tuple[str, ...]
    chats: tuple[tuple[Message, ...], ...]
    params: SamplingParams

    def run(self, llm: "LLM") -> "list[RequestOutput]":
        """Texts first, then chats."""
        outputs = llm.generate(list(self.texts), self.params) if self.texts else []
        if self.chats:
            outputs += llm.chat([list(chat) for chat in self.chats], self.params)
        return outputs

    @property
    def num_prompts(self) -> int:
        return len(self.texts) + len(self.chats)

    @property
    def title(self) -> str:
        """In words."""
        return (
            f"{self.num_prompts} prompts, {self.params.max_tokens} tokens each, "
            f"temperature {self.params.temperature:g}"
        )


def read_workload(file: Path, most: int | None, params: SamplingParams) -> Workload:
    """From JSON lines, each with `prompt` (a text) or `messages` (a chat).

    Args:
        most: prompts to take, spread evenly over the file; None takes all.

    Raises:
        UsageError: the file cannot be read, a line is neither, or there is none.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts in {file}: {error}") from None
    entries = [
        _entry(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not entries:
        raise UsageError(f'{file} holds no prompts; write lines such as {{"prompt": "..."}}')
    entries = _spread(entries, most)
    return Workload(
        texts=tuple(entry["prompt"] for entry in entries if "prompt" in entry),
        chats=tuple(tuple(entry["messages"]) for entry in entries if "prompt" not in entry),
        params=params,
    )


def _entry(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{file}, line {number} is not JSON: {error}") from None
    if isinstance(entry, dict):
        if isinstance(entry.get("prompt"), str):
            return entry
        if isinstance(entry.get("messages"), list) and entry["messages"]:
            return {"messages": entry["messages"]}
    raise UsageError(
        f'{file}, line {number} has neither "prompt" (a text) nor "messages" (a list of messages)'
    )


def _spread(entries: Sequence[dict[str, Any]], most: int | None) -> list[dict[str, Any]]:
    if most is None or most >= len(entries):
        return list(entries)
    return [entries[index * len(entries) // most] for index in range(most)]
