"""A training run from its settings to an exported drafter."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import UsageError
from slipstream.models.adapters import adapter_rank
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.loading import ProgressBar, dtype_named, no_progress_bar
from slipstream.runner.capability import choose_device, training_dtype
from slipstream.speculative.options import read_target_config
from slipstream.train.batches import Batches, FeatureSource, OnlineFeatures
from slipstream.train.card import write_card
from slipstream.train.data import Data
from slipstream.train.features import DiskFeatures, count_that_fits
from slipstream.train.losses import ChainAcceptance
from slipstream.train.metrics import MetricsLog
from slipstream.train.plan import WORK, RunPlan, make_writable, require_unused
from slipstream.train.recipe import Recipe, recipe_class
from slipstream.train.sequences import Sequences
from slipstream.train.settings import TrainSettings
from slipstream.train.state import StateFile
from slipstream.train.target import SMALL_TARGET, Target, load_target, require_trainable
from slipstream.train.trainer import OnReport, StopRequests, Trainer, no_stop_requests
from slipstream.train.vocabulary import require_draft_vocabulary

_DATA, _ANSWERS, _FEATURES = "sequences.safetensors", "answers.jsonl", "features"
_MAX_VALIDATION = 256  # sequences; more would hardly change the figures
_FEATURE_GB = 20.0


@dataclass(frozen=True)
class Trained:
    """The result of a run.

    Attributes:
        recipe: the drafter with its parameters.
        seconds: of the whole run, since it was last started.
    """

    recipe: Recipe[Any]
    folder: Path
    acceptance: ChainAcceptance
    seconds: float


def run_training(
    settings: TrainSettings,
    command: str = "",
    on_report: OnReport = lambda _: None,
    progress_bar: ProgressBar = no_progress_bar,
    stop_requests: StopRequests = no_stop_requests,
) -> Trained:
    """Train a drafter, or continue a run that was interrupted, and export it.

    Args:
        command: the command line, for the model card.
        on_report: is called with every logged step.
        progress_bar: shows the progress of preparations.
        stop_requests: see `StopRequests`.

    Raises:
        RunStoppedError: it was asked to stop, and wrote a checkpoint.
        UsageError: settings that contradict each other, the data or the target.
        CheckpointError: files that cannot be read or written.
    """
    began = time.perf_counter()
    recipe_kind = recipe_class(settings.kind)
    plan, data = make_plan(settings, recipe_kind)
    work, fingerprint = settings.out / WORK, plan.fingerprint(data.source)
    StateFile(work, fingerprint).require_same()
    make_writable(work, settings)
    sequences = data.sequences(work / _DATA, work / _ANSWERS, progress_bar)
    training, validation = sequences.split(settings.validation, settings.seed)
    validation = validation.at(slice(_MAX_VALIDATION))
    longest = plan.length + 1 + plan.num_draft_tokens
    target = load_target(plan.target, plan.shape, plan.dtype, plan.device, longest, settings.lora)
    recipe = recipe_kind(plan, target, training)
    features = _training_features(plan, recipe, target, training, progress_bar)
    metrics = MetricsLog(settings.out)
    held_out = OnlineFeatures(validation, target, recipe.stream_layers)
    size, seed = settings.batch_size, settings.seed
    trainer = Trainer(
        plan,
        recipe,
        Batches(features, target, recipe.vocabulary, size, seed),
        Batches(held_out, target, recipe.vocabulary, size, seed),
        StateFile(work, {**fingerprint, "sequences": features.sequences.digest}),
        metrics,
        on_report,
    )
    acceptance = trainer.train(stop_requests)
    write_card(recipe, command, acceptance, metrics, trainer.tokens_per_step)
    metrics.draw()
    return Trained(recipe, settings.out, acceptance, time.perf_counter() - began)


def make_plan(settings: TrainSettings, recipe: type[Recipe[Any]]) -> tuple[RunPlan, Data]:
    """The plan of a run and its data, checked as far as that is cheap.

    Raises:
        UsageError: settings that contradict each other, the kind, the data or the target.
        CheckpointError: configs that cannot be read.
    """
    settings.require_only(recipe.OPTIONS)
    require_unused(settings.out)
    device, _ = choose_device(settings.device)
    target = Checkpoint(resolve_checkpoint(settings.target, settings.revision))
    shape = read_target_config(target)
    require_trainable(target, shape)
    if settings.lora is not None:
        adapter_rank(settings.lora)  # which raises an error where it cannot be read
    data = Data(settings, target, shape.vocab_size)
    plan = RunPlan(
        settings,
        target,
        shape,
        data.length,
        settings.num_speculative_tokens or recipe.NUM_DRAFT_TOKENS,
        settings.learning_rate or recipe.LEARNING_RATE,
        device,
        training_dtype(device) if settings.dtype == "auto" else dtype_named(settings.dtype),
    )
    if plan.length <= 2 * plan.num_draft_tokens:
        raise UsageError(
            f"sequences of {plan.length} tokens have no room for drafts of "
            f"{plan.num_draft_tokens}; raise --max-length, or lower --num-speculative-tokens"
        )
    require_draft_vocabulary(plan)
    recipe.configure(plan)
    data.require_enough()
    return plan, data


def _training_features(
    plan: RunPlan,
    recipe: Recipe[Any],
    target: Target,
    sequences: Sequences,
    progress_bar: ProgressBar,
) -> FeatureSource:
    """The target's features of the training sequences, or of those that fit on disk."""
    settings, layers = plan.settings, recipe.stream_layers
    on_disk = settings.features == "disk"
    if settings.features == "auto":
        on_disk = plan.shape.num_matrix_parameters > SMALL_TARGET
    if not on_disk:
        return OnlineFeatures(sequences, target, layers)
    count = count_that_fits(sequences, target, len(layers), settings.max_feature_gb or _FEATURE_GB)
    sequences, folder = sequences.at(slice(count)), settings.out / WORK / _FEATURES
    with progress_bar("capturing features", count, "sequences") as progress:
        return DiskFeatures(folder, sequences, target, layers, settings.batch_size, progress)
