"""What a run is trained on: sequences that were packed, or those that texts are packed into."""

from hashlib import blake2b
from pathlib import Path

import torch

from slipstream.core.errors import UsageError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import ProgressBar
from slipstream.models.tokenizer import Tokenizer
from slipstream.train.generation import generated, require_enough
from slipstream.train.sequences import Sequences, encode, pack
from slipstream.train.settings import DataSettings
from slipstream.train.texts import Entry, read_entries

_LENGTH = 512
PACKED = ".safetensors"


class Data:
    """What `--data` names, read as far as costs little.

    Args:
        target: whose tokenizer speaks, and who answers.

    Attributes:
        length: tokens of a sequence.
        source: tells the sequences of these data and settings from others.

    Raises:
        UsageError: files that are none, or settings that contradict them.
    """

    def __init__(self, settings: DataSettings, target: Checkpoint, vocab_size: int) -> None:
        self._settings, self._target = settings, target
        self._packed = _packed(settings, vocab_size)
        if self._packed is not None:
            self._entries: list[Entry] = []
            self.length, self.source = self._packed.length, self._packed.digest
        else:
            self._entries = read_entries(settings.data)
            if not settings.generate and any(entry.wants_answer for entry in self._entries):
                raise UsageError(
                    "the text holds prompts without answers; --generate lets the target answer them"
                )
            self.length = settings.max_length or _LENGTH
            self.source = _source(settings, target, self.length, self._entries)

    def require_enough(self) -> None:
        """Raise UsageError where it is plain that there will be nothing to validate with."""
        if self._packed is not None:
            self._packed.require_two()
        elif self._settings.generate:
            tokenizer = Tokenizer(self._target.path)
            require_enough(self._entries, self._settings, self.length, tokenizer)

    def sequences(self, kept: Path, answers: Path, progress_bar: ProgressBar) -> Sequences:
        """Read from where an earlier run has put the same, or made.

        Args:
            kept: gets the sequences.
            answers: gets what the target answered.
        """
        if self._packed is not None:
            return self._packed
        found = Sequences.made_from(kept, self.source) if kept.is_file() else None
        if found is None:
            found = self._made(answers, progress_bar)
            found.save(kept, self.source)
        return found

    def _made(self, answers: Path, progress_bar: ProgressBar) -> Sequences:
        tokenizer, settings = Tokenizer(self._target.path), self._settings
        documents = []
        if settings.generate:
            with progress_bar("generating", len(self._entries), "prompts") as progress:
                documents = generated(
                    self._entries, settings, self.length, tokenizer, answers, self.source, progress
                )
        else:
            with progress_bar("tokenizing", len(self._entries), "documents") as progress:
                for document in encode(self._entries, tokenizer):
                    documents.append(document)
                    progress(1)
        separator = tokenizer.eos_token_id
        if separator is None and self._target.eos_token_ids:
            separator = self._target.eos_token_ids[0]
        return pack(documents, self.length, separator)


def _packed(settings: DataSettings, vocab_size: int) -> Sequences | None:
    """Files that `slipstream train data` wrote."""
    files = [path for path in settings.data if path.suffix == PACKED]
    if not files:
        return None
    if len(files) < len(settings.data):
        raise UsageError("give packed sequences or texts as --data, not both")
    if settings.generate:
        raise UsageError("--generate continues texts, and packed sequences are none")
    parts = [Sequences.load(file) for file in files]
    if len({part.length for part in parts}) > 1:
        raise UsageError("the packed sequences of --data have different lengths; pack them alike")
    length = parts[0].length
    if settings.max_length not in (None, length):
        raise UsageError(
            f"--max-length {settings.max_length} is not that of the packed sequences of --data, "
            f"which have {length} tokens; leave it out, or pack the texts anew"
        )
    token_ids = torch.cat([part.token_ids for part in parts])
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise UsageError(
            f"the packed sequences of --data have token {int(token_ids.max())}, and the target "
            f"knows {vocab_size}: they were packed for another model; pack them for this one"
        )
    return Sequences(token_ids, torch.cat([part.learned for part in parts]))


def _source(settings: DataSettings, target: Checkpoint, length: int, entries: list[Entry]) -> str:
    """Tells sequences and answers of one run from those of another with other data."""
    told: list[object] = [str(target.path), length, settings.generate]
    if settings.generate:
        told += [settings.answers, settings.seed, settings.dtype]
    content = blake2b(repr(told).encode(), digest_size=8)
    for entry in entries:
        content.update(repr(entry).encode())
    return content.hexdigest()
