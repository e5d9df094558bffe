"""Runs a case: every operation on a real engine, with all that has to hold checked after it."""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from slipstream.core.errors import UsageError
from slipstream.engine.engine import Engine
from slipstream.engine.prompts import PromptEncoder
from slipstream.engine.samples import Submission
from slipstream.engine.step_results import Launched, StepResult
from tests import fake_drafters
from tests.chaos.case import ALL_WISHES, MAX_MODEL_LEN, Case, Operation
from tests.chaos.checks import check_answer, check_counts, check_engine, check_metrics
from tests.chaos.models import Answers, Models, params_of, timeless
from tests.chaos.traps import BrokenOffError, Traps, is_meant
from tests.e2e.test_interrupted_steps import broken_off
from tests.padded_steps import pack_small_steps, packed_rows

OPERATIONS = (
    *("add", "step", "abort", "reset", "preempt", "poison"),
    *("interrupt", "error", "interrupt line", "error line", "load", "unload"),
)
MOST_LIVE = 9  # requests at once; beyond that nobody is added
MOST_STEPS = 3000  # to an engine's last token


class BrokenError(Exception):
    """Something does not hold.

    Attributes:
        done: operations of the case up to it.
        seen: as of `World`.
    """

    def __init__(self, done: int, seen: Counter[str], cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.done, self.seen = done, seen


class LateLoads:
    """Takes the place of the thread that loads adapters: each is there two operations later, so
    that a case can be run again."""

    def __init__(self) -> None:
        self._due: list[tuple[int, Future[None], Callable[[], None]]] = []
        self._now = 0

    def submit(self, write: Callable[..., None], *arguments: Any) -> Future[None]:
        """See `Executor.submit`."""
        future = Future[None]()
        self._due.append((self._now + 2, future, partial(write, *arguments)))
        return future

    def proceed(self) -> None:
        """An operation is over."""
        self._now += 1
        while self._due and self._due[0][0] <= self._now:
            _, future, write = self._due.pop(0)
            write()
            future.set_result(None)


@dataclass
class Asked:
    """A request, and what is known of it."""

    operation: Operation
    submission: Submission
    max_tokens: int
    adapter: int = -1


class World:
    """An engine, its requests, and their expected outputs.

    Attributes:
        seen: how often each kind of thing happened.
    """

    def __init__(self, models: Models, answers: Answers, case: Case) -> None:
        self._answers, self._settings = answers, case.settings
        self.seen: Counter[str] = Counter()
        self.llm = models.build(case.settings)
        self.engine: Engine = self.llm.engine
        self._encoder = PromptEncoder(self.engine.tokenizer, self.engine.resolved.vocab_size)
        self._live: list[Asked] = []
        self._number = self._faults_due = 0
        self._slack = 0  # counts of requests that errors have just ended may be off by so many
        self._ended = Counter[str]()  # metrics of requests that ended
        self._models, self._loads = models, LateLoads()
        adapters: Any = self.engine.adapters
        adapters._loader = self._loads
        for number in range(case.settings.adapters):
            self._load(number)
        self._traps = Traps(self.engine)
        self._make_timeless()
        self._watch_recovery()
        fake_drafters.ANSWERS.clear()
        fake_drafters.ANSWERS[0,] = [0]  # the engine's own probe

    # ------------------------------------------------------------------ operations

    def do(self, operation: Operation) -> None:
        """One operation, and the checks after it."""
        kind = operation.do
        if kind == "add" and len(self._live) < MOST_LIVE:
            self._add(operation)
        elif kind == "abort":
            self._with_one(operation.which, self._abort)
        elif kind == "reset":
            self.engine.reset_prefix_cache()
        elif kind == "preempt":
            self._preempt()
        elif kind in ("load", "unload") and self._settings.adapters:
            self._change_adapter(kind, operation.which % self._settings.adapters)
        elif kind == "poison":
            self._with_one(operation.which, self._poison)
        elif kind in ("interrupt", "error"):
            error = _error(kind)
            with self._traps.at_seam(operation.which, error):
                self._broken_step(error)
            if self._traps.sprung:
                self.seen[f"{kind} sprung"] += 1
        elif kind.endswith("line") and not self._traps.poisoned:
            error = _error(kind.split()[0])
            # The first line of a step is its `try`, where an interrupt may come but no error.
            with broken_off(operation.which + isinstance(error, Exception), error):
                self._broken_step(error)
        else:
            self._step()
        self.seen[kind] += 1
        self._loads.proceed()
        self.check()

    def drain(self) -> None:
        """Steps until everybody has ended, each checked."""
        for _ in range(MOST_STEPS):
            if not self.engine.has_unfinished:
                assert not self._live, "a request ended without a word"
                if self._settings.steps == "packed":
                    self.seen["packed"] += len(packed_rows(self.llm))
                return
            self._step()
            self.seen["step"] += 1
            self._loads.proceed()
            self.check()
        raise AssertionError(f"after {MOST_STEPS} steps requests are still unfinished")

    def _add(self, operation: Operation) -> None:
        room = MAX_MODEL_LEN - 1
        prompt = self._answers.prompt(self._settings, operation.which, operation.length)[:room]
        params = params_of(ALL_WISHES[operation.wish], operation.max_tokens)
        if self._settings.drafter == "none" and params.num_speculative_tokens:
            params = replace(params, num_speculative_tokens=None)
        encoded = self._encoder.encode({"prompt_token_ids": prompt}, params)
        encoded = replace(encoded, cache_salt=operation.salt, priority=operation.priority)
        adapter = -1
        if operation.adapter >= 0 and self._settings.adapters:
            adapter = operation.adapter % self._settings.adapters
        self._remember(prompt, adapter)
        self._number += 1
        try:
            if adapter >= 0:
                named = self.engine.adapters.named(f"a{adapter}")
                encoded = replace(encoded, adapter=named)
                self.seen["adapted"] += 1
            submission = self.engine.add(str(self._number), encoded, params)
        except UsageError:  # as shorter settings may do
            self.seen["refused"] += 1
            return
        assert params.max_tokens is not None
        self._live.append(Asked(operation, submission, params.max_tokens, adapter))

    def _change_adapter(self, kind: str, number: int) -> None:
        """Requests that have an adapter keep it, whatever becomes of its name."""
        adapters = self.engine.adapters
        if f"a{number}" in adapters.names:
            adapters.remove(f"a{number}")
        if kind == "load":
            self._load(number)

    def _load(self, number: int) -> None:
        asked, adapters = self._models.adapter(self._settings, number), self.engine.adapters
        drafts = None if asked.draft_lora_path is None else str(asked.draft_lora_path)
        factors = adapters.read(str(asked.lora_path), drafts)
        adapters.add(asked.lora_name, factors, drafts is not None)

    def _remember(self, prompt: list[int], adapter: int) -> None:
        if self._settings.drafter in ("perfect", "in turn"):
            settings = self._settings
            plain = self._answers.of(*(settings.target, settings.int8, prompt, "greedy", adapter))
            fake_drafters.ANSWERS[tuple(prompt)] = [*prompt, *plain[0].token_ids]

    def _with_one(self, which: int, act: Callable[[Asked], None]) -> None:
        if self._live:
            act(self._live[which % len(self._live)])

    def _abort(self, asked: Asked) -> None:
        self.engine.abort(asked.submission.request_id)
        assert asked.submission.finished

    def _poison(self, asked: Asked) -> None:
        self._traps.poisoned.add(asked.submission.request_id)

    def _preempt(self) -> None:
        """Preempt the last request, as if the cache had run out of blocks."""
        scheduler: Any = self.engine.scheduler
        plan = scheduler._secure_known_tokens

        def preempting() -> list[Any]:
            running = scheduler.running
            forced = [scheduler._preempt(running[-1])] if len(running) > 1 else []
            return [*forced, *plan()]

        scheduler._secure_known_tokens = preempting
        try:
            self._step()
        finally:
            del scheduler._secure_known_tokens

    def _step(self) -> None:
        self.engine.step()

    def _broken_step(self, error: BaseException) -> None:
        self._faults_due += isinstance(error, Exception)
        try:
            self._step()
        except KeyboardInterrupt as caught:
            if caught is not error:  # it is that of whoever runs this
                raise

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """Check all invariants that hold between two operations."""
        check_engine(self.engine)
        for asked in [*self._live]:
            self._check_asked(asked)
        self._check_totals()

    def _check_asked(self, asked: Asked) -> None:
        submission, settings = asked.submission, self._settings
        longest = self.engine.resolved.limits.num_positions * len(submission.samples)
        ended = any(sample.request.finished for sample in submission.samples)
        check_counts(submission, longest if ended else 0)
        if submission.finished:
            self._take_leave(asked)
        if submission.error is not None or not submission.finished:
            return
        params = submission.params
        if params.temperature == 0 or params.seed is not None:
            prompt = submission.prompt_token_ids
            plain = self._answers.of(
                *(settings.target, settings.int8, prompt, asked.operation.wish, asked.adapter)
            )
            check_answer(submission.output().outputs, plain, asked.max_tokens, whole=False)
        # The caches of drafters have no 8 bits.
        exact = settings.drafter == "self" and not settings.int8
        if exact and asked.operation.wish in ("greedy", "two greedy"):
            counted = submission.metrics
            assert counted.num_accepted_tokens == counted.num_draft_tokens, (
                f"{submission.request_id}: the target refused what it had drafted itself"
            )

    def _take_leave(self, asked: Asked) -> None:
        submission = asked.submission
        self._live.remove(asked)
        poisoned = submission.request_id in self._traps.poisoned
        self._traps.poisoned.discard(submission.request_id)
        if submission.error is not None:
            self.seen["ended by errors"] += 1
            if not poisoned:
                assert self._faults_due > 0, f"nobody broke a step: {submission.error!r}"
                self._faults_due -= 1
            places = self.engine.resolved.limits.num_speculative_tokens + 1
            self._slack += places * len(submission.samples)
        self.seen["finished"] += submission.error is None
        self.seen["prefix hits"] += bool(submission.metrics.num_cached_tokens)
        self.seen["preempted"] += submission.metrics.num_preemptions
        self.seen["drafted"] += submission.metrics.num_draft_tokens
        self.seen["accepted"] += submission.metrics.num_accepted_tokens
        self.seen["tokens"] += sum(it.request.num_output_tokens for it in submission.samples)
        self._ended.update(_totals(submission))

    def _check_totals(self) -> None:
        """The engine's counts are those of its requests."""
        counted = self.engine.metrics
        check_metrics(counted.speculation)
        sums = Counter(self._ended)
        for asked in self._live:
            sums.update(_totals(asked.submission))
        drafts = counted.speculation
        own = {
            "drafted": drafts.num_draft_tokens,
            "accepted": drafts.num_accepted_tokens,
            "tokens": counted.num_output_tokens,
        }
        off = {name: count - sums[name] for name, count in own.items()}
        assert all(abs(count) <= self._slack for count in off.values()), (
            f"{own} of all, {dict(sums)} of requests"
        )
        self._ended.update(off)
        self._slack = 0

    # ------------------------------------------------------------------ the engine, watched

    def _make_timeless(self) -> None:
        step: Any = self.engine._step
        finish = step.finish

        def finished(launched: Launched) -> StepResult:
            result: StepResult = finish(launched)
            return replace(result, report=replace(result.report, times=timeless(result.report)))

        step.finish = finished

    def _watch_recovery(self) -> None:
        """Fail on any step that failed unexpectedly, even if its requests were run again alone.

        A second fault while a first one is looked into means that all steps fail.
        """
        engine: Any = self.engine
        recover, probe = engine._recover, engine._probe

        def recovering(error: Exception) -> Any:
            assert is_meant(error), f"nobody broke this step off: {error!r}"
            return recover(error)

        def spared() -> None:
            self._traps.disarm()
            probe()

        engine._recover, engine._probe = recovering, spared


def _totals(submission: Submission) -> dict[str, int]:
    counted = submission.metrics
    return {
        "drafted": counted.num_draft_tokens,
        "accepted": counted.num_accepted_tokens,
        "tokens": sum(sample.num_taken for sample in submission.samples),
    }


def _error(kind: str) -> BaseException:
    return KeyboardInterrupt() if kind == "interrupt" else BrokenOffError()


def run(case: Case, models: Models, answers: Answers) -> Counter[str]:
    """Run a case to its end and let everybody finish; what happened how often.

    Raises:
        BrokenError: something does not hold.
        UsageError: the engine refuses the settings.
    """
    logger = logging.getLogger("slipstream")
    usual = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if case.settings.steps == "packed":  # this is read while steps run
                pack_small_steps(patch)
            return _run(case, models, answers)
    finally:
        logger.setLevel(usual)


def _run(case: Case, models: Models, answers: Answers) -> Counter[str]:
    world = World(models, answers, case)
    done = 0
    try:
        for operation in case.operations:
            done += 1
            world.do(operation)
        world.drain()
    except UsageError:
        raise
    except Exception as error:
        raise BrokenError(done, world.seen, error) from error
    return world.seen
