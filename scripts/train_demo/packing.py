"""Turn texts into one long stream of tokens, and the stream into batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .pairs import Pair, choice, messages, render
from .settings import END_OF_TEXT_ID, TURN_END, Plan
from .sources import Source

_CHUNK = 2000


@dataclass
class Streams:
    """The tokens of all documents in random order, each followed by <|endoftext|>.

    ``starts`` holds where each training document begins; ``question_lengths`` how many of its
    tokens are a chat prompt (0 for files).
    """

    train: np.ndarray
    starts: np.ndarray
    question_lengths: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int

    def save(self, path: Path) -> None:
        """Write all arrays to one file."""
        np.savez(path, **self.__dict__)

    @classmethod
    def load(cls, path: Path) -> Streams:
        """Read what :meth:`save` wrote."""
        with np.load(path) as arrays:
            values = {name: arrays[name] for name in arrays.files}
        return cls(**{**values, "held_out_bytes": int(values["held_out_bytes"])})


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Iterator[np.ndarray]:
    """Token ids of each text."""
    for first in range(0, len(texts), _CHUNK):
        for encoding in tokenizer.encode_batch_fast(texts[first : first + _CHUNK]):
            yield np.array(encoding.ids, dtype=np.uint16)


def _chosen_pairs(sources: list[Source]) -> list[Pair]:
    """Pairs with distinct answers, in an order fixed by their hashes."""
    distinct = {pair.answer: pair for source in sources for pair in source.pairs}
    return sorted(distinct.values(), key=lambda pair: choice(pair, "order"))


def _chat_documents(
    tokenizer: Tokenizer, pairs: list[Pair], budget: int
) -> tuple[list[np.ndarray], list[int]]:
    """Conversations of at most ``budget`` tokens together, and the length of each question."""
    documents: list[np.ndarray] = []
    lengths: list[int] = []
    used = 0
    for first in range(0, len(pairs), _CHUNK):
        chunk = pairs[first : first + _CHUNK]
        questions = [render(messages(pair)) for pair in chunk]
        wholes = [
            f"{question}{pair.answer}{TURN_END}\n"
            for question, pair in zip(questions, chunk, strict=True)
        ]
        for question, whole in zip(
            _encode(tokenizer, questions), _encode(tokenizer, wholes), strict=True
        ):
            if used >= budget:
                return documents, lengths
            documents.append(whole)
            lengths.append(len(question))
            used += len(whole)
    return documents, lengths


def build_streams(
    tokenizer: Tokenizer, train: list[Source], held_out: list[Source], plan: Plan
) -> tuple[Streams, dict[str, int]]:
    """Encode everything; also return a few counts for the record."""
    documents = list(_encode(tokenizer, [source.text for source in train]))
    file_tokens = sum(map(len, documents))
    budget = int(file_tokens * plan.chat_share / (1 - plan.chat_share))
    pairs = _chosen_pairs(train)
    chats, chat_lengths = _chat_documents(tokenizer, pairs, budget)
    lengths = np.array([0] * len(documents) + chat_lengths, dtype=np.int32)
    documents += chats
    order = np.random.default_rng(plan.seed).permutation(len(documents))
    end = np.array([END_OF_TEXT_ID], dtype=np.uint16)
    stream = np.concatenate([part for index in order for part in (documents[index], end)])
    sizes = np.array([len(documents[index]) + 1 for index in order], dtype=np.int64)
    held = [
        part
        for ids in _encode(tokenizer, [source.text for source in held_out])
        for part in (ids, end)
    ]
    counts = {
        "train_files": len(train),
        "train_bytes": sum(len(source.text.encode()) for source in train),
        "train_file_tokens": file_tokens,
        "train_chat_tokens": sum(map(len, chats)),
        "train_chat_pairs": len(chats),
        "pairs_found": len(pairs),
        "held_out_files": len(held_out),
        "held_out_bytes": sum(len(source.text.encode()) for source in held_out),
        "held_out_tokens": sum(map(len, held)),
    }
    streams = Streams(
        stream,
        np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)[:-1]]),
        lengths[order],
        # The leading end-of-text gives the first file a token to be predicted from.
        np.concatenate([end, *held]),
        counts["held_out_bytes"],
    )
    return streams, counts


def write_json(path: Path, value: object) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


class Windows:
    """Random windows of a stream, the same for the same seed and step."""

    def __init__(self, stream: np.ndarray, size: int, rows: int, device: torch.device) -> None:
        # int16 holds every id (vocabularies are far under 32,768) and halves the memory.
        self.stream = torch.from_numpy(stream.astype(np.int16)).to(device)
        self.size = size
        self.rows = rows
        self.offsets = torch.arange(size, device=device)

    def batch(self, seed: int, step: int) -> Tensor:
        """The batch of one step, ``[rows, size]``."""
        generator = np.random.default_rng((seed, step))
        starts = generator.integers(0, len(self.stream) - self.size, self.rows)
        return self.at(starts)

    def at(self, starts: np.ndarray) -> Tensor:
        """The windows that begin at ``starts``."""
        index = torch.from_numpy(starts).to(self.stream.device)[:, None] + self.offsets
        return self.stream[index].long()
