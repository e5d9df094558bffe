"""The training loop."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.train.batches import Batches, numbered_generator
from slipstream.train.losses import ChainAcceptance
from slipstream.train.metrics import MetricsLog
from slipstream.train.parameters import Trainable
from slipstream.train.plan import RunPlan
from slipstream.train.recipe import BatchLoss, Recipe
from slipstream.train.settings import TrainSettings
from slipstream.train.state import RunProgress, StateFile

_BETAS = (0.9, 0.95)
_LAST_SHARE = 0.05  # of the learning rate, at the end


@dataclass(frozen=True)
class Report:
    """The results of a step; NaN or None where nothing was measured.

    Attributes:
        done: the share of the run, from 0 to 1.
        resumed: the run continues after this step of an earlier one.
    """

    step: int
    done: float
    loss: float = math.nan
    tokens_per_second: float = math.nan
    acceptance: ChainAcceptance | None = None
    resumed: bool = False


OnReport = Callable[[Report], None]
# A context in which a request to stop waits for the end of the step; gives whether there was one.
StopRequests = Callable[[], AbstractContextManager[Callable[[], bool]]]


class RunStoppedError(Exception):
    """A run was asked to stop: it ended its step and wrote a checkpoint.

    Attributes:
        step: the last one.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


def no_stop_requests() -> AbstractContextManager[Callable[[], bool]]:
    """Only an exception stops the run."""
    return nullcontext(lambda: False)


class Trainer:
    """A run from its checkpoint, or the beginning, to its end."""

    def __init__(
        self,
        plan: RunPlan,
        recipe: Recipe[Any],
        training: Batches,
        validation: Batches,
        state: StateFile,
        metrics: MetricsLog,
        on_report: OnReport,
    ) -> None:
        self._plan, self._settings, self._recipe = plan, plan.settings, recipe
        self._training, self._validation = training, validation
        self._state, self._metrics, self._on_report = state, metrics, on_report
        self._optimizer = _optimizer(recipe.trained, plan.settings)
        self._progress = RunProgress()
        self.tokens_per_step = plan.settings.accumulate * training.tokens_per_batch

    def train(self, stop_requests: StopRequests = no_stop_requests) -> ChainAcceptance:
        """Train to the end; the result of the last validation.

        Raises:
            RunStoppedError: it was asked to stop.
            CheckpointError: a checkpoint cannot be read or written.
        """
        self._progress = self._state.restore(self._recipe.trained, self._optimizer)
        self._metrics.rewind(self._progress.step)
        if self._progress.step == 0:
            self._validate()
        else:
            self._on_report(Report(self._progress.step, self._done, resumed=True))
        with stop_requests() as is_to_stop:
            while self._done < 1.0:
                self._advance()
                if is_to_stop():
                    self._save()
                    raise RunStoppedError(self._progress.step)
        self._save()
        return self._validate()

    @property
    def _done(self) -> float:
        """The share of the run that is done, by steps or by time, whichever is larger."""
        shares, settings = [0.0], self._settings
        if settings.steps is not None:
            shares.append(self._progress.step / settings.steps)
        if settings.minutes is not None:
            shares.append(self._progress.seconds / (60 * settings.minutes))
        return min(1.0, max(shares))

    def _save(self) -> None:
        """Write the checkpoint, and export the drafter so far, which is ready to serve."""
        self._state.save(self._recipe.trained, self._optimizer, self._progress)
        self._recipe.export(self._settings.out, self._plan.shape.dtype)

    def _advance(self) -> None:
        """One step, with its record, validation and checkpoint where they are due."""
        began, settings, step = time.perf_counter(), self._settings, self._progress.step + 1
        rate = _learning_rate(self._plan.learning_rate, settings.warmup, self._done)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        result = self._step()
        is_logged = step % settings.log_every == 0 or step == 1
        loss = float(result.loss) if is_logged else 0.0  # waits for the device
        seconds = self._progress.seconds + time.perf_counter() - began
        self._progress = RunProgress(step, seconds)
        if is_logged:
            self._log(result, loss, rate)
        if step % settings.validate_every == 0 and self._done < 1.0:
            self._validate()
        if step % settings.checkpoint_every == 0:
            self._save()

    def _step(self) -> BatchLoss:
        """One change of the parameters; the mean over its batches."""
        settings = self._settings
        results = []
        for index in range(settings.accumulate):
            number = self._progress.step * settings.accumulate + index
            generator = numbered_generator(settings.seed, number)
            batch = self._training.at(number)
            with self._precision():
                result = self._recipe.training_loss(batch, generator)
            (result.loss / settings.accumulate).backward()  # type: ignore[no-untyped-call]
            results.append(BatchLoss(result.loss.detach(), result.accuracy))
        tensors = [parameter.tensor for parameter in self._recipe.trained.parameters]
        torch.nn.utils.clip_grad_norm_(tensors, settings.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return BatchLoss(
            torch.stack([result.loss for result in results]).mean(),
            torch.stack([result.accuracy for result in results]).mean(0),
        )

    @torch.no_grad()
    def _validate(self) -> ChainAcceptance:
        nothing = [0.0] * self._plan.num_draft_tokens
        found = ChainAcceptance(0.0, [*nothing], nothing)
        for batch in self._validation.in_order():
            with self._precision():
                positions, weight = self._recipe.evaluate(batch)
            found.add(positions, weight)
        step = self._progress.step
        self._metrics.add(
            step,
            kind="validation",
            acceptance_length=round(found.greedy_length, 4),
            acceptance_length_sampled=round(found.sampled_length, 4),
            accepted_per_place=[round(rate, 4) for rate in found.rates()],
            drafts=int(found.drafts),
        )
        self._on_report(Report(step, self._done, acceptance=found))
        return found

    def _log(self, result: BatchLoss, loss: float, rate: float) -> None:
        step, seconds = self._progress.step, self._progress.seconds
        self._metrics.add(
            step,
            kind="training",
            loss=loss,
            learning_rate=rate,
            matches_per_place=[round(share, 4) for share in result.accuracy.tolist()],
            seconds=round(seconds, 2),
        )
        speed = step * self.tokens_per_step / max(seconds, 1e-9)
        self._on_report(Report(step, self._done, loss, speed))

    def _precision(self) -> torch.autocast:
        dtype = self._plan.dtype
        enabled = dtype != torch.float32
        return torch.autocast(self._plan.device.type, dtype if enabled else None, enabled=enabled)


def _learning_rate(highest: float, warmup: float, done: float) -> float:
    """A linear rise, then half a cosine down to a small share."""
    if done < warmup:
        return highest * max(done / warmup, 0.01)
    rest = (done - warmup) / (1 - warmup)
    return highest * (_LAST_SHARE + (1 - _LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * rest)))


def _optimizer(trained: Trainable, settings: TrainSettings) -> torch.optim.AdamW:
    """Matrices have weight decay, norms and biases have none."""

    def tensors(are_matrices: bool) -> list[Tensor]:
        every = [parameter.tensor for parameter in trained.parameters]
        return [tensor for tensor in every if (tensor.dim() > 1) == are_matrices]

    groups = [
        {"params": tensors(True), "weight_decay": settings.weight_decay},
        {"params": tensors(False), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=_BETAS)
