"""A workload for an engine in this process, and runs of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from slipstream.bench.datasets import BenchPrompt
from slipstream.bench.speculation import LEAST_DRAFTED, SpeculationCounts, from_outputs
from slipstream.core.errors import counted
from slipstream.core.outputs import RequestOutput
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.models.tokenizer import Tokenizer

PARTS = ("draft", "target", "verify", "rest")


@dataclass(frozen=True)
class Workload:
    """Prompts and sampling parameters; a prompt's own max_tokens takes precedence."""

    prompts: Sequence[BenchPrompt]
    params: SamplingParams

    @property
    def title(self) -> str:
        tokens = output_lengths(self.prompts, self.params.max_tokens or 0, self.params.ignore_eos)
        return (
            f"{counted(len(self.prompts), 'prompt')}, {tokens}, "
            f"temperature {self.params.temperature:g}"
        )

    def stream(self, llm: "LLM") -> "Iterator[RequestOutput]":
        given = [engine_prompt(llm, prompt) for prompt in self.prompts]
        lengths = [prompt.max_tokens or self.params.max_tokens for prompt in self.prompts]
        return llm.stream(given, [replace(self.params, max_tokens=it) for it in lengths])


def output_lengths(prompts: Sequence[BenchPrompt], default: int, exact: bool) -> str:
    """The prompts' output tokens in words; `exact`: no output ends earlier by itself."""
    lengths = [default if prompt.max_tokens is None else prompt.max_tokens for prompt in prompts]
    least, most = min(lengths, default=default), max(lengths, default=default)
    if least < most:
        varied = f"{least} to {counted(most, 'token')}"
        return f"{varied} each" if exact else f"limits of {varied}"
    return f"{'' if exact else 'up to '}{counted(most, 'token')} each"


def chat_tokens(tokenizer: "Tokenizer", prompt: BenchPrompt) -> list[int]:
    """A chat as token ids, by the model's own template."""
    from slipstream.models.chat_template import ChatTemplate

    text = ChatTemplate(tokenizer).render(list(prompt.messages or ()))
    return tokenizer.encode(text, add_special_tokens=False)  # the template writes special tokens


def engine_prompt(llm: "LLM", prompt: BenchPrompt) -> Any:
    """The prompt as the engine accepts it; chats are rendered by the model's template."""
    if prompt.text is not None:
        return prompt.text
    if prompt.token_ids is not None:
        return {"prompt_token_ids": list(prompt.token_ids)}
    return {"prompt_token_ids": chat_tokens(llm.tokenizer, prompt)}


@dataclass(kw_only=True)
class OfflineRun:
    """The outputs and times of a run.

    Attributes:
        latest: the last snapshot of each request, by its number.
        iterations: seconds of each step, prompt chunks included.
        parts: seconds by PARTS.
        adaptive: whether the engine chose in each step how much to draft (K auto).
    """

    latest: dict[int, RequestOutput] = field(default_factory=dict)
    iterations: list[float] = field(default_factory=list)
    parts: tuple[float, ...] = (0.0,) * len(PARTS)
    seconds: float = 0.0
    stopped: bool = False
    adaptive: bool = False

    @property
    def outputs(self) -> list[RequestOutput]:
        return [output for output in self.by_prompt() if output.finished]

    def by_prompt(self) -> list[RequestOutput]:
        """The last snapshots in the order of the prompts, finished or not."""
        return [self.latest[index] for index in sorted(self.latest)]

    @property
    def num_tokens(self) -> int:
        """Output tokens, including those of unfinished requests."""
        return sum(output.num_tokens for output in self.latest.values())

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.latest.values())

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)

    @property
    def median_iteration_ms(self) -> float:
        return median(self.iterations) * 1e3 if self.iterations else 0.0

    @property
    def iteration_ms(self) -> float:
        """The mean time of a step."""
        return fmean(self.iterations) * 1e3 if self.iterations else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the steps' time, by PARTS."""
        whole = max(sum(self.parts), 1e-12)
        return {part: own / whole for part, own in zip(PARTS, self.parts, strict=True)}

    @property
    def speculation(self) -> SpeculationCounts:
        outputs = self.latest.values()
        lengths = [len(sample.token_ids) for output in outputs for sample in output.outputs]
        adaptive = self.adaptive and max(lengths, default=0) >= LEAST_DRAFTED
        return from_outputs([output.metrics for output in outputs], adaptive)

    def tpots_ms(self) -> list[float]:
        """Milliseconds per output token after the first, of each finished request."""
        times = []
        for output in self.outputs:
            first, last = output.metrics.first_token_time, output.metrics.finished_time
            count = max(len(sample.token_ids) for sample in output.outputs)
            if first is not None and last is not None and count > 1:
                times.append((last - first) / (count - 1) * 1e3)
        return times

    def times_ms(self) -> dict[str, list[float]]:
        """Milliseconds: TTFT and TPOT of finished requests, and the time of each step."""
        steps = [seconds * 1e3 for seconds in self.iterations]
        firsts = [output.metrics.time_to_first_token for output in self.outputs]
        ttfts = [first * 1e3 for first in firsts if first is not None]
        return {"ttft": ttfts, "tpot": self.tpots_ms(), "step": steps}


def run_offline(
    llm: "LLM",
    workload: Workload,
    stopped: Callable[[], bool] = lambda: False,
    advance: Callable[[int, int], None] = lambda requests, tokens: None,
) -> OfflineRun:
    """Run a workload, to its end or until `stopped` returns true.

    Args:
        advance: called after steps with the numbers of finished requests and of tokens so far.

    Raises GenerationError for an output that ended with an error.
    """
    run = OfflineRun(adaptive=llm.engine.resolved.adaptive)
    clock = _Clock(llm)
    done = tokens = 0
    began = perf_counter()
    with closing(workload.stream(llm)) as outputs:  # type: ignore[type-var]
        for output in outputs:
            output.require_sound()
            number = int(output.request_id)
            before = run.latest.get(number)
            tokens += output.num_tokens - (0 if before is None else before.num_tokens)
            run.latest[number] = output
            done += output.finished
            if clock.moved():
                run.iterations += clock.steps()
                advance(done, tokens)
                if stopped():
                    run.stopped = done < len(workload.prompts)
                    break
    run.seconds = perf_counter() - began
    run.parts = clock.parts()
    advance(done, tokens)
    return run


def warm_up(llm: "LLM") -> None:
    """Run every kind of step once, with a short prompt."""
    ids = [1 + index % 7 for index in range(24)]
    llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=12))


class _Clock:
    """Measures steps by an engine's totals."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._first = self._read()
        self._steps, self._seconds = llm.metrics.num_steps, sum(self._first)

    def moved(self) -> bool:
        """Whether there were steps since the last call of `steps`."""
        return self._llm.metrics.num_steps != self._steps

    def steps(self) -> list[float]:
        """The seconds of these steps; several steps without output between them (prompt chunks)
        are counted with their mean."""
        seconds, steps = sum(self._read()), self._llm.metrics.num_steps
        count, gained = steps - self._steps, seconds - self._seconds
        self._steps, self._seconds = steps, seconds
        return [gained / count] * count

    def parts(self) -> tuple[float, ...]:
        """Seconds by PARTS since the clock was made."""
        return tuple(now - old for now, old in zip(self._read(), self._first, strict=True))

    def _read(self) -> tuple[float, ...]:
        seconds = self._llm.metrics.seconds
        return tuple(seconds[part] for part in PARTS)
