"""`slipstream generate`: continue prompts."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.drafter_flags import DEMO, DrafterFlags
from slipstream.cli.engine_flags import EngineFlags, ModelArgument
from slipstream.cli.json_report import report
from slipstream.cli.open_llm import open_llm
from slipstream.cli.play import Player
from slipstream.cli.prompts import gather_prompts
from slipstream.cli.run_flags import RunFlags
from slipstream.cli.sampling_flags import SamplingFlags
from slipstream.cli.status import Meter
from slipstream.cli.structured_flags import StructuredFlags
from slipstream.cli.terminal import QUIET_STYLE, shows_live, stderr_console, stdout_console
from slipstream.cli.views import LiveView, NoView, PlainView, View
from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.core.outputs import RequestOutput
    from slipstream.engine.llm import LLM

_Texts = list[str] | None


def generate(
    *,
    model: ModelArgument = DEMO,
    prompt: Annotated[
        _Texts, typer.Option(metavar="<text>", help="Text to continue (repeatable).")
    ] = None,
    prompt_file: Annotated[
        _Texts,
        typer.Option(
            metavar="<file>",
            help="A file with one prompt, - for stdin (repeatable); a final newline is dropped.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document: texts, token ids, metrics.")
    ] = False,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples per prompt.")] = SamplingParams.n,
    logprobs: Annotated[
        int | None, typer.Option(help="Alternatives per token; needs --json.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the prompt; needs --json.")
    ] = None,
    drafter: DrafterFlags,
    sampling: SamplingFlags,
    structured: StructuredFlags,
    engine: EngineFlags,
    run: RunFlags,
) -> None:
    """Continue prompts, with a drafter running ahead.

    On a terminal the text streams, accepted draft tokens in colour; a pipe gets the text alone.

    Without any argument the bundled demo shows itself.
    """
    if not as_json and (logprobs is not None or prompt_logprobs is not None):
        raise UsageError("--logprobs and --prompt-logprobs are shown in --json only; add --json")
    config = engine.config(model, drafter.config(model))
    params = sampling.params(
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured=structured.wish(),
    )
    prompts = gather_prompts(prompt or (), prompt_file or (), model)
    llm, load_seconds = open_llm(config, run.verbose)
    if as_json:
        outputs = _play(llm, prompts, params, NoView())[1]
        print(json.dumps(report(llm, model, load_seconds, outputs), ensure_ascii=False))
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
