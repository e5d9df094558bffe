"""Flags that choose the drafter, shared by the commands that run an engine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.core.errors import UsageError

DEMO, DEMO_DRAFT = "demo", "demo/draft"
_DEMO_TOKENS = 4
# Methods and not checkpoints, wherever a drafter is named.
WITHOUT_MODEL = ("mtp", "ngram", "suffix")

_PANEL = "Drafting"


@dataclass(frozen=True, kw_only=True)
class DrafterFlags:
    """Three ways to say it: short flags, one JSON object, or not at all."""

    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            "--spec-model",
            help="The drafter's checkpoint, one bundled for the demo (demo/draft, demo/eagle3, "
            "demo/mtp, demo/p-eagle, demo/pard), mtp (the target's own), ngram or suffix. "
            "[demo/draft for the demo]",
            rich_help_panel=_PANEL,
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            "--spec-tokens",
            help="Most draft tokens a step. [4]",
            rich_help_panel=_PANEL,
        ),
    ] = None
    spec_method: Annotated[
        str | None,
        typer.Option(
            help="draft_model, pard, eagle, eagle3, p-eagle, mtp, dflash, medusa, mlp_speculator, "
            "gemma4_assistant, ngram, suffix, custom or combination. [found from the drafter]",
            rich_help_panel=_PANEL,
        ),
    ] = None
    drafter_quantization: Annotated[
        str | None,
        typer.Option(
            help="The same for the drafter's matrices. [none]",
            rich_help_panel=_PANEL,
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            "-sc",
            metavar="<json>",
            help='All of it: \'{"model": "...", "num_speculative_tokens": 4}\'; several drafters: '
            '\'{"drafters": [{"method": "ngram"}, {"model": "..."}]}\'',
            rich_help_panel=_PANEL,
        ),
    ] = None
    no_speculation: Annotated[
        bool,
        typer.Option(
            "--no-speculation", help="Plain decoding, for comparison.", rich_help_panel=_PANEL
        ),
    ] = False

    def config(self, model: str) -> dict[str, Any] | None:
        """The engine's `speculative_config`; None is plain decoding.

        Raises:
            UsageError: flags that contradict each other, or JSON that is no object.
        """
        self._check()
        drafts_itself = _may_wrap_target(model)
        if self.no_speculation:
            return {"num_speculative_tokens": 0} if drafts_itself else None
        if self.speculative_config is not None:
            return _read_speculative(self.speculative_config)
        names = {"method": self.spec_method, "model": self.drafter}
        if self.drafter in WITHOUT_MODEL and self.spec_method in (None, self.drafter):
            names = {"method": self.drafter, "model": None}
        if self.drafter is None and self.spec_method is None and model == DEMO:
            names["model"] = DEMO_DRAFT
        config: dict[str, Any] = {key: name for key, name in names.items() if name is not None}
        if model == DEMO and config == {"method": "mtp"}:
            raise UsageError(
                "the demo's MTP modules are a checkpoint beside it; give --drafter demo/mtp"
            )
        if not config and not drafts_itself:
            self._refuse_what_has_no_drafter()
            return None
        if self.num_speculative_tokens is not None:
            config["num_speculative_tokens"] = self.num_speculative_tokens
        elif config.get("model") == DEMO_DRAFT:
            config["num_speculative_tokens"] = _DEMO_TOKENS
        if self.drafter_quantization is not None:
            config["quantization"] = self.drafter_quantization
        return config or None

    def _check(self) -> None:
        short = {
            "--drafter": self.drafter is not None,
            "-k": self.num_speculative_tokens is not None,
            "--spec-method": self.spec_method is not None,
            "--drafter-quantization": self.drafter_quantization is not None,
        }
        given = [flag for flag, present in short.items() if present]
        if self.speculative_config is not None:
            if self.no_speculation:
                _contradict("--speculative-config", "--no-speculation")
            if given:
                _contradict(given[0], "--speculative-config")
        if self.no_speculation and given:
            _contradict(given[0], "--no-speculation")

    def _refuse_what_has_no_drafter(self) -> None:
        if self.num_speculative_tokens is not None:
            raise UsageError("-k says how much to draft but nothing drafts; add --drafter")
        if self.drafter_quantization is not None:
            raise UsageError("--drafter-quantization is given but nothing drafts; add --drafter")


def _may_wrap_target(model: str) -> bool:
    """Whether MODEL may be a drafter that names its target: a folder that does, or some name of
    the hub, of which nothing is known yet."""
    file = Path(model).expanduser() / "config.json"
    if file.is_file():
        return '"speculators_model_type"' in file.read_text("utf-8", errors="replace")
    return not (model == DEMO or model.startswith(f"{DEMO}/") or file.parent.is_dir())


def _read_speculative(text: str) -> dict[str, Any] | None:
    """An object, or a list of drafters."""
    if text.lstrip().startswith("[{"):
        text = f'{{"drafters": {text}}}'
    return read_object("--speculative-config", text)


def read_object(flag: str, text: str) -> dict[str, Any] | None:
    """The JSON object that a flag holds; null is None."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{flag} is not JSON: {error}; it was {text!r}") from None
    if value is not None and not isinstance(value, dict):
        raise UsageError(f'{flag} must be a JSON object such as {{"key": 1}}, not {text}')
    return value


def _contradict(one: str, other: str) -> None:
    raise UsageError(f"{one} and {other} contradict each other; give one of them")
