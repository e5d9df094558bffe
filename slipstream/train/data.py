"""The training data of a run: packed sequences, or texts that are packed into sequences."""

from hashlib import blake2b
from pathlib import Path

import torch

from slipstream.core.errors import UsageError
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.loading import ProgressBar, no_progress_bar
from slipstream.models.tokenizer import Tokenizer
from slipstream.speculative.options import read_target_config
from slipstream.train.files import comes_from
from slipstream.train.generation import generate_answers, require_enough
from slipstream.train.plan import make_writable
from slipstream.train.sequences import Sequences, encode, pack
from slipstream.train.settings import DataSettings
from slipstream.train.texts import TextEntry, read_entries

_LENGTH = 512
_PACKED = ".safetensors"


def pack_data(settings: DataSettings, progress_bar: ProgressBar = no_progress_bar) -> Sequences:
    """Write the sequences of `data` to the file `out` (`slipstream train data`).

    The target's answers are kept in a file next to it.

    Raises:
        UsageError: settings that contradict each other, or the data.
        CheckpointError: files that cannot be read or written.
    """
    out = settings.out
    if out.suffix != _PACKED:
        raise UsageError(f"--out {out} must end in {_PACKED}")
    packed = [path for path in settings.data if path.suffix == _PACKED]
    if packed:
        raise UsageError(f"{packed[0]} is packed already; give it to `slipstream train KIND`")
    if settings.lora is not None and not settings.generate:
        raise UsageError(
            "--lora says which adapter answers; give --generate as well, or leave it to the "
            "training"
        )
    checkpoint = Checkpoint(resolve_checkpoint(settings.target, settings.revision))
    data = Data(settings, checkpoint, read_target_config(checkpoint).vocab_size)
    make_writable(out.parent, settings)
    return data.sequences(out, out.with_suffix(".answers.jsonl"), progress_bar)


class Data:
    """The files that `--data` names, read as far as that is fast.

    Args:
        target: its tokenizer is used, and it answers prompts.

    Attributes:
        length: tokens of a sequence.
        source: identifies these data and settings.

    Raises:
        UsageError: files without data, or settings that contradict them.
    """

    def __init__(self, settings: DataSettings, target: Checkpoint, vocab_size: int) -> None:
        self._settings, self._target = settings, target
        self._packed = _read_packed(settings, vocab_size)
        if self._packed is not None:
            self._entries: list[TextEntry] = []
            self.length, self.source = self._packed.length, self._packed.digest
            return
        self._entries = read_entries(settings.data)
        if not settings.generate and any(entry.wants_answer for entry in self._entries):
            raise UsageError(
                "the text holds prompts without answers; --generate lets the target answer them"
            )
        self.length = settings.max_length or _LENGTH
        self.source = _source(settings, target, self.length, self._entries)

    def require_enough(self) -> None:
        """Raise UsageError if it is clear that nothing will be left to validate with."""
        if self._packed is not None:
            self._packed.require_two()
        elif self._settings.generate:
            tokenizer = Tokenizer(self._target.path)
            require_enough(self._entries, self._settings, self.length, tokenizer)

    def sequences(self, file: Path, answers: Path, progress_bar: ProgressBar) -> Sequences:
        """The sequences, from where an earlier run wrote them if the data are equal.

        Args:
            file: holds or gets the sequences.
            answers: holds or gets the target's answers.
        """
        if self._packed is not None:
            return self._packed
        # More time for answers makes more sequences of the same answers and others.
        minutes = self._settings.generate_minutes
        source = self.source if minutes is None else f"{self.source} {minutes:g}"
        if comes_from(file, source):
            return Sequences.load(file)
        found = self._pack(answers, progress_bar)
        found.save(file, source)
        return found

    def _pack(self, answers: Path, progress_bar: ProgressBar) -> Sequences:
        tokenizer, settings = Tokenizer(self._target.path), self._settings
        documents = []
        if settings.generate:
            with progress_bar("generating", len(self._entries), "prompts") as progress:
                documents = generate_answers(
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


def _read_packed(settings: DataSettings, vocab_size: int) -> Sequences | None:
    """The sequences of files that `slipstream train data` wrote; None for texts."""
    files = [path for path in settings.data if path.suffix == _PACKED]
    if not files:
        return None
    if len(files) < len(settings.data):
        raise UsageError("give packed sequences or texts as --data, not both")
    if settings.generate:
        raise UsageError("--generate continues texts, and --data are packed sequences")
    parts = [Sequences.load(file) for file in files]
    if len({part.length for part in parts}) > 1:
        raise UsageError(
            "the sequences of --data have different lengths; pack them with one --max-length"
        )
    length = parts[0].length
    if settings.max_length not in (None, length):
        raise UsageError(
            f"--max-length {settings.max_length} is not that of the packed sequences of --data, "
            f"which have {length} tokens; leave it out, or pack the texts again"
        )
    token_ids = torch.cat([part.token_ids for part in parts])
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise UsageError(
            f"the packed sequences of --data have token {int(token_ids.max())}, and the target "
            f"knows {vocab_size}: they were packed for another model; pack them for this one"
        )
    return Sequences(token_ids, torch.cat([part.learned for part in parts]))


def _source(
    settings: DataSettings, target: Checkpoint, length: int, entries: list[TextEntry]
) -> str:
    """Identifies the sequences and answers of these settings and data."""
    values: list[object] = [str(target.path), length, settings.generate]
    if settings.generate:
        values += [settings.answers, settings.seed, settings.dtype]
        values += [] if settings.lora is None else [str(settings.lora.resolve())]
    content = blake2b(repr(values).encode(), digest_size=8)
    for entry in entries:
        content.update(repr(entry).encode())
    return content.hexdigest()
