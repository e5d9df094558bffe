"""The training loop."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.batches import Batches
from slipstream.train.losses import ChainAcceptance
from slipstream.train.parameters import Parameter, Trainable
from slipstream.train.recipe import Lesson, Recipe
from slipstream.train.records import Records
from slipstream.train.settings import TrainSettings
from slipstream.train.state import Progress, StateFile

_BETAS = (0.9, 0.95)
_LAST_SHARE = 0.05  # of the rate, at the end


@dataclass(frozen=True)
class Report:
    """What a watcher is told after a step; what was not measured is not a number, or None.

    Attributes:
        done: from 0 to 1.
        goes_on: it is the step that an earlier run has come to.
    """

    step: int
    done: float
    loss: float
    rate: float
    tokens_per_second: float
    acceptance: ChainAcceptance | None = None
    goes_on: bool = False


Watcher = Callable[[Report], None]
Noted = Callable[[], AbstractContextManager[Callable[[], bool]]]


class RunStoppedError(Exception):
    """A run was to stop: it ended its step and kept what it has learned.

    Attributes:
        step: that it goes on behind.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped behind step {step}")
        self.step = step


@contextmanager
def never() -> Iterator[Callable[[], bool]]:
    """Nobody wants a run to stop."""
    yield lambda: False


@dataclass(frozen=True, eq=False)
class Job:
    """A recipe with all that it is trained with.

    Attributes:
        rate: the highest learning rate.
        dtype: of products; the parameters are float32.
    """

    recipe: Recipe
    training: Batches
    validation: Batches
    settings: TrainSettings
    rate: float
    device: torch.device
    dtype: torch.dtype
    state: StateFile
    records: Records
    watch: Watcher


def train(job: Job, noted: Noted = never) -> ChainAcceptance:
    """Train to the end, from where an earlier run was interrupted; the last validation.

    Args:
        noted: within it, a wish to stop is noted, and told by what it gives.

    Raises:
        RunStoppedError: it was to stop.
    """
    optimizer = _optimizer(job.recipe.trained, job.settings)
    progress = job.state.restore(job.recipe.trained, optimizer)
    job.records.rewind(progress.step)
    if progress.step == 0:
        _validate(job, progress)
    else:
        done = _done(job.settings, progress)
        job.watch(Report(progress.step, done, math.nan, math.nan, math.nan, goes_on=True))
    with noted() as is_to_stop:
        while _done(job.settings, progress) < 1.0:
            progress = _advance(job, optimizer, progress)
            if is_to_stop():
                job.state.save(job.recipe.trained, optimizer, progress)
                raise RunStoppedError(progress.step)
    job.state.save(job.recipe.trained, optimizer, progress)
    return _validate(job, progress)


def _advance(job: Job, optimizer: torch.optim.Optimizer, progress: Progress) -> Progress:
    """One step with all that is told and kept of it."""
    began, settings = time.perf_counter(), job.settings
    rate = _rate(job.rate, settings.warmup, _done(settings, progress))
    for group in optimizer.param_groups:
        group["lr"] = rate
    lesson = _step(job, optimizer, progress.step)
    tells = (progress.step + 1) % settings.log_every == 0 or progress.step == 0
    loss = float(lesson.loss) if tells else 0.0  # waits for the device
    seconds = time.perf_counter() - began
    progress = Progress(progress.step + 1, progress.seconds + seconds)
    if tells:
        _tell(job, progress, lesson, loss, rate)
    _keep(job, optimizer, progress)
    return progress


def _keep(job: Job, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Validation and checkpoints, where it is time."""
    settings, ends = job.settings, _done(job.settings, progress) >= 1.0
    if progress.step % settings.validate_every == 0 and not ends:
        _validate(job, progress)
    if progress.step % settings.checkpoint_every == 0:
        job.state.save(job.recipe.trained, optimizer, progress)


def _step(job: Job, optimizer: torch.optim.Optimizer, step: int) -> Lesson:
    """One change of the parameters; its mean loss and matches."""
    count = job.settings.accumulate
    lessons = []
    for index in range(count):
        number = step * count + index
        generator = torch.Generator().manual_seed(job.settings.seed * 1_000_003 + number)
        batch = job.training.at(number)
        with _precision(job):
            lesson = job.recipe.learn(batch, generator)
        (lesson.loss / count).backward()  # type: ignore[no-untyped-call]
        lessons.append(Lesson(lesson.loss.detach(), lesson.matches))
    tensors = [parameter.tensor for parameter in job.recipe.trained.parameters]
    torch.nn.utils.clip_grad_norm_(tensors, job.settings.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Lesson(
        torch.stack([lesson.loss for lesson in lessons]).mean(),
        torch.stack([lesson.matches for lesson in lessons]).mean(0),
    )


@torch.no_grad()
def _validate(job: Job, progress: Progress) -> ChainAcceptance:
    found: ChainAcceptance | None = None
    for batch in job.validation.in_order():
        with _precision(job):
            places, weight = job.recipe.test(batch)
        found = found or ChainAcceptance.none(len(places))
        found.add(places, weight)
    assert found is not None
    job.records.add(
        progress.step,
        kind="validation",
        acceptance_length=round(found.greedy_length, 4),
        acceptance_length_sampled=round(found.sampled_length, 4),
        accepted_per_place=[round(rate, 4) for rate in found.rates()],
        drafts=int(found.drafts),
    )
    done = _done(job.settings, progress)
    job.watch(Report(progress.step, done, math.nan, math.nan, math.nan, found))
    return found


def _tell(job: Job, progress: Progress, lesson: Lesson, loss: float, rate: float) -> None:
    matches = [round(share, 4) for share in lesson.matches.tolist()]
    job.records.add(
        progress.step,
        kind="training",
        loss=loss,
        learning_rate=rate,
        matches_per_place=matches,
        seconds=round(progress.seconds, 2),
    )
    tokens = progress.step * job.settings.accumulate * job.training.tokens_per_batch
    speed = tokens / max(progress.seconds, 1e-9)
    job.watch(Report(progress.step, _done(job.settings, progress), loss, rate, speed))


def _precision(job: Job) -> torch.autocast:
    enabled = job.dtype != torch.float32
    return torch.autocast(job.device.type, job.dtype if enabled else None, enabled=enabled)


def _done(settings: TrainSettings, progress: Progress) -> float:
    """From 0 to 1, by steps or by time, whichever is further."""
    shares = [0.0]
    if settings.steps is not None:
        shares.append(progress.step / settings.steps)
    if settings.minutes is not None:
        shares.append(progress.seconds / (60 * settings.minutes))
    return min(1.0, max(shares))


def _rate(highest: float, warmup: float, done: float) -> float:
    """A linear rise, then half a cosine down to a small share."""
    if done < warmup:
        return highest * max(done / warmup, 0.01)
    rest = (done - warmup) / (1 - warmup)
    return highest * (_LAST_SHARE + (1 - _LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * rest)))


def _optimizer(trained: Trainable, settings: TrainSettings) -> torch.optim.AdamW:
    """Weights of matrices decay, those of norms and biases do not."""

    def tensors(of_matrices: bool) -> list[Tensor]:
        return [p.tensor for p in trained.parameters if _is_matrix(p) == of_matrices]

    groups = [
        {"params": tensors(True), "weight_decay": settings.weight_decay},
        {"params": tensors(False), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=_BETAS)


def _is_matrix(parameter: Parameter) -> bool:
    return parameter.tensor.dim() > 1
