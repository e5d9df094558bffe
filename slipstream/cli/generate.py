"""`slipstream generate`: continue prompts."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.flags import RunFlags
from slipstream.cli.json_report import report
from slipstream.cli.open_llm import open_llm
from slipstream.cli.play import Player
from slipstream.cli.prompts import gather_prompts
from slipstream.cli.status import Meter
from slipstream.cli.terminal import QUIET_STYLE, shows_live, stderr_console, stdout_console
from slipstream.cli.views import LiveView, NoView, PlainView, View
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.flags import flag, given_flags
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.structured import StructuredOutput

if TYPE_CHECKING:
    from slipstream.core.outputs import RequestOutput
    from slipstream.engine.llm import LLM

_SAMPLING = SamplingParams(temperature=0.0, max_tokens=128)


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """What to continue, and what to report of it."""

    prompt: tuple[str, ...] = flag((), "Text to continue (repeatable).", metavar="<text>")
    prompt_file: tuple[str, ...] = flag(
        (),
        "A file with one prompt, - for stdin (repeatable); a final newline is dropped.",
        metavar="<file>",
    )
    json: bool = flag(False, "Print one JSON document: texts, token ids, metrics.")
    n: int = flag(SamplingParams.n, "Samples per prompt.", also=("-n",))
    logprobs: int | None = flag(None, "Alternatives to report per token; needs --json.")
    prompt_logprobs: int | None = flag(None, "Like --logprobs, for the prompt; needs --json.")


@dataclass(frozen=True, kw_only=True)
class StructuredFlags:
    """At most one of them is given."""

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
    grammar: str | None = flag(None, "Text of this Lark grammar.", metavar="<file>")

    def output(self) -> StructuredOutput | None:
        """None where no flag is given.

        Raises:
            UsageError: several are given, or a file that cannot be read.
        """
        flags = given_flags(self)
        if not flags:
            return None
        if len(flags) > 1:
            raise UsageError(f"{' and '.join(flags)} contradict each other; give one of them")
        schema = self.json_schema
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = _read("--json-schema", schema)
        return StructuredOutput(
            json_schema=schema,
            json_object=self.json_object,
            regex=self.regex,
            choice=self.choice or None,
            grammar=None if self.grammar is None else _read("--grammar", self.grammar),
        )


def generate(
    *,
    flags: GenerateFlags,
    drafter: DrafterFlags,
    sampling: SamplingParams = _SAMPLING,
    structured: StructuredFlags,
    engine: EngineConfig,
    run: RunFlags,
) -> None:
    """Continue prompts, with a drafter running ahead.

    On a terminal the text streams, accepted draft tokens in colour; a pipe gets the text alone.

    Without any argument the bundled demo shows itself.
    """
    if not flags.json and (flags.logprobs is not None or flags.prompt_logprobs is not None):
        raise UsageError("--logprobs and --prompt-logprobs are shown in --json only; add --json")
    config = drafter.apply(engine)
    params = replace(
        sampling,
        n=flags.n,
        logprobs=flags.logprobs,
        prompt_logprobs=flags.prompt_logprobs,
        structured=structured.output(),
    )
    prompts = gather_prompts(flags.prompt, flags.prompt_file, engine.model)
    llm, load_seconds = open_llm(config, run.verbose)
    if flags.json:
        outputs = _play(llm, prompts, params, NoView())[1]
        print(json.dumps(report(llm, engine.model, load_seconds, outputs), ensure_ascii=False))
        return
    console = stdout_console()
    if shows_live(console):
        with LiveView(console, llm.tokenizer, params) as view:
            summary = _play(llm, prompts, params, view)[0]
        console.print(f"\n{summary}", style=QUIET_STYLE)
    else:
        summary = _play(llm, prompts, params, PlainView(params))[0]
        stderr_console().print(summary, style=QUIET_STYLE, soft_wrap=True)


def _play(
    llm: "LLM", prompts: list[str], params: SamplingParams, view: View
) -> tuple[str, list["RequestOutput"]]:
    """Run everything; the summary line, and the outputs in the order of the prompts."""
    outputs = llm.stream(prompts, params)
    player = Player(prompts, params.n, view, Meter(llm))
    done = player.play(outputs)
    return player.status().summary(), done


def _read(flag: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}: {file} cannot be read ({error})") from None
