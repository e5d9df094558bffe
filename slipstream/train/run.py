"""From settings to an exported drafter."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.models.loading import ProgressBar, no_progress_bar
from slipstream.train.batches import Batches, FeatureSource, OnlineFeatures
from slipstream.train.card import write_card
from slipstream.train.features import DiskFeatures, capture, how_many
from slipstream.train.loop import Job, Noted, Report, Watcher, never, train
from slipstream.train.losses import ChainAcceptance
from slipstream.train.orders import WORK, fingerprint, make_writable, take_order
from slipstream.train.plots import draw_curves
from slipstream.train.recipe import Order, Recipe, Workshop, recipe_module
from slipstream.train.records import Records
from slipstream.train.sequences import Sequences
from slipstream.train.settings import TrainSettings
from slipstream.train.state import StateFile
from slipstream.train.target import Target, load_target

_DATA, _ANSWERS, _FEATURES = "sequences.safetensors", "answers.jsonl", "features"
_MAX_VALIDATION = 256  # sequences; more would tell little more
# Targets with more parameters are run once over the text rather than in every epoch.
_SMALL_TARGET = 200_000_000
_FEATURE_GB = 20.0


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
    noted: Noted = never,
) -> Trained:
    """Train a drafter, or go on with a run that was interrupted, and export it.

    Args:
        command: that the model card tells.
        watch: is told of every logged step.
        progress_bar: shows how long preparations take.
        noted: within it, a wish to stop is noted, and told by what it gives.

    Raises:
        RunStoppedError: it was to stop, and what it has learned is kept.
        UsageError: settings that contradict each other, the data or the target.
        CheckpointError: files that cannot be read.
    """
    began = time.perf_counter()
    module = recipe_module(settings.kind)
    order, data = take_order(settings, module)
    work, told = settings.out / WORK, fingerprint(order, data.source)
    StateFile(work, told).require_same()
    make_writable(work, settings)
    sequences = data.sequences(work / _DATA, work / _ANSWERS, progress_bar)
    training, validation = sequences.split(settings.validation, settings.seed)
    validation = validation.at(slice(_MAX_VALIDATION))
    longest = order.length + 1 + order.places
    target = load_target(order.target, order.shape, order.dtype, order.device, longest)
    recipe = module.build(Workshop(order, target, training))
    job = _job(order, told, recipe, target, (training, validation), watch, progress_bar)
    acceptance = train(job, noted)
    export_dtype = order.target.weights_dtype or torch.bfloat16
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


def _job(
    order: Order,
    told: dict[str, Any],
    recipe: Recipe,
    target: Target,
    parts: tuple[Sequences, Sequences],
    watch: Watcher,
    progress_bar: ProgressBar,
) -> Job:
    settings, work, (training, validation) = order.settings, order.settings.out / WORK, parts
    sources: list[FeatureSource] = []
    if _keeps_features(settings, target):
        room = settings.max_feature_gb or _FEATURE_GB
        count = how_many(training, target, len(recipe.stream_layers), room)
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
        rate=order.rate,
        device=order.device,
        dtype=order.dtype,
        state=StateFile(work, {**told, "sequences": training.digest}),
        records=Records(settings.out),
        watch=watch,
    )


def _keeps_features(settings: TrainSettings, target: Target) -> bool:
    if settings.features != "auto":
        return settings.features == "disk"
    return target.config.num_matrix_parameters > _SMALL_TARGET
