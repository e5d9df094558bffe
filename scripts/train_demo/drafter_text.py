"""Text for training drafters of the demo target, from the Python source of this machine.

    python -m scripts.train_demo.drafter_text --out DIR [--megabytes 40]

The files are found, cleaned and split as those of the demo target were (`sources.py`): what
that split holds out by name stays out here too, and so does every file that shares a telling line
with a held-out prompt's text. Writes three files for `slipstream train`:

    files.jsonl     {"text": ...}                  source files, to be trained on as they are
    chats.jsonl     {"messages": [...]}            questions and answers made from functions
    prompts.jsonl   {"prompt": ...} or {"messages": [...]}   beginnings, for --generate
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .pairs import choice, messages
from .sources import Source, collect

HELD_OUT_PER_MILLE = 12  # as the demo target was trained
_PROMPTS = Path(__file__).parents[2] / "slipstream" / "demo" / "prompts" / "held_out.jsonl"
_CHAT_SHARE, _SEED = 0.13, 20
_TELLING_LINE = 40
_SHORTEST, _LONGEST = 120, 1500  # characters of a beginning


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--megabytes", type=float, default=40.0)
    cli.add_argument("--prompts", type=int, default=40_000)
    options = cli.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train, held_out = collect(HELD_OUT_PER_MILLE, 0)
    known = _held_out_lines()
    sources = [source for source in train if not _shares_a_line(source.text, known)]
    order = random.Random(_SEED)
    order.shuffle(sources)
    files = list(_first(sources, options.megabytes * 1e6 * (1 - _CHAT_SHARE)))
    chats = list(_chats(sources, options.megabytes * 1e6 * _CHAT_SHARE, known))
    _write(options.out / "files.jsonl", ({"text": source.text} for source in files))
    _write(options.out / "chats.jsonl", ({"messages": chat} for chat in chats))
    _write(options.out / "prompts.jsonl", _beginnings(files, chats, options.prompts, order))
    print(
        f"{len(files)} of {len(train)} files, {len(chats)} chats; {len(held_out)} files held out "
        f"by name and {len(train) - len(sources)} for sharing a line with a held-out prompt"
    )


def _held_out_lines() -> set[str]:
    """The telling lines of the shipped prompts."""
    lines: set[str] = set()
    for row in _PROMPTS.read_text("utf-8").splitlines():
        entry = json.loads(row)
        texts = [entry.get("prompt", "")]
        texts += [message["content"] for message in entry.get("messages", ())]
        lines |= _telling("\n".join(texts))
    return lines


def _telling(text: str) -> set[str]:
    stripped = {line.strip() for line in text.split("\n")}
    return {
        line
        for line in stripped
        if len(line) >= _TELLING_LINE and not line.startswith(("import ", "from "))
    }


def _shares_a_line(text: str, known: set[str]) -> bool:
    return not known.isdisjoint(_telling(text))


def _first(sources: Iterable[Source], size: float) -> Iterable[Source]:
    for source in sources:
        if size <= 0:
            return
        size -= len(source.text)
        yield source


def _chats(sources: list[Source], size: float, known: set[str]) -> Iterable[list[dict[str, str]]]:
    pairs = {pair.answer: pair for source in sources for pair in source.pairs}
    for pair in sorted(pairs.values(), key=lambda pair: choice(pair, "order")):
        if size <= 0:
            return
        conversation = [*messages(pair), {"role": "assistant", "content": pair.answer}]
        text = "\n".join(message["content"] for message in conversation)
        if not _shares_a_line(text, known):
            size -= len(text)
            yield conversation


def _beginnings(
    files: list[Source], chats: list[list[dict[str, str]]], count: int, order: random.Random
) -> Iterable[dict[str, Any]]:
    """As the shipped prompts are: one in five a question, one in three the beginning of a file, the
    rest heads of functions."""
    for _ in range(count):
        kind = order.random()
        if kind < 0.2 and chats:
            yield {"messages": order.choice(chats)[:-1]}
            continue
        source = order.choice(files)
        if kind >= 0.55 and source.pairs:
            yield {"prompt": order.choice(source.pairs).opening + "\n"}
        else:
            yield {"prompt": source.text[: order.randint(_SHORTEST, _LONGEST)]}


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as opened:
        for row in rows:
            opened.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
