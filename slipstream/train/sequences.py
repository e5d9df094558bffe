"""Token sequences of one length, with the tokens that a drafter should learn to predict."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.errors import UsageError, counted
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.train.files import SOURCE, read_tensors, write_tensors
from slipstream.train.texts import TextEntry

_IDS, _LEARNED = "token_ids", "learned"


class Document(NamedTuple):
    """Token ids, and whether a drafter should learn to predict each of them."""

    token_ids: Sequence[int]
    learned: Sequence[bool]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Concatenated documents, cut into pieces of one length.

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
        return self.token_ids.shape[1]

    @property
    def digest(self) -> str:
        """Identifies the content."""
        content = blake2b(self.token_ids.numpy().tobytes(), digest_size=8)
        content.update(self.learned.numpy().tobytes())
        return content.hexdigest()

    def at(self, index: Tensor | slice) -> "Sequences":
        return Sequences(self.token_ids[index], self.learned[index])

    def split(self, share: float, seed: int) -> tuple["Sequences", "Sequences"]:
        """(training, validation): a random share is for validation, and at least one sequence."""
        self.require_two()
        count = min(len(self) - 1, max(1, round(share * len(self))))
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.at(order[count:]), self.at(order[:count])

    def require_two(self) -> None:
        """Raise UsageError if nothing is left to validate with."""
        if len(self) < 2:
            raise UsageError(
                f"the text makes {counted(len(self), 'sequence')} of {self.length} tokens, and "
                "one to train on and one to validate with is the least; give more text, or a "
                "smaller --max-length"
            )

    def save(self, file: Path, source: str = "") -> None:
        """Write a safetensors file.

        Args:
            source: identifies the data that they were made from.
        """
        ids, learned = self.token_ids.contiguous(), self.learned.to(torch.uint8).contiguous()
        write_tensors(file, {_IDS: ids, _LEARNED: learned}, {SOURCE: source})

    @staticmethod
    def load(file: Path) -> "Sequences":
        """Read what `save` wrote; raises CheckpointError for another or a damaged file."""
        tensors = read_tensors(file, (_IDS, _LEARNED))
        return Sequences(tensors[_IDS], tensors[_LEARNED].bool())


def encode(entries: Iterable[TextEntry], tokenizer: Tokenizer) -> Iterator[Document]:
    """Tokenize; in conversations only the assistant's messages are learned."""
    template = ChatTemplate(tokenizer)
    for entry in entries:
        if entry.messages:
            yield _conversation(entry, tokenizer, template)
        else:
            assert entry.text is not None
            ids = tokenizer.encode(entry.text)
            yield Document(ids, [True] * len(ids))


def _conversation(entry: TextEntry, tokenizer: Tokenizer, template: ChatTemplate) -> Document:
    """The text that is added to the prompt before each learned message of the assistant."""
    ids: list[int] = []
    learned: list[bool] = []
    done = ""
    for index, message in enumerate(entry.messages):
        if message.get("role") != "assistant":
            continue
        asked = template.render(entry.messages[:index], add_generation_prompt=True)
        answered = template.render(entry.messages[: index + 1], add_generation_prompt=False)
        if not asked.startswith(done) or not answered.startswith(asked):
            # The template rewrites earlier messages, so only the last answer is kept.
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
    """Concatenate documents with `separator` between them, and cut every `length` tokens.

    The last sequence is padded with the separator (or token 0), which is not learned.
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
