"""Flags of what the text of an answer must be."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from slipstream.core.errors import UsageError
from slipstream.core.structured import StructuredOutput

_PANEL = "Structured output (needs the extra structured)"


@dataclass(frozen=True, kw_only=True)
class StructuredFlags:
    """At most one of them is given."""

    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="<json or file>",
            help="JSON that satisfies this schema.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    json_object: Annotated[
        bool, typer.Option("--json-object", help="Any JSON object.", rich_help_panel=_PANEL)
    ] = False
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="<regex>", help="A text that this matches as a whole.", rich_help_panel=_PANEL
        ),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<text>", help="One of these texts (repeatable).", rich_help_panel=_PANEL
        ),
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(metavar="<file>", help="A text of this Lark grammar.", rich_help_panel=_PANEL),
    ] = None

    def wish(self) -> StructuredOutput | None:
        """None where no flag is given; UsageError where they contradict each other or say
        nothing that can be used."""
        given = {
            "--json-schema": self.json_schema is not None,
            "--json-object": self.json_object,
            "--regex": self.regex is not None,
            "--choice": bool(self.choice),
            "--grammar": self.grammar is not None,
        }
        flags = [flag for flag, is_given in given.items() if is_given]
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


def _read(flag: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}: {file} cannot be read ({error})") from None
