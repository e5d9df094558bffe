"""Flags that the commands of `slipstream bench` share."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.prompts import make_folder, require_writable
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.flags import flag, given_flags, like
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.bench.datasets import BenchPrompt, TextEncoder
    from slipstream.bench.tables import ReportTable
    from slipstream.bench.workload import Workload
    from slipstream.engine.llm import LLM
    from slipstream.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class DatasetFlags:
    """The prompts of a benchmark."""

    dataset_name: str | None = flag(
        None,
        "demo (the bundled held-out prompts), mt-bench, spec-bench, humaneval, "
        "instructcoder, sharegpt, custom or random; or the file of custom prompts. [custom with a "
        "path, else demo]",
        panel="Prompts",
        also=("--dataset",),
        metavar="<name|file>",
    )
    dataset_path: Path | None = flag(
        None,
        'JSON lines, JSON or parquet. For custom: objects with "prompt" or "messages", optionally '
        '"id" and "max_tokens".',
        also=("--prompts",),
    )
    category: str | None = flag(
        None, "Only prompts of this category (mt-bench, spec-bench, custom)."
    )
    num_prompts: int | None = flag(
        None,
        "Number of prompts, spread evenly over the file; if it has fewer, they are repeated. [all]",
        at_least=1,
    )
    max_tokens: int | None = flag(
        None,
        "Output tokens of each request. [what the data set says, else 128]",
        also=("--output-len", "--random-output-len"),
        at_least=1,
    )
    random_input_len: int = flag(
        128, "Tokens of a random prompt.", also=("--input-len",), at_least=1
    )
    random_range_ratio: float = flag(
        0.0,
        "Vary random lengths by up to this share of the given length, 0 to 1.",
        at_least=0,
        at_most=1,
    )
    random_prefix_len: int = flag(0, "Tokens that all random prompts begin with.", at_least=0)
    random_vocab_size: int | None = flag(
        None, "Draw random token ids below this. [the tokenizer's]", at_least=2
    )
    seed: int | None = flag(
        None, "Random seed of random prompts, of arrivals (0 if not given) and of sampled output."
    )

    @property
    def name(self) -> str:
        """The data set's name; raises UsageError for an unknown one."""
        from slipstream.bench.datasets import CUSTOM, DATASETS, DEMO

        if self.dataset_path is None and self.path is not None:
            return CUSTOM
        name = self.dataset_name or (DEMO if self.path is None else CUSTOM)
        if name not in DATASETS:
            raise UsageError(
                f"--dataset-name must be one of {', '.join(DATASETS)}, or a file that exists, "
                f"not {name}"
            )
        if self.dataset_path is not None and name in (DEMO, "random"):
            raise UsageError(f"--dataset-path is for other data sets than {name}; leave one out")
        return name

    @property
    def path(self) -> Path | None:
        """The file, which may be given in place of a data set's name; None: there is none."""
        from slipstream.bench.datasets import DATASETS

        given, path = self.dataset_name, self.dataset_path
        if path is None and given is not None and given not in DATASETS and Path(given).is_file():
            return Path(given)
        return path

    @property
    def length(self) -> int:
        """Output tokens of prompts without a length of their own."""
        return self.max_tokens or 128

    @property
    def wants_tokenizer(self) -> bool:
        """Whether reading the data set uses the model's tokenizer."""
        return self.name in ("random", "sharegpt")

    def prompts(self, encoder: "TextEncoder | None", as_text: bool = False) -> "list[BenchPrompt]":
        """Read or draw the prompts; raises UsageError if there are none.

        Args:
            encoder: the model's tokenizer, if there is one.
            as_text: the prompts must be texts or chats, not token ids.
        """
        from slipstream.bench.datasets import RANDOM, RandomShape, draw_random, read_dataset, take

        name = self.name
        self._require_use(name == RANDOM)
        if name != RANDOM:
            found = read_dataset(name, self.path, self.category, encoder)
            if self.max_tokens is not None:
                found = [replace(prompt, max_tokens=None) for prompt in found]
            return take(found, self.num_prompts)
        shape = RandomShape(
            input_tokens=self.random_input_len,
            output_tokens=self.length,
            spread=self.random_range_ratio,
            prefix=self.random_prefix_len,
            vocabulary=self.random_vocab_size,
        )
        return draw_random(self.num_prompts or 100, shape, self.seed or 0, encoder, as_text)

    def _require_use(self, is_random: bool) -> None:
        """Raise UsageError for a flag that has no effect on this data set."""
        if is_random and self.category is not None:
            raise UsageError("--category is for data sets with categories; leave it out")
        for name in given_flags(self):
            if name.startswith("--random-") and not is_random:
                raise UsageError(f"{name} is for random prompts; add --dataset-name random")


def refuse_num_seqs(flag: str, most: int) -> None:
    """Raise UsageError for --max-num-seqs where `flag` sets the number of running requests."""
    if most != EngineConfig.max_num_seqs:
        raise UsageError(f"{flag} says how many requests run at once; leave out --max-num-seqs")


def model_tokenizer(model: str, revision: str | None = None) -> "Tokenizer":
    """Load a model's tokenizer; raises CheckpointError if it has none."""
    from slipstream.models.checkpoint import resolve_checkpoint
    from slipstream.models.tokenizer import Tokenizer

    return Tokenizer(resolve_checkpoint(model, revision))


@dataclass(frozen=True, kw_only=True)
class BenchSamplingFlags:
    """Sampling parameters; a flag that is not given is left to the server."""

    temperature: float = like(SamplingParams, "temperature", 0.0)
    top_p: float | None = like(SamplingParams, "top_p", None)
    top_k: int | None = like(SamplingParams, "top_k", None)
    min_p: float | None = like(SamplingParams, "min_p", None)
    presence_penalty: float | None = like(SamplingParams, "presence_penalty", None)
    frequency_penalty: float | None = like(SamplingParams, "frequency_penalty", None)
    repetition_penalty: float | None = like(SamplingParams, "repetition_penalty", None)
    ignore_eos: bool = flag(
        False, "Do not stop at the model's end-of-sequence token: every answer has its full length."
    )

    def fields(self, seed: int | None) -> dict[str, Any]:
        """The flags that were given, as fields of a request; raises UsageError for bad values."""
        given = {
            name: value
            for name, value in vars(self).items()
            if value is not None and value is not False
        }
        if self.temperature > 0 and seed is not None:
            given["seed"] = seed
        SamplingParams(**given)  # checks the values
        return given

    def params(self, max_tokens: int, seed: int | None) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, **self.fields(seed))


def read_workload(
    dataset: DatasetFlags, sampling: BenchSamplingFlags, engine: EngineConfig
) -> "Workload":
    """The workload of an engine in this process; raises UsageError if it is empty."""
    from slipstream.bench.workload import Workload

    if dataset.length < 2:
        raise UsageError("--max-tokens must be at least 2: one token has no time per token")
    encoder = None
    if dataset.wants_tokenizer:
        from slipstream.models.hub import HubAccess, hub_settings

        with hub_settings(HubAccess(engine.download_dir, engine.hf_token)):
            encoder = model_tokenizer(engine.model, engine.revision)
    params = sampling.params(dataset.length, dataset.seed)
    return Workload(dataset.prompts(encoder), params)


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """The file of the figures."""

    output: Path | None = flag(
        None, "Write all figures as JSON.", panel="Report", also=("--output-json",)
    )

    def check(self) -> None:
        """Raise UsageError for a file that cannot be written, before anything is measured."""
        require_writable("--output", self.output)


@dataclass(frozen=True, kw_only=True)
class ReportFlags(OutputFlags):
    """The files of the figures and of a plot."""

    plot: Path | None = flag(
        None,
        "Draw a plot: png, svg, pdf or html (a report in one file); without an ending both a PNG "
        "and a report.",
    )

    def files(self) -> tuple[Path, ...]:
        """What --plot asks for: a picture or a page by its ending, both where it has none.

        Raises:
            UsageError: a file that cannot be written, another ending, or nothing to draw with.
        """
        from slipstream.bench.pictures import PAGES, PICTURES, require_plots

        self.check()
        plot = self.plot
        if plot is None:
            return ()
        files: tuple[Path, ...] = (plot,)
        if not plot.suffix:
            files = (plot.with_name(f"{plot.name}.png"), plot.with_name(f"{plot.name}.html"))
        elif plot.suffix not in (*PICTURES, *PAGES):
            raise UsageError(
                f"--plot {plot} must end in one of {', '.join((*PICTURES, PAGES[0]))}, or have no "
                "ending for a PNG and an HTML page"
            )
        for file in files:
            require_writable("--plot", file)
        require_plots()
        return files


@dataclass(frozen=True, kw_only=True)
class ProfileFlags:
    """The profiler, for an engine in this process."""

    profile: Path | None = flag(
        None,
        "Afterwards run some steps under the profiler; write traces for Chrome or Perfetto to this "
        "folder and show a table of the time by part of the step.",
        panel="Report",
        metavar="<folder>",
    )
    profile_steps: int = flag(32, "Number of steps to profile.", at_least=1)

    def prepare(self) -> None:
        """Make the folder before anything is measured."""
        if self.profile is not None:
            # The profiler announces itself on stderr; it reads this when torch is imported.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            make_folder("--profile", self.profile)

    def tables(self, llm: "LLM", workload: "Workload", name: str) -> "list[ReportTable]":
        """Profile the workload, if that was asked for; `name` becomes the trace's file name."""
        if self.profile is None:
            return []
        from slipstream.bench.profile import profile
        from slipstream.bench.tables import profile_table

        plain = "".join(letter if letter.isalnum() else "-" for letter in name)
        trace = self.profile / f"{plain}.json.gz"
        return [profile_table(profile(llm, workload, self.profile_steps, trace))]
