"""Small training runs for tests: a tiny target, and text that it wrote itself."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import no_progress_bar
from slipstream.train.batches import TrainingBatch
from slipstream.train.data import Data
from slipstream.train.metrics import MetricsLog
from slipstream.train.sequences import Sequences
from slipstream.train.settings import DrafterOptions, TrainSettings
from slipstream.train.target import Target, load_target
from slipstream.train.vocabulary import DraftVocabulary

LENGTH = 48


def write_own_words(target: str, file: Path, count: int = 40, seed: int = 0) -> Path:
    """Sequences that the target sampled, half of them greedily."""
    llm = LLM(target, skip_tokenizer_init=True, num_kv_blocks=256)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(1, 96, (count, 4), generator=generator).tolist()
    params = [
        SamplingParams(
            temperature=float(index % 2), max_tokens=LENGTH - 4, seed=index, ignore_eos=True
        )
        for index in range(count)
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in starts], params)
    ids = [[*start, *out.outputs[0].token_ids] for start, out in zip(starts, outputs, strict=True)]
    token_ids = torch.tensor(ids, dtype=torch.int32)
    Sequences(token_ids, torch.ones_like(token_ids, dtype=torch.bool)).save(file)
    return file


def settings(kind: str, target: str, data: Path, out: Path, **changes: Any) -> TrainSettings:
    """A short run on a CPU."""
    options = DrafterOptions(**changes.pop("options", {}))
    values: dict[str, Any] = {
        "steps": 30,
        "batch_size": 8,
        "max_length": LENGTH,
        "learning_rate": 5e-3,
        "num_speculative_tokens": 3,
        "validation": 0.2,
        "checkpoint_every": 5,
        "validate_every": 10,
        "log_every": 1,
        "device": "cpu",
        **changes,
    }
    return TrainSettings(kind=kind, target=target, data=(data,), out=out, options=options, **values)


def batch_of(
    target: Target, tokens: list[int], vocabulary: DraftVocabulary, stream_layers: tuple[int, ...]
) -> TrainingBatch:
    """One sequence."""
    token_ids = torch.tensor([tokens])
    states = target.states(token_ids, stream_layers)
    return TrainingBatch(token_ids, torch.ones_like(token_ids).bool(), states, target, vocabulary)


def teacher(target: str) -> Target:
    checkpoint = Checkpoint(Path(target))
    config = read_decoder_config(checkpoint)
    return load_target(checkpoint, config, torch.float32, torch.device("cpu"), 256)


def prepared(given: TrainSettings, kept: Path, answers: Path) -> Sequences:
    """The sequences of a run."""
    checkpoint = Checkpoint(Path(given.target))
    return Data(given, checkpoint, 96).sequences(kept, answers, no_progress_bar)


def run_drafting(
    target: str, drafter: Path, speculative: dict[str, Any], **options: Any
) -> tuple[list[list[int]], list[list[int]], float]:
    """Greedy outputs without and with the drafter, and its acceptance length."""
    generator = torch.Generator().manual_seed(77)
    prompts: list[Any] = [
        {"prompt_token_ids": ids}
        for ids in torch.randint(1, 96, (4, 9), generator=generator).tolist()
    ]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    config = {"model": str(drafter), "num_speculative_tokens": 3, **speculative}
    found = []
    length = 1.0
    for given in (None, config):
        llm = LLM(
            target,
            speculative_config=given,
            skip_tokenizer_init=True,
            num_kv_blocks=128,
            **options,
        )
        outputs = llm.generate(prompts, params)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        drafts = sum(output.metrics.num_drafts for output in outputs)
        accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        length = 1 + accepted / max(drafts, 1)
    return found[0], found[1], length


def losses(out: Path) -> Tensor:
    """[steps], as a run logged them."""
    return torch.tensor([record["loss"] for record in MetricsLog(out).of_kind("training")])
