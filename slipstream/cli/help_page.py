"""The page that `--help` prints: flags in groups, every name in full whatever the width."""

from typing import Any

from typer.core import TyperCommand


class GroupedHelp(TyperCommand):
    """Typer's own groups come as tables, which cut long flag names on an ordinary terminal."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the flags under the headings that they name."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = f"{parameter.param_type_name}s".capitalize()
                heading = getattr(parameter, "rich_help_panel", None) or kind
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
