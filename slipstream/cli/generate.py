"""`slipstream generate`: continue prompts."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.flags import Given, RunFlags
from slipstream.cli.json_report import report
from slipstream.cli.open_llm import open_llm, tell_cut, with_defaults
from slipstream.cli.prompts import gather_prompts
from slipstream.cli.terminal import QUIET_STYLE, shows_live, stderr_console, stdout_console
from slipstream.cli.views import Meter, Status, View, view_on
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.flags import flag, given_flags, read_text
from slipstream.core.outputs import RequestOutput
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.structured import StructuredOutput

_SAMPLING = SamplingParams(temperature=0.0, max_tokens=128)


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """Prompts, and what to report of their continuations."""

    prompt: tuple[str, ...] = flag((), "Text to continue (repeatable).", metavar="<text>")
    prompt_file: tuple[str, ...] = flag(
        (),
        "A file with one prompt, - for stdin (repeatable); a final newline is dropped.",
        metavar="<file>",
    )
    json: bool = flag(False, "Print one JSON document: texts, token ids, metrics.")
    n: int = flag(SamplingParams.n, "Samples per prompt.", also=("-n",))
    logprobs: int | None = flag(None, "Alternatives to report per token; needs --json.")
    prompt_logprobs: int | None = flag(None, "Alternatives per token of the prompt; needs --json.")


@dataclass(frozen=True, kw_only=True)
class StructuredFlags:
    """The form of the output; at most one of these is given."""

    json_schema: str | None = flag(
        None,
        "JSON that satisfies this schema.",
        panel="Structured output (needs the extra structured)",
        metavar="<json or file>",
    )
    json_object: bool = flag(False, "Any JSON object.")
    regex: str | None = flag(
        None, "Text that matches this expression as a whole.", metavar="<regex>"
    )
    choice: tuple[str, ...] = flag((), "One of these texts (repeatable).", metavar="<text>")
    grammar: str | None = flag(None, "Text that a Lark grammar describes.", metavar="<file>")

    def output(self) -> StructuredOutput | None:
        """The requested output, if any; UsageError for several, or a file that cannot be read."""
        flags = given_flags(self)
        if not flags:
            return None
        if len(flags) > 1:
            raise UsageError(f"{' and '.join(flags)} contradict each other; give one of them")
        schema = self.json_schema
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = read_text("--json-schema", schema)
        return StructuredOutput(
            json_schema=schema,
            json_object=self.json_object,
            regex=self.regex,
            choice=self.choice or None,
            grammar=None if self.grammar is None else read_text("--grammar", self.grammar),
        )


def generate(
    *,
    flags: GenerateFlags,
    drafter: DrafterFlags,
    sampling: SamplingParams = _SAMPLING,
    structured: StructuredFlags,
    engine: EngineConfig,
    run: RunFlags,
    given: Given,
) -> None:
    """Continue prompts with speculative decoding.

    On a terminal the text streams, accepted draft tokens in colour; a pipe gets the text alone.

    Without arguments, the bundled demo model continues a prompt of its own.
    """
    if not flags.json and (flags.logprobs is not None or flags.prompt_logprobs is not None):
        raise UsageError("--logprobs and --prompt-logprobs are shown in --json only; add --json")
    config = drafter.apply(engine)
    output = structured.output()
    prompts = gather_prompts(flags.prompt, flags.prompt_file, engine.model)
    llm, load_seconds = open_llm(config, run.verbose)
    params = replace(
        with_defaults(llm, sampling, given),
        n=flags.n,
        logprobs=flags.logprobs,
        prompt_logprobs=flags.prompt_logprobs,
        structured=output,
    )
    if flags.json:
        last = {int(output.request_id): output for output in llm.stream(prompts, params)}
        outputs = [last[number] for number in sorted(last)]
        print(json.dumps(report(llm, engine.model, load_seconds, outputs), ensure_ascii=False))
        tell_cut(llm, params, outputs)
        _require_sound(outputs)
        return
    console = stdout_console()
    with view_on(console, llm.tokenizer, params) as view:
        player = Player(prompts, params.n, view, Meter(llm))
        player.play(llm.stream(prompts, params))
    summary = player.status().summary()
    if shows_live(console):
        console.print(f"\n{summary}", style=QUIET_STYLE)
    else:
        stderr_console().print(summary, style=QUIET_STYLE, soft_wrap=True)
    tell_cut(llm, params, player.outputs)
    _require_sound(player.outputs)


def _require_sound(outputs: Iterable[RequestOutput]) -> None:
    for output in outputs:
        output.require_sound()


class Player:
    """Shows the samples of several requests one after another, though they run at once.

    Args:
        prompts: of the requests in order; the engine is new, so that request ids count from 0.
        num_samples: samples of each prompt.
    """

    def __init__(self, prompts: Sequence[str], num_samples: int, view: View, meter: Meter) -> None:
        self._prompts, self._num_samples = prompts, num_samples
        self._view, self._meter = view, meter
        self._latest: dict[int, RequestOutput] = {}
        self._order = [(p, s) for p in range(len(prompts)) for s in range(num_samples)]
        self._place = 0

    def play(self, outputs: Iterator[RequestOutput]) -> None:
        self._begin()
        for output in outputs:
            self._latest[int(output.request_id)] = output
            self._catch_up()

    @property
    def outputs(self) -> Iterable[RequestOutput]:
        """The latest of every prompt."""
        return self._latest.values()

    def status(self) -> Status:
        """Speed and acceptance over all samples so far."""
        return self._meter.read(sum(output.num_tokens for output in self.outputs))

    def _catch_up(self) -> None:
        """Show the current sample, and the next ones that have finished in the meantime."""
        while self._place < len(self._order):
            prompt, number = self._order[self._place]
            output = self._latest.get(prompt)
            if output is None:
                return
            sample = output.outputs[number]
            self._view.show(sample, self.status)
            if sample.finish_reason is None:
                return
            self._view.end()
            self._place += 1
            self._begin()

    def _begin(self) -> None:
        if self._place < len(self._order):
            prompt, sample = self._order[self._place]
            self._view.begin(self._heading(prompt, sample), self._prompts[prompt])

    def _heading(self, prompt: int, sample: int) -> str | None:
        parts = []
        if len(self._prompts) > 1:
            parts.append(f"prompt {prompt + 1} of {len(self._prompts)}")
        if self._num_samples > 1:
            parts.append(f"sample {sample + 1} of {self._num_samples}")
        return ", ".join(parts) or None
