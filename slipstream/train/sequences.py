"""Token sequences of one length, and which of their tokens are to be learned."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.wording import counted
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.train.files import read_metadata, read_tensors, write_tensors
from slipstream.train.texts import Entry

_IDS, _LEARNED, _SOURCE = "token_ids", "learned", "source"


class Document(NamedTuple):
    """Token ids, and of each whether a drafter should learn to guess it."""

    token_ids: Sequence[int]
    learned: Sequence[bool]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Documents one behind the other, cut into pieces of one length.

    Attributes:
        token_ids: [N, S] int32.
        learned: [N, S] bool.
    """

    token_ids: Tensor
    learned: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """S."""
        return self.token_ids.shape[1]

    @property
    def digest(self) -> str:
        """Tells one set of sequences from another."""
        content = blake2b(self.token_ids.numpy().tobytes(), digest_size=8)
        content.update(self.learned.numpy().tobytes())
        return content.hexdigest()

    def at(self, index: Tensor | slice) -> "Sequences":
        """Some of them."""
        return Sequences(self.token_ids[index], self.learned[index])

    def split(self, share: float, seed: int) -> tuple["Sequences", "Sequences"]:
        """(the rest, a random share of them but at least one)."""
        self.require_two()
        count = min(len(self) - 1, max(1, round(share * len(self))))
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.at(order[count:]), self.at(order[:count])

    def require_two(self) -> None:
        """Raise UsageError where there is nothing to validate with."""
        if len(self) < 2:
            raise UsageError(
                f"the text makes {counted(len(self), 'sequence')} of {self.length} tokens, and "
                "one to train on and one to validate with is the least; give more text, or a "
                "smaller --max-length"
            )

    def save(self, file: Path, source: str = "") -> None:
        """As a safetensors file, with what tells the data that they were made from."""
        ids, learned = self.token_ids.contiguous(), self.learned.to(torch.uint8).contiguous()
        write_tensors(file, {_IDS: ids, _LEARNED: learned}, {_SOURCE: source})

    @staticmethod
    def load(file: Path) -> "Sequences":
        """What `save` wrote."""
        tensors = read_tensors(file, (_IDS, _LEARNED))
        return Sequences(tensors[_IDS], tensors[_LEARNED].bool())

    @staticmethod
    def made_from(file: Path, source: str) -> "Sequences | None":
        """Those of a file, where it is whole and they were made from the same data."""
        try:
            same = read_metadata(file).get(_SOURCE) == source
            return Sequences.load(file) if same else None
        except CheckpointError:
            return None


def encode(entries: Iterable[Entry], tokenizer: Tokenizer) -> Iterator[Document]:
    """Texts whole; of conversations what the assistant says is learned.

    Raises UsageError for an entry that nobody has answered.
    """
    template = ChatTemplate(tokenizer)
    for entry in entries:
        if entry.wants_answer:
            raise UsageError(
                "the text holds prompts without answers; --generate lets the target answer them"
            )
        if entry.messages:
            yield _conversation(entry, tokenizer, template)
        else:
            assert entry.text is not None
            ids = tokenizer.encode(entry.text)
            yield Document(ids, [True] * len(ids))


def _conversation(entry: Entry, tokenizer: Tokenizer, template: ChatTemplate) -> Document:
    """Turn by turn: what a turn of the assistant adds to the prompt before it is learned."""
    ids: list[int] = []
    learned: list[bool] = []
    done = ""
    for place, message in enumerate(entry.messages):
        if message.get("role") != "assistant":
            continue
        asked = template.render(entry.messages[:place], add_generation_prompt=True)
        answered = template.render(entry.messages[: place + 1], add_generation_prompt=False)
        if not asked.startswith(done) or not answered.startswith(asked):
            # A template that rewrites what was said before: only the last answer stands.
            ids, learned, done = [], [], ""
            if not answered.startswith(asked):
                asked = ""
        for text, wanted in ((asked[len(done) :], False), (answered[len(asked) :], True)):
            added = tokenizer.encode(text, add_special_tokens=False)
            ids += added
            learned += [wanted] * len(added)
        done = answered
    return Document(ids, learned)


def pack(documents: Iterable[Document], length: int, separator: int | None) -> Sequences:
    """Documents one behind the other, `separator` between them, cut every `length` tokens.

    The last piece is filled up with the separator (or token 0), of which nothing is learned.
    """
    ids: list[int] = []
    learned: list[bool] = []
    for document in documents:
        if not document.token_ids:
            continue
        ids.extend(document.token_ids)
        learned.extend(document.learned)
        if separator is not None and document.token_ids[-1] != separator:
            ids.append(separator)
            learned.append(True)
    missing = -len(ids) % length
    ids.extend([separator or 0] * missing)
    learned.extend([False] * missing)
    shape = (-1, length)
    return Sequences(
        torch.tensor(ids, dtype=torch.int32).view(shape), torch.tensor(learned).view(shape)
    )
