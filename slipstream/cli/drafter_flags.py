"""The flags of the drafter, for the commands that run an engine."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.flags import flag, given_flags, parse_object
from slipstream.core.paths import user_path
from slipstream.models.bundled import bundled_names
from slipstream.speculative.catalogue import IN_TARGET, LOOKUPS, METHODS

DEMO, DEMO_DRAFT = "demo", "demo/draft"
DEMO_DRAFTERS = tuple(name for name in bundled_names() if name != DEMO)
AUTO = "auto"  # a number of draft tokens


def _parse_count(flag_name: str, text: str) -> int | str:
    """A number of draft tokens, or `auto`."""
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{flag_name} must be a number or auto, not {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class DrafterFlags:
    """The drafter, by short flags or by one JSON object."""

    drafter: str | None = flag(
        None,
        f"The drafter: a checkpoint, one bundled for the demo ({', '.join(DEMO_DRAFTERS)}), "
        f"{', '.join(IN_TARGET)} (the model's own), {' or '.join(LOOKUPS)}. "
        f"[{DEMO_DRAFT} for the demo]",
        panel="Drafting",
        also=("--spec-model",),
    )
    num_speculative_tokens: int | str | None = flag(
        None,
        "Maximum draft tokens per step, or auto: as many as are worth it, step by step. It is 7 "
        "at most, 12 for look-ups, 15 for drafters of one pass. [auto]",
        metavar="<int|auto>",
        parse=_parse_count,
        also=("-k", "--spec-tokens"),
    )
    spec_method: str | None = flag(
        None,
        f"Drafting method: {', '.join(METHODS)}. [found from the drafter]",
    )
    drafter_quantization: str | None = flag(
        None,
        "Quantise the drafter's weight matrices while loading; the model's have --quantization. "
        "[none]",
    )
    speculative_config: str | None = flag(
        None,
        'All drafting options as JSON: \'{"model": "...", "num_speculative_tokens": 4}\'; for '
        f'several drafters: \'{{"drafters": [{{"method": "{LOOKUPS[0]}"}}, {{"model": "..."}}]}}\'',
        metavar="<json>",
        also=("-sc",),
    )
    no_speculation: bool = flag(False, "Decode without a drafter, for comparison.")

    def apply(self, engine: EngineConfig) -> EngineConfig:
        """The engine's options with this drafter."""
        return replace(engine, speculative_config=self.config(engine.model))

    def config(self, model: str) -> dict[str, Any] | None:
        """The engine's `speculative_config`; None is plain decoding; UsageError for flags that
        contradict each other."""
        self._check()
        drafts_itself = _may_wrap_target(model)
        if self.no_speculation:
            return {"num_speculative_tokens": 0} if drafts_itself else None
        if self.speculative_config is not None:
            return _read_speculative(self.speculative_config)
        config = self._named(model)
        if not config and not drafts_itself:
            for name in self._given():
                raise UsageError(f"{name} is given without a drafter; add --drafter")
            return None
        if self.num_speculative_tokens is not None:
            config["num_speculative_tokens"] = self.num_speculative_tokens
        if self.drafter_quantization is not None:
            config["quantization"] = self.drafter_quantization
        return config or None

    def _named(self, model: str) -> dict[str, Any]:
        """Method and model, if they are given or follow from the demo."""
        names = {"method": self.spec_method, "model": self.drafter}
        _require_no_bare_method(self.drafter)
        if is_method(self.drafter) and self.spec_method in (None, self.drafter):
            names = {"method": self.drafter, "model": None}
        if self.drafter is None and self.spec_method is None and model == DEMO:
            names["model"] = DEMO_DRAFT
        config = {key: name for key, name in names.items() if name is not None}
        method = config.get("method", "")
        if model == DEMO and "model" not in config and method in IN_TARGET:
            raise UsageError(
                f"the demo's modules are a separate checkpoint; give --drafter demo/{method}"
            )
        return config

    def _check(self) -> None:
        given = self._given()
        for alone in ("--no-speculation", "--speculative-config"):
            others = [name for name in given if name != alone]
            if alone in given and others:
                raise UsageError(f"{others[0]} and {alone} contradict each other; give one of them")

    def _given(self) -> list[str]:
        return ["-k" if name.endswith("tokens") else name for name in given_flags(self)]


def is_method(drafter: str | None) -> bool:
    """Whether the value of --drafter is a method that needs no checkpoint."""
    return drafter in METHODS and METHODS[drafter].without_model


def _require_no_bare_method(drafter: str | None) -> None:
    """Raise UsageError for a method that needs a checkpoint, and for one that is misspelled by its
    case: the hub would be asked for either."""
    name = "" if drafter is None else drafter.lower()
    if drafter is None or is_method(drafter) or name not in METHODS or Path(drafter).exists():
        return
    if is_method(name):
        raise UsageError(f"there is no drafter {drafter}; did you mean --drafter {name}?")
    raise UsageError(
        f"{name} is a method, and --drafter names the drafter itself: give its directory or "
        "hub name, from which the method is found"
    )


def _may_wrap_target(model: str) -> bool:
    """Whether MODEL may be a drafter that names its target: a folder that does, or a hub name,
    whose config.json has not been read yet."""
    file = user_path(model) / "config.json"
    if file.is_file():
        return '"speculators_model_type"' in file.read_text("utf-8", errors="replace")
    return not (model == DEMO or model.startswith(f"{DEMO}/") or file.parent.is_dir())


def _read_speculative(text: str) -> dict[str, Any] | None:
    """An object, or a list of drafters."""
    if re.match(r"\s*\[\s*\{", text):
        text = f'{{"drafters": {text}}}'
    return parse_object("--speculative-config", text)
