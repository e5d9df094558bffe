"""What decoding on the CPU compares of this project: its rows, and what their steps read."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.peers.process import Entry
from benchmarks.peers.protocol import Job
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.precision import pass_bytes, weight_bytes
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.models.quantized.source import stored_rounding
from slipstream.speculative.draft_vocabulary import (
    DraftVocabularyConfig,
    choose_draft_vocabulary,
)

# Modules of the running interpreter's library whose sources make the text that draft vocabularies
# are chosen from: nothing of it is in the prompts.
_MODULES = ("argparse", "ast", "datetime", "decimal", "inspect", "pathlib", "socket", "tarfile")


def own_entry(name: str, job: Job) -> Entry:
    """This project, run by this interpreter."""
    return Entry(name=name, module="ours", python=Path(sys.executable), job=job, environment={})


def trimmed(job: Job, size: int, text: Path) -> Job:
    """The job with a draft over the `size` commonest tokens of a text."""
    options = {**job.options, "draft_vocab_size": size, "draft_vocab_text": str(text)}
    return replace(job, options=options)


def write_draft_text(file: Path) -> Path:
    """A text for choosing draft vocabularies from that is not the benchmark's."""
    sources = [Path(str(sys.modules[name].__file__)) for name in map(_imported, _MODULES)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(source.read_text("utf-8") for source in sources), "utf-8")
    return file


def _imported(name: str) -> str:
    __import__(name)
    return name


def coverage(target: Path, size: int, text: Path, tokens: list[list[int]]) -> float | None:
    """The share of `tokens`, which plain decoding gave, that a trimmed draft can guess."""
    config = read_decoder_config(Checkpoint(target))
    chosen = choose_draft_vocabulary(DraftVocabularyConfig(size, text), target, config.vocab_size)
    allowed = frozenset(chosen)
    given = [token for row in tokens for token in row]
    return sum(token in allowed for token in given) / len(given) if given else None


def round_bytes(job: Job, batch: int, context: int) -> float:
    """What one step reads: matrices, and the keys and values of `context` tokens a request; of
    experts, those that independent choices of its rows touch. States are read and written."""
    rows = batch * (job.num_speculative_tokens + 1 if job.draft is not None else 1)
    target = _pass_bytes(Path(job.target), _quantization(job), None, rows)
    total = target + batch * _kv_bytes(Path(job.target), context)
    if job.draft is not None:
        size = job.options.get("draft_vocab_size")
        draft = _pass_bytes(Path(job.draft), _quantization(job), size, batch)
        draft += batch * _kv_bytes(Path(job.draft), context)
        total += job.num_speculative_tokens * draft
    return total


def resident_bytes(job: Job) -> int:
    """The weights of target and draft in memory."""
    return sum(_weight_bytes(Path(one), _quantization(job)) for one in job.checkpoints)


def matrix_bytes(job: Job) -> float:
    """Bytes of matrices that a plain pass of the target reads for one row."""
    return _pass_bytes(Path(job.target), _quantization(job), None, 1)


def _weight_bytes(folder: Path, quantization: str | None) -> int:
    checkpoint = Checkpoint(folder)
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    form = None if stored is None else partial(stored_rounding, stored)
    return weight_bytes(read_decoder_config(checkpoint), torch.bfloat16, quantization, form)


def _pass_bytes(folder: Path, quantization: str | None, head: int | None, rows: int) -> float:
    checkpoint = Checkpoint(folder)
    config = read_decoder_config(checkpoint)
    if head is not None:
        config = replace(config, vocab_size=head)
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    return pass_bytes(config, rows, torch.bfloat16, quantization, stored)


def _kv_bytes(folder: Path, context: int) -> int:
    """Keys and values of a request in bf16, as far as layers see them, and its states twice."""
    layout = read_decoder_config(Checkpoint(folder)).cache_layout(torch.bfloat16)
    seen = [min(context, spec.window or context) * spec.bytes_per_token for spec in layout.specs]
    return sum(seen) + 2 * layout.bytes_per_request


def keeps_states(folder: Path) -> bool:
    """Whether layers of a checkpoint keep a state of each request, as no draft model may."""
    layout = read_decoder_config(Checkpoint(folder)).cache_layout(torch.bfloat16)
    return layout.bytes_per_request > 0


def _quantization(job: Job) -> str | None:
    named: str = job.options.get("quantization", job.form)
    return None if named == "bf16" else named
