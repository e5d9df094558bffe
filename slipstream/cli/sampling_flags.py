"""Flags of how to sample, shared by the commands that generate."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from slipstream.cli.drafter_flags import read_object
from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingParams

_PANEL = "Sampling"


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The fields of `SamplingParams` that make sense for one answer."""

    temperature: Annotated[
        float,
        typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_PANEL),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(help="Smallest set of this probability.", rich_help_panel=_PANEL),
    ] = SamplingParams.top_p
    top_k: Annotated[
        int,
        typer.Option(help="The k most probable tokens; 0 is all.", rich_help_panel=_PANEL),
    ] = SamplingParams.top_k
    min_p: Annotated[
        float,
        typer.Option(help="At least this share of the largest.", rich_help_panel=_PANEL),
    ] = SamplingParams.min_p
    presence_penalty: Annotated[float, typer.Option(help="-2 to 2.", rich_help_panel=_PANEL)] = (
        SamplingParams.presence_penalty
    )
    frequency_penalty: Annotated[float, typer.Option(help="-2 to 2.", rich_help_panel=_PANEL)] = (
        SamplingParams.frequency_penalty
    )
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 0; 1 does nothing.", rich_help_panel=_PANEL)
    ] = SamplingParams.repetition_penalty
    logit_bias: Annotated[
        str | None,
        typer.Option(
            metavar="<json>", help="By token id: '{\"42\": -100}'", rich_help_panel=_PANEL
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            metavar="<id>", help="Sample nothing else (repeatable).", rich_help_panel=_PANEL
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<text>", help="Never write this (repeatable).", rich_help_panel=_PANEL
        ),
    ] = None
    min_tokens: Annotated[
        int, typer.Option(help="No stop before this many.", rich_help_panel=_PANEL)
    ] = SamplingParams.min_tokens
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.", rich_help_panel=_PANEL)] = (
        128
    )
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<text>", help="Stop at this text (repeatable).", rich_help_panel=_PANEL
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            metavar="<id>", help="Stop at this token (repeatable).", rich_help_panel=_PANEL
        ),
    ] = None
    include_stop_str_in_output: Annotated[
        bool,
        typer.Option(
            "--include-stop-str-in-output", help="Show what stopped it.", rich_help_panel=_PANEL
        ),
    ] = SamplingParams.include_stop_str_in_output
    skip_special_tokens: Annotated[
        bool, typer.Option(help="Leave them out of the text.", rich_help_panel=_PANEL)
    ] = SamplingParams.skip_special_tokens
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="The model's end token ends nothing.", rich_help_panel=_PANEL
        ),
    ] = SamplingParams.ignore_eos
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same text again, for the same drafter and K.", rich_help_panel=_PANEL
        ),
    ] = SamplingParams.seed

    def params(self, **more: Any) -> SamplingParams:
        """Raises UsageError for a value out of range.

        Args:
            more: fields that only some commands offer.
        """
        options = asdict(self)
        for name in ("bad_words", "stop", "stop_token_ids"):
            options[name] = tuple(options[name] or ())
        options["allowed_token_ids"] = tuple(self.allowed_token_ids or ()) or None
        options["logit_bias"] = _read_logit_bias(self.logit_bias)
        return SamplingParams(**options, **more)


def _read_logit_bias(text: str | None) -> dict[int, float] | None:
    """JSON has no integer keys, so the ids come as strings."""
    given = None if text is None else read_object("--logit-bias", text)
    if given is None:
        return None
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise UsageError(f"--logit-bias keys must be token ids, in {text!r}") from None
