"""Flags that the commands of `slipstream bench` share."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.bench.datasets import BenchPrompt, TextEncoder
    from slipstream.bench.workload import Workload
    from slipstream.models.tokenizer import Tokenizer

_PROMPTS, _SAMPLING, _REPORT = "Prompts", "Sampling", "Report"


@dataclass(frozen=True, kw_only=True)
class DatasetFlags:
    """What is asked."""

    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset-name",
            "--dataset",
            metavar="<name>",
            help="demo (the bundled held-out prompts), mt-bench, spec-bench, humaneval, sharegpt, "
            "custom or random. [custom with a path, else demo]",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            "--dataset-path",
            "--prompts",
            metavar="<file>",
            help="JSON lines, JSON or parquet. Of custom: objects with "
            '"prompt" or "messages", perhaps "id" and "max_tokens".',
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    category: Annotated[
        str | None,
        typer.Option(help="Only these of mt-bench, spec-bench, custom.", rich_help_panel=_PROMPTS),
    ] = None
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="So many, spread over the file; if it has fewer they come again. [all]",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "--output-len",
            min=1,
            help="Output tokens of each. [what the data set says, else 128]",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    random_input_len: Annotated[
        int, typer.Option(min=1, help="Tokens of a random prompt.", rich_help_panel=_PROMPTS)
    ] = 128
    random_range_ratio: Annotated[
        float,
        typer.Option(
            help="Random lengths lie within this share of what is named, 0 to 1.",
            rich_help_panel=_PROMPTS,
        ),
    ] = 0.0
    random_prefix_len: Annotated[
        int,
        typer.Option(min=0, help="Tokens that random prompts share.", rich_help_panel=_PROMPTS),
    ] = 0
    random_vocab_size: Annotated[
        int | None,
        typer.Option(
            min=2, help="Random ids are below this. [the tokenizer's]", rich_help_panel=_PROMPTS
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of random prompts, of arrivals (0 if not given) and of sampled output.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None

    @property
    def name(self) -> str:
        """Of the data set; UsageError for one that is not known."""
        from slipstream.bench.datasets import CUSTOM, DATASETS, DEMO

        name = self.dataset or (DEMO if self.dataset_path is None else CUSTOM)
        if name not in DATASETS:
            raise UsageError(f"--dataset-name must be one of {', '.join(DATASETS)}, not {name}")
        if self.dataset_path is not None and name in (DEMO, "random"):
            raise UsageError(f"--dataset-path is for other data sets than {name}; leave one out")
        return name

    @property
    def length(self) -> int:
        """Output tokens of a prompt that does not say itself."""
        return self.max_tokens or 128

    @property
    def wants_tokenizer(self) -> bool:
        """Whether it can make use of one."""
        return self.name in ("random", "sharegpt")

    def prompts(self, encoder: "TextEncoder | None", as_text: bool = False) -> "list[BenchPrompt]":
        """Raises UsageError where there are none.

        Args:
            encoder: the model's tokenizer, if it is there.
            as_text: the prompts must be texts or chats, not token ids.
        """
        from slipstream.bench.datasets import RANDOM, RandomShape, draw_random, read_dataset, take

        name = self.name
        self._require_use(name == RANDOM)
        if name != RANDOM:
            found = read_dataset(name, self.dataset_path, self.category, encoder)
            if self.max_tokens is not None:
                found = [replace(prompt, max_tokens=None) for prompt in found]
            return take(found, self.num_prompts)
        if not 0 <= self.random_range_ratio <= 1:
            raise UsageError(
                f"--random-range-ratio must be from 0 to 1, not {self.random_range_ratio:g}"
            )
        shape = RandomShape(
            input_tokens=self.random_input_len,
            output_tokens=self.length,
            spread=self.random_range_ratio,
            prefix=self.random_prefix_len,
            vocabulary=self.random_vocab_size,
        )
        return draw_random(self.num_prompts or 100, shape, self.seed or 0, encoder, as_text)

    def _require_use(self, is_random: bool) -> None:
        """Raise UsageError for a flag that this data set has no use for."""
        if is_random and self.category is not None:
            raise UsageError("--category is for data sets with categories; leave it out")
        for field in fields(self):
            given = getattr(self, field.name) != field.default
            if field.name.startswith("random_") and given and not is_random:
                flag = "--" + field.name.replace("_", "-")
                raise UsageError(f"{flag} is for random prompts; add --dataset-name random")


def refuse_num_seqs(flag: str, most: int) -> None:
    """Raise UsageError for --max-num-seqs where another flag says how many run at once."""
    if most != EngineConfig.max_num_seqs:
        raise UsageError(f"{flag} says how many requests run at once; leave out --max-num-seqs")


def model_tokenizer(model: str, revision: str | None = None) -> "Tokenizer":
    """The tokenizer of a model by its name; CheckpointError where it has none."""
    from slipstream.models.checkpoint import resolve_checkpoint
    from slipstream.models.tokenizer import Tokenizer

    return Tokenizer(resolve_checkpoint(model, revision))


@dataclass(frozen=True, kw_only=True)
class BenchSamplingFlags:
    """How to sample; what is not given is left to the server."""

    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_SAMPLING)
    ] = 0.0
    top_p: Annotated[
        float | None,
        typer.Option(help="Smallest set of this probability.", rich_help_panel=_SAMPLING),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="The k most probable tokens.", rich_help_panel=_SAMPLING)
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(help="At least this share of the largest.", rich_help_panel=_SAMPLING),
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="-2 to 2.", rich_help_panel=_SAMPLING)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="-2 to 2.", rich_help_panel=_SAMPLING)
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 0; 1 does nothing.", rich_help_panel=_SAMPLING)
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="The model's end token ends nothing: every answer has its full length.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False

    def fields(self, seed: int | None) -> dict[str, Any]:
        """What was given, by the protocol's names; UsageError for a value out of range."""
        given = {
            name: value
            for name, value in vars(self).items()
            if value is not None and value is not False  # a 0 is a value
        }
        if self.temperature > 0 and seed is not None:
            given["seed"] = seed
        SamplingParams(**given)  # checks the values
        return given

    def params(self, max_tokens: int, seed: int | None) -> SamplingParams:
        """The same for an engine in this process."""
        return SamplingParams(max_tokens=max_tokens, **self.fields(seed))


def read_workload(
    dataset: DatasetFlags, sampling: BenchSamplingFlags, model: str, revision: str | None
) -> "Workload":
    """What an engine in this process is asked; UsageError where there is nothing."""
    from slipstream.bench.workload import Workload

    if dataset.length < 2:
        raise UsageError("--max-tokens must be at least 2: one token has no time per token")
    encoder = model_tokenizer(model, revision) if dataset.wants_tokenizer else None
    params = sampling.params(dataset.length, dataset.seed)
    return Workload(dataset.prompts(encoder), params)


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Where the figures go, besides the terminal."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "--output-json",
            metavar="<file>",
            help="Write all figures as JSON.",
            rich_help_panel=_REPORT,
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="<file>",
            help="Draw: png, svg, pdf or html (a report in one file); without an ending both a "
            "PNG and a report.",
            rich_help_panel=_REPORT,
        ),
    ] = None

    def files(self) -> tuple[Path, ...]:
        """What --plot asks for; UsageError for what cannot be written, before it is measured."""
        from slipstream.bench.report import plot_files, require_writable

        require_writable("--output", self.output)
        return plot_files(self.plot)


@dataclass(frozen=True, kw_only=True)
class ProfileFlags:
    """A look into the steps."""

    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="<folder>",
            help="Afterwards run some steps under the profiler: traces for Chrome or Perfetto in "
            "this folder, and a table of the time by part of the step.",
            rich_help_panel=_REPORT,
        ),
    ] = None
    profile_steps: Annotated[
        int, typer.Option(min=1, help="So many steps.", rich_help_panel=_REPORT)
    ] = 32

    def prepare(self) -> None:
        """Make the folder, before anything is measured."""
        if self.profile is not None:
            # The profiler announces itself on stderr; it reads this when torch is imported.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            try:
                self.profile.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"--profile {self.profile} cannot be made a folder ({error.strerror}); name "
                    "another"
                ) from None

    def trace(self, name: str) -> Path | None:
        """The file for what is called so."""
        if self.profile is None:
            return None
        plain = "".join(letter if letter.isalnum() else "-" for letter in name)
        return self.profile / f"{plain}.json.gz"
