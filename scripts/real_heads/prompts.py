"""Prompts for training heads, and held-out ones by category, from ShareGPT's conversations.

    python -m scripts.real_heads.prompts SHAREGPT.json --out prompts.jsonl.gz

The published JSON is cut off at its end: it is read up to the last whole conversation. Every
message of a person is a prompt, after the exchange before it where both are short enough together.
A prompt is left out if it is longer than `_LONGEST` characters, shorter than `_SHORTEST`, less than
nine tenths ASCII (small models know English best), or if another one begins with the same words.

Conversations are held out as a whole, by a digest of their name, and prompts that begin like a
held-out one are not trained on. Of the held-out conversations the first messages that fall into a
category are taken, as many of each (`category`). A line of the file:

    {"messages": [...]}                            to be trained on
    {"messages": [...], "category": "writing"}     held out
"""

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

_SHORTEST, _LONGEST = 12, 1600  # characters, of all messages of a prompt
_SAME = 120  # characters by which prompts are compared
_HELD_OUT_PER_MILLE = 60
_CODE = re.compile(
    r"```|\b(python|javascript|typescript|java|c\+\+|c#|php|ruby|rust|golang|sql|html|css|bash|regex"
    r"|react|django|node\.?js|api|json|code|coding|function|script|algorithm|program|class)\b",
    re.IGNORECASE,
)
_WRITING = re.compile(
    r"\b(write|rewrite|compose|draft|summari[sz]e|paraphrase|edit|improve|translate|story|poem"
    r"|essay|email|letter|article|blog|tweet|lyrics|song|speech)\b",
    re.IGNORECASE,
)
_QUESTION = re.compile(
    r"^(what|how|why|who|when|where|which|is|are|can|could|do|does|did|should|would|will|explain)\b",
    re.IGNORECASE,
)
CATEGORIES = ("code", "writing", "questions")


def category(text: str) -> str | None:
    """The category of a prompt, from its words; None for other prompts.

    `code`: a code fence, or a word of programming. `writing`: not that, and one of the words for
    texts and what is done to them. `questions`: neither, and it begins or ends as a question.
    """
    if _CODE.search(text):
        return "code"
    if _WRITING.search(text):
        return "writing"
    if _QUESTION.match(text.strip()) or text.rstrip().endswith("?"):
        return "questions"
    return None


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("sharegpt", type=Path)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--held-out", type=int, default=200)
    cli.add_argument("--prompts", type=int, default=40_000, help="to train on, at most")
    given = cli.parse_args()
    training, held_out = split(list(read_conversations(given.sharegpt)), given.held_out)
    random.Random(0).shuffle(training)
    lines = [*held_out, *training[: given.prompts]]
    with gzip.open(given.out, "wt", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    counts = {name: sum(it["category"] == name for it in held_out) for name in CATEGORIES}
    print(f"{len(lines) - len(held_out)} prompts; held out: {counts}")


def read_conversations(file: Path) -> Iterator[dict[str, Any]]:
    """The conversations of a JSON array that may be cut off."""
    text, decoder = file.read_text("utf-8"), json.JSONDecoder()
    place = text.index("[") + 1
    while True:
        begin = re.compile(r"[\s,]*").match(text, place)
        assert begin is not None
        try:
            found, place = decoder.raw_decode(text, begin.end())
        except ValueError:
            return
        yield found


def split(
    conversations: list[dict[str, Any]], count: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prompts to train on, and `count` held-out ones, in equal parts of the categories."""
    wanted = {name: count // len(CATEGORIES) for name in CATEGORIES}
    wanted[CATEGORIES[0]] += count - sum(wanted.values())
    held_out: list[dict[str, Any]] = []
    known: set[str] = set()
    for conversation in filter(_is_held_out, conversations):
        for messages in _prompts(conversation):
            text = messages[0]["content"]
            name = category(text) if len(messages) == 1 else None
            if name is not None and wanted[name] and _start(text) not in known:
                wanted[name] -= 1
                known.add(_start(text))
                held_out.append({"messages": messages, "category": name})
            break
    training = []
    for conversation in conversations:
        for messages in () if _is_held_out(conversation) else _prompts(conversation):
            start = _start(messages[-1]["content"])
            if start not in known:
                known.add(start)
                training.append({"messages": messages})
    return training, held_out


def _is_held_out(conversation: dict[str, Any]) -> bool:
    """Decided by the conversation's name alone, since ShareGPT splits one into several parts."""
    name = str(conversation["id"]).rpartition("_")[0] or str(conversation["id"])
    number = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little")
    return number % 1000 < _HELD_OUT_PER_MILLE


def _prompts(conversation: dict[str, Any]) -> Iterator[list[dict[str, str]]]:
    turns = [(turn["from"], turn["value"].strip()) for turn in conversation["conversations"]]
    for place, (who, text) in enumerate(turns):
        if who != "human" or not _SHORTEST <= len(text) <= _LONGEST:
            continue
        before = turns[max(0, place - 2) : place]
        if [it[0] for it in before] != ["human", "gpt"] or not all(it[1] for it in before):
            before = []
        if sum(len(it[1]) for it in before) + len(text) > _LONGEST:
            before = []
        whole = [*before, (who, text)]
        joined = "".join(it[1] for it in whole)
        if 10 * len(joined.encode("ascii", "ignore")) < 9 * len(joined):
            continue
        roles = {"human": "user", "gpt": "assistant"}
        yield [{"role": roles[who], "content": text} for who, text in whole]


def _start(text: str) -> str:
    return " ".join(text.lower().split())[:_SAME]


if __name__ == "__main__":
    main()
