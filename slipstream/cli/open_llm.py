"""Loading a model with progress bars, and the report of derived options."""

import gc
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from slipstream.cli.errors import say
from slipstream.cli.flags import Given
from slipstream.cli.terminal import QUIET_STYLE, stderr_console
from slipstream.core.config import EngineConfig
from slipstream.core.outputs import RequestOutput
from slipstream.core.sampling_params import SamplingDefaults, SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.engine.resolve import Resolved
    from slipstream.models.loading import ProgressBar
    from slipstream.models.parameter_sources import Progress as Report


def open_llm(config: EngineConfig, verbose: bool) -> tuple["LLM", float]:
    """Load an engine; returns it with the seconds that loading took."""
    console = stderr_console()
    _log_to(console, verbose)
    llm_class = _import_llm()
    began = perf_counter()
    with loading_bars(console) as bar:
        llm = llm_class(config, progress_bar=bar)
    seconds = perf_counter() - began
    if verbose:
        console.print(resolved_table(llm.engine.resolved))
    return llm, seconds


def _import_llm() -> type["LLM"]:
    """The engine's class.

    Importing it and torch makes hundreds of thousands of objects that live as long as the process.
    They are excluded from garbage collection.
    """
    is_first = "slipstream.engine.llm" not in sys.modules
    collects = gc.isenabled()
    gc.disable()
    try:
        from slipstream.engine.llm import LLM

        if is_first:
            gc.freeze()
    finally:
        if collects:
            gc.enable()
    return LLM


def print_defaults(defaults: SamplingDefaults) -> None:
    """Print the checkpoint's sampling defaults on stderr, if it has any."""
    if defaults.values:
        stderr_console().print(
            f"defaults of requests: {defaults} ({defaults.source}; --generation-config vllm leaves "
            "them out)",
            style=QUIET_STYLE,
            soft_wrap=True,
        )


def with_defaults(llm: "LLM", sampling: SamplingParams, given: Given) -> SamplingParams:
    """The parameters of a command's flags; flags that were not given get the checkpoint's."""
    defaults = llm.engine.resolved.sampling_defaults
    print_defaults(defaults)
    values = {name: it for name, it in defaults.values.items() if not given("sampling", name)}
    return replace(sampling, **values)


def tell_cut(llm: "LLM", params: SamplingParams, outputs: Iterable[RequestOutput]) -> bool:
    """Say on stderr if an output ended before max_tokens because no more fit; whether one did."""
    resolved = llm.engine.resolved
    longest = resolved.limits.max_model_len
    if not any(
        sample.finish_reason == "length"
        and len(sample.token_ids) != params.max_tokens
        and len(output.prompt_token_ids) + len(sample.token_ids) >= longest
        for output in outputs
        for sample in output.outputs
    ):
        return False
    why = "that is max_model_len, which --max-model-len sets"
    if resolved.limits.cache_bounds_length:
        why = "the KV cache holds no more; --kv-cache-memory or --num-kv-blocks makes it larger"
    wanted = "" if params.max_tokens is None else f", before --max-tokens {params.max_tokens}"
    say(f"an output ended at {longest} tokens, prompt included{wanted}: {why}")
    return True


class AmountColumn(ProgressColumn):
    """Progress of a task in its own unit."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = DownloadColumn()

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == "bytes":
            return self._bytes.render(task)
        return Text(f"{task.completed:.0f}/{task.total or 0:.0f} {task.fields['unit']}")


@contextmanager
def loading_bars(console: Console) -> Iterator["ProgressBar"]:
    """Progress bars of loading, which are removed at the end."""
    columns = TextColumn("{task.description}"), BarColumn(), AmountColumn()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:

        @contextmanager
        def bar(name: str, size: int, unit: str) -> Iterator["Report"]:
            task = progress.add_task(name, total=size, unit=unit)
            yield lambda count: progress.advance(task, count)

        yield bar


def resolved_table(resolved: "Resolved") -> Table:
    """The engine's options, with the reasons of derived values."""
    limits = resolved.limits
    rows = {
        "device": str(resolved.device),
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "method": resolved.method or "plain decoding",
        "num_speculative_tokens": resolved.drafts,
        "max_model_len": str(limits.max_model_len),
        "drafter_max_model_len": str(limits.drafter_max_model_len),
        "max_num_seqs": str(limits.max_num_seqs),
        "max_num_batched_tokens": str(limits.max_num_batched_tokens),
        "num_kv_blocks": str(resolved.num_blocks),
        "seed": str(resolved.seed),
    }
    reasons = {name: (value, why) for name, value, why in resolved.reasons}
    table = Table(box=None, pad_edge=False)
    for heading in ("option", "value", "why"):
        table.add_column(heading)
    for name, value in rows.items():
        table.add_row(name, *reasons.pop(name, (value, "")))
    for name, (value, why) in reasons.items():
        table.add_row(name, value, why)
    return table


def _log_to(console: Console, verbose: bool) -> None:
    logger = logging.getLogger("slipstream")
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    handler: logging.Handler = RichHandler(console=console, show_time=False, show_path=False)
    if not console.is_terminal:  # a message is one line there, whatever its length
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(levelname)-8s %(message)s"))
    # The table shows the reasons in its own order.
    handler.addFilter(lambda record: record.module != "sizing")
    logger.handlers = [handler]
