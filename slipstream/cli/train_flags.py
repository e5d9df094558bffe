"""Flags of `slipstream train`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.core.errors import UsageError

if TYPE_CHECKING:
    from slipstream.train.settings import DrafterOptions

_DATA, _LENGTH, _DRAFTER, _RUN = "Data", "Training", "Drafter", "Run"


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """What is trained on."""

    data: Annotated[
        list[Path],
        typer.Option(
            help="Texts, .jsonl files of texts, chats or prompts, directories of such, or what "
            "`slipstream train data` wrote (repeatable).",
            rich_help_panel=_DATA,
        ),
    ]
    generate: Annotated[
        bool,
        typer.Option(
            "--generate",
            help="Let the target answer the prompts and chats, and continue the texts.",
            rich_help_panel=_DATA,
        ),
    ] = False
    generate_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer [192].", rich_help_panel=_DATA)
    ] = None
    generate_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a text that is continued [64].", rich_help_panel=_DATA),
    ] = None
    temperatures: Annotated[
        str | None, typer.Option(help="Of the answers, in turn [0,1].", rich_help_panel=_DATA)
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sequence [512, or what packed ones have].", rich_help_panel=_DATA
        ),
    ] = None
    revision: Annotated[
        str | None, typer.Option(help="Of the target's hub name.", rich_help_panel=_DATA)
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_RUN)] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            help="Of products: auto is bfloat16 on a GPU, float32 on a CPU.", rich_help_panel=_RUN
        ),
    ] = "auto"
    seed: Annotated[int, typer.Option(help="Of all chance.", rich_help_panel=_RUN)] = 0

    def values(self) -> dict[str, Any]:
        """Fields of `TrainSettings`."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.temperatures is not None:
            own["temperatures"] = _numbers(self.temperatures, float, "temperatures")
        return {**own, "data": tuple(self.data)}


@dataclass(frozen=True, kw_only=True)
class LengthFlags:
    """How long and how fast."""

    steps: Annotated[
        int | None, typer.Option(help="Changes of the weights.", rich_help_panel=_LENGTH)
    ] = None
    minutes: Annotated[float | None, typer.Option(help="Of training.", rich_help_panel=_LENGTH)] = (
        None
    )
    batch_size: Annotated[
        int, typer.Option(help="Sequences of a pass.", rich_help_panel=_LENGTH)
    ] = 8
    accumulate: Annotated[int, typer.Option(help="Passes of a step.", rich_help_panel=_LENGTH)] = 1
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The highest; by default the recipe's.", rich_help_panel=_LENGTH),
    ] = None
    warmup: Annotated[
        float, typer.Option(help="Share of the run in which it rises.", rich_help_panel=_LENGTH)
    ] = 0.03
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.", rich_help_panel=_LENGTH)] = 0.01
    clip: Annotated[
        float, typer.Option(help="Largest norm of a gradient.", rich_help_panel=_LENGTH)
    ] = 0.5
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Places of a draft that are trained; by default the recipe's.",
            rich_help_panel=_LENGTH,
        ),
    ] = None
    place_decay: Annotated[
        float | None,
        typer.Option(
            help="The loss of place k counts by this to the power of k; by default the recipe's.",
            rich_help_panel=_LENGTH,
        ),
    ] = None
    argmax_weight: Annotated[
        float,
        typer.Option(
            help="Share of the loss that asks for the target's first choice alone, beside KL.",
            rich_help_panel=_LENGTH,
        ),
    ] = 0.0
    drop_rate: Annotated[
        float | None,
        typer.Option(
            help="Parallel drafting trains place k at rate^k of the rows [0.7].",
            rich_help_panel=_LENGTH,
        ),
    ] = None
    validation: Annotated[
        float, typer.Option(help="Share of the text held out.", rich_help_panel=_LENGTH)
    ] = 0.02
    features: Annotated[
        str,
        typer.Option(
            help="The target's: online with every batch, on disk once, or auto.",
            rich_help_panel=_RUN,
        ),
    ] = "auto"
    max_feature_gb: Annotated[
        float | None, typer.Option(help="Most that they take on disk [20].", rich_help_panel=_RUN)
    ] = None
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints.", rich_help_panel=_RUN)
    ] = 500
    validate_every: Annotated[
        int, typer.Option(help="Steps between validations.", rich_help_panel=_RUN)
    ] = 500
    log_every: Annotated[
        int, typer.Option(help="Steps between lines of metrics.jsonl.", rich_help_panel=_RUN)
    ] = 20

    def values(self) -> dict[str, Any]:
        """Fields of `TrainSettings`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class DrafterShapeFlags:
    """What the drafter is made of."""

    draft_vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens that it drafts, the commonest.", rich_help_panel=_DRAFTER),
    ] = None
    share_head: Annotated[
        bool,
        typer.Option(
            "--share-head",
            help="Use the target's lm_head and draft over its whole vocabulary.",
            rich_help_panel=_DRAFTER,
        ),
    ] = False
    share_embedding: Annotated[
        bool,
        typer.Option(
            "--share-embedding",
            help="Use the target's embedding where others have their own.",
            rich_help_panel=_DRAFTER,
        ),
    ] = False
    aux_layers: Annotated[
        str | None,
        typer.Option(
            help="Layers of the target whose incoming streams it reads, such as 2,18,33.",
            rich_help_panel=_DRAFTER,
        ),
    ] = None
    num_layers: Annotated[int | None, typer.Option(rich_help_panel=_DRAFTER)] = None
    num_heads: Annotated[int | None, typer.Option(rich_help_panel=_DRAFTER)] = None
    num_kv_heads: Annotated[int | None, typer.Option(rich_help_panel=_DRAFTER)] = None
    head_dim: Annotated[int | None, typer.Option(rich_help_panel=_DRAFTER)] = None
    intermediate_size: Annotated[int | None, typer.Option(rich_help_panel=_DRAFTER)] = None
    hidden_size: Annotated[int | None, typer.Option(rich_help_panel=_DRAFTER)] = None
    norm_before_residual: Annotated[
        bool,
        typer.Option("--norm-before-residual", help="A flag of EAGLE-3.", rich_help_panel=_DRAFTER),
    ] = False
    norm_output: Annotated[
        bool, typer.Option("--norm-output", help="A flag of EAGLE-3.1.", rich_help_panel=_DRAFTER)
    ] = False
    mask_token: Annotated[
        int | None,
        typer.Option(help="Token id that parallel drafting asks with.", rich_help_panel=_DRAFTER),
    ] = None
    init: Annotated[
        str | None, typer.Option(help="A checkpoint to begin with.", rich_help_panel=_DRAFTER)
    ] = None

    def options(self) -> "DrafterOptions":
        """A flag that was not given is the recipe's to choose."""
        from slipstream.train.settings import DrafterOptions

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: None if value is False else value for name, value in values.items()}
        if self.aux_layers is not None:
            values["aux_layers"] = _numbers(self.aux_layers, int, "aux-layers")
        return DrafterOptions(**values)


def _numbers(text: str, kind: type[int] | type[float], flag: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"--{flag} takes numbers with commas between them, not {text!r}"
        ) from error
