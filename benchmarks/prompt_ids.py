"""Prompts for benchmarks: windows of one fixed text, as a checkpoint's tokenizer reads it."""

import json
from pathlib import Path

from slipstream.models.tokenizer import Tokenizer

TEXT = Path(__file__).parent.parent / "slipstream" / "demo" / "prompts" / "held_out.jsonl"


class PromptText:
    """Hands out windows, each beginning where the last one ended; after the end, at the start.

    Args:
        checkpoint: a directory, or a GGUF file.
    """

    def __init__(self, checkpoint: Path) -> None:
        entries = [json.loads(line) for line in TEXT.read_text("utf-8").splitlines()]
        texts = [_text(entry) for entry in entries]
        self._ids = Tokenizer(checkpoint).encode("\n\n".join(texts), add_special_tokens=False)
        self._place = 0

    def take(self, number: int, length: int) -> list[list[int]]:
        """This number of windows of this length."""
        return [self._window(length) for _ in range(number)]

    def _window(self, length: int) -> list[int]:
        start, size = self._place, len(self._ids)
        self._place = (start + length) % size
        return [self._ids[(start + offset) % size] for offset in range(length)]


def _text(entry: dict[str, object]) -> str:
    if "prompt" in entry:
        return str(entry["prompt"])
    messages = entry["messages"]
    assert isinstance(messages, list)
    return "\n".join(str(message["content"]) for message in messages)
