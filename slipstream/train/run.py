"""From settings to an exported drafter."""

import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import UsageError
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.loading import ProgressBar, dtype_named, no_progress_bar
from slipstream.models.tokenizer import Tokenizer
from slipstream.runner.capability import choose_device
from slipstream.train.batches import Batches, FeatureSource, OnlineFeatures
from slipstream.train.card import write_card
from slipstream.train.features import DiskFeatures, capture, how_many
from slipstream.train.generation import generated
from slipstream.train.loop import Job, Report, Watcher, train
from slipstream.train.losses import ChainAcceptance
from slipstream.train.plots import draw_curves
from slipstream.train.recipe import Recipe, RecipeModule, Workshop, recipe_module
from slipstream.train.records import Records
from slipstream.train.sequences import Sequences, encode, pack
from slipstream.train.settings import TrainSettings
from slipstream.train.state import StateFile
from slipstream.train.target import Target, load_target
from slipstream.train.texts import Entry, read_entries

WORK = "training"
_DATA, _ANSWERS, _FEATURES = "sequences.safetensors", "answers.jsonl", "features"
_MAX_VALIDATION = 256  # sequences; more would tell little more
# Targets with more parameters are run once over the text rather than in every epoch.
_SMALL_TARGET = 200_000_000


@dataclass(frozen=True)
class Trained:
    """What came of a run.

    Attributes:
        recipe: the drafter as it was trained.
        plots: the curves; empty without matplotlib.
        seconds: of the whole run, this time.
    """

    recipe: Recipe
    folder: Path
    acceptance: ChainAcceptance
    num_parameters: int
    plots: tuple[Path, ...]
    seconds: float


def _nobody(report: Report) -> None:
    del report


def run_training(
    settings: TrainSettings,
    command: str = "",
    watch: Watcher = _nobody,
    progress_bar: ProgressBar = no_progress_bar,
) -> Trained:
    """Train a drafter, or go on with a run that was interrupted, and export it.

    Args:
        command: that the model card tells.
        watch: is told of every logged step.
        progress_bar: shows how long preparations take.

    Raises:
        UsageError: settings that contradict each other, the data or the target.
        CheckpointError: files that cannot be read.
    """
    began = time.perf_counter()
    module = recipe_module(settings.kind)
    settings.options.require_only(module.OPTIONS, settings.kind)
    work = settings.out / WORK
    _require_free(settings.out)
    work.mkdir(parents=True, exist_ok=True)
    sequences = prepared(settings, work / _DATA, work / _ANSWERS, progress_bar)
    device, _ = choose_device(settings.device)
    dtype = _precision(settings, device)
    target = load_target(
        settings.target, settings.revision, dtype, device, sequences.length + _room(settings)
    )
    training, validation = sequences.split(settings.validation, settings.seed)
    validation = validation.at(slice(_MAX_VALIDATION))
    eos = Checkpoint(target.path).eos_token_ids
    recipe = module.build(Workshop(settings, target, training, eos))
    job = _job(settings, module, recipe, target, training, validation, watch, progress_bar)
    acceptance = train(job)
    export_dtype = Checkpoint(target.path).weights_dtype or torch.bfloat16
    recipe.export(settings.out, export_dtype)
    plots = draw_curves(job.records.all(), settings.out)
    trained = Trained(
        recipe,
        settings.out,
        acceptance,
        sum(parameter.tensor.numel() for parameter in recipe.trained.parameters),
        plots,
        time.perf_counter() - began,
    )
    write_card(
        settings,
        module.METHOD,
        command,
        trained.num_parameters,
        acceptance,
        job.records,
        settings.accumulate * job.training.tokens_per_batch,
    )
    return trained


def prepared(
    settings: TrainSettings, kept: Path, answers: Path, progress_bar: ProgressBar
) -> Sequences:
    """The data as sequences: read from where an earlier run has put the same, or made.

    Args:
        kept: gets the sequences.
        answers: gets what the target answered.
    """
    packed = _packed(settings.data)
    if packed is not None:
        if settings.generate:
            raise UsageError("--generate continues texts, and packed sequences are none")
        return packed
    checkpoint = Checkpoint(resolve_checkpoint(settings.target, settings.revision))
    entries = read_entries(settings.data)
    source = _source(settings, checkpoint, entries)
    if kept.is_file() and (found := Sequences.made_from(kept, source)) is not None:
        return found
    tokenizer = Tokenizer(checkpoint.path)
    documents = []
    plain: list[Entry] = entries
    if settings.generate:
        with progress_bar("generating", len(entries), "prompts") as progress:
            documents = generated(entries, settings, tokenizer, answers, source, progress)
        plain = []
    with progress_bar("tokenizing", len(plain), "documents") as progress:
        for document in encode(plain, tokenizer):
            documents.append(document)
            progress(1)
    separator = tokenizer.eos_token_id
    if separator is None and checkpoint.eos_token_ids:
        separator = checkpoint.eos_token_ids[0]
    sequences = pack(documents, settings.max_length, separator)
    sequences.save(kept, source)
    return sequences


def _source(settings: TrainSettings, checkpoint: Checkpoint, entries: list[Entry]) -> str:
    """Tells sequences and answers of one run from those of another with other data."""
    told: list[object] = [str(checkpoint.path), settings.max_length, settings.generate]
    if settings.generate:
        told += [settings.generate_tokens, settings.generate_prompt_tokens]
        told += [settings.temperatures, settings.seed, settings.dtype]
    content = blake2b(repr(told).encode(), digest_size=8)
    for entry in entries:
        content.update(repr(entry).encode())
    return content.hexdigest()


def _require_free(out: Path) -> None:
    """Refuse to write over a model that no run of ours has put there."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a directory for the drafter")
    if (out / WORK).is_dir():
        return
    for file in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        if (out / file).exists():
            raise UsageError(
                f"--out {out} holds a model already ({file}) and no run to go on with; give "
                "another --out, or remove it first"
            )


def _packed(data: tuple[Path, ...]) -> Sequences | None:
    """Files that `slipstream train data` wrote."""
    files = [path for path in data if path.suffix == ".safetensors"]
    if not files:
        return None
    if len(files) < len(data):
        raise UsageError("give packed sequences or texts as --data, not both")
    parts = [Sequences.load(file) for file in files]
    if len({part.length for part in parts}) > 1:
        raise UsageError("the packed sequences of --data have different lengths; pack them alike")
    return Sequences(
        torch.cat([part.token_ids for part in parts]), torch.cat([part.learned for part in parts])
    )


def _job(
    settings: TrainSettings,
    module: RecipeModule,
    recipe: Recipe,
    target: Target,
    training: Sequences,
    validation: Sequences,
    watch: Watcher,
    progress_bar: ProgressBar,
) -> Job:
    work = settings.out / WORK
    sources: list[FeatureSource] = []
    if _keeps_features(settings, target):
        count = how_many(training, target, len(recipe.stream_layers), settings.max_feature_gb)
        training = training.at(slice(count))
        with progress_bar("capturing features", count, "sequences") as progress:
            folder = work / _FEATURES
            capture(folder, training, target, recipe.stream_layers, settings.batch_size, progress)
        sources.append(DiskFeatures(folder, training, target, recipe.stream_layers))
    else:
        sources.append(OnlineFeatures(training, target, recipe.stream_layers))
    sources.append(OnlineFeatures(validation, target, recipe.stream_layers))
    training_batches, validation_batches = (
        Batches(source, target, recipe.columns, settings.batch_size, settings.seed)
        for source in sources
    )
    return Job(
        recipe=recipe,
        training=training_batches,
        validation=validation_batches,
        settings=settings,
        rate=settings.learning_rate or module.LEARNING_RATE,
        device=target.device,
        dtype=target.dtype,
        state=StateFile(work, _fingerprint(settings, training, target)),
        records=Records(settings.out),
        watch=watch,
    )


def _fingerprint(settings: TrainSettings, training: Sequences, target: Target) -> dict[str, Any]:
    """What an interrupted run must have been started with."""
    options = {name: value for name, value in vars(settings.options).items() if value is not None}
    return {
        "kind": settings.kind,
        "target": str(target.path),
        "data": training.digest,
        "seed": settings.seed,
        "batch size": settings.batch_size,
        "accumulation": settings.accumulate,
        "draft length": settings.num_speculative_tokens,
        "drafter": repr(options),
    }


def _precision(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """bfloat16 where a GPU multiplies in it, unless something else is asked for."""
    if settings.dtype != "auto":
        return dtype_named(settings.dtype)
    return torch.float32 if device == torch.device("cpu") else torch.bfloat16


def _keeps_features(settings: TrainSettings, target: Target) -> bool:
    if settings.features != "auto":
        return settings.features == "disk"
    return target.config.num_matrix_parameters > _SMALL_TARGET


def _room(settings: TrainSettings) -> int:
    """Positions behind a sequence that a draft may take."""
    return 1 + (settings.num_speculative_tokens or 16)
