"""Commands whose parameters are dataclasses: each field that has a `Flag` becomes an option.

A field whose type is a dataclass stands for the options of that one, so that several commands can
share a list of them.

A default instance of the dataclass sets the defaults of its options for that command; a dict in
`Annotated[Config, {"field": value}]` sets fields that the command does not offer.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

import typer
from typer.core import TyperCommand

from slipstream.cli.errors import DebugState, require_stdout
from slipstream.cli.vllm_line import rewritten, unknown_flag
from slipstream.core import flags
from slipstream.core.flags import Flag, check_fields, flag, flag_of, kinds_of, spelled

T = TypeVar("T")

_LINE, _SETTLED = "slipstream.line", "slipstream.settled"
# Placeholders of values by what reads them, where a flag names none.
_METAVARS: Mapping[object, str] = {
    Path: "<file>",
    flags.parse_bytes: "<bytes>",
    flags.parse_count: "<number>",
    flags.parse_integers: "<numbers>",
    flags.parse_object: "<json>",
}


def _note_debug(context: typer.Context, debug: bool) -> bool:
    """Set before other flags are parsed, so that their errors show tracebacks, too."""
    if debug:
        context.ensure_object(DebugState).debug = True
    return debug


DebugFlag = Annotated[
    bool,
    typer.Option(
        "--debug", callback=_note_debug, is_eager=True, help="Show the traceback of an error."
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """What commands that load a model report about it."""

    verbose: bool = flag(
        False,
        "Show the engine's log and the values that it derived, with the reasons.",
        also=("-v",),
    )


def add_commands(
    app: typer.Typer, *commands: Callable[..., Any], kind: "type[GroupedHelp] | None" = None
) -> None:
    """Register commands by their names; they take --debug besides their own flags."""
    for command in commands:
        app.command(cls=kind or GroupedHelp)(flattened(command))


def flattened(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command in the form that Typer reads: one parameter for each option."""
    parameters = inspect.signature(command).parameters
    groups = {
        name: _Group(name, it) for name, it in parameters.items() if it.annotation is not Given
    }
    options = [option for group in groups.values() for option in group.parameters()]
    options.append(_keyword("debug", DebugFlag, False))
    options.append(_keyword("context", typer.Context, MISSING))

    def call(context: typer.Context, debug: bool = False, **values: Any) -> Any:
        del debug  # its callback did the work
        taken = {name: group.take(values) for name, group in groups.items()}
        given = {name: Given(context) for name in parameters.keys() - groups.keys()}
        require_stdout()  # before the work, but behind errors of the flags
        return command(**taken, **given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {option.name: option.annotation for option in options}
    call.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return call


class Given:
    """Type of a command's parameter that reports which of its flags were given.

    Attributes:
        line: the arguments as they were given.
        settled: the arguments after names of other engines and --config files were replaced.
    """

    def __init__(self, context: typer.Context) -> None:
        self._context = context
        self.line: Sequence[str] = context.meta.get(_LINE, ())
        self.settled: Sequence[str] = context.meta.get(_SETTLED, ())

    def __call__(self, group: str, field: str) -> bool:
        """Whether the command line has the flag of this field of a parameter's dataclass."""
        source = self._context.get_parameter_source(f"{group}__{field}")
        return source is not None and source.name != "DEFAULT"


class _Group:
    """The options of one dataclass, which is a parameter of a command."""

    def __init__(self, prefix: str, parameter: inspect.Parameter) -> None:
        hint, given = parameter.annotation, parameter.default
        marked = get_origin(hint) is Annotated
        self._config, fixed = get_args(hint)[:2] if marked else (hint, {})
        self._fixed: dict[str, Any] = fixed
        self._prefix = prefix  # of option names, so that two groups may have equal fields
        is_default = given is not inspect.Parameter.empty
        self._defaults = {
            it.name: getattr(given, it.name) if is_default else it.default
            for it in fields(self._config)
        }
        self._inner = {
            it.name: _Group(it.name, _keyword(it.name, it.type, it.default))
            for it in fields(self._config)
            if is_dataclass(it.type)
        }

    def parameters(self) -> Iterator[inspect.Parameter]:
        panel = None
        for it in fields(self._config):
            if it.name in self._inner:
                yield from self._inner[it.name].parameters()
            found = flag_of(it)
            if found is not None:
                panel = found.panel or panel
                if it.name not in self._fixed:
                    default = self._defaults[it.name]
                    yield _parameter(self._name(it, found), it, found, panel, default)

    def take(self, values: Mapping[str, Any]) -> Any:
        """Make the dataclass from the values of all options; UsageError for a wrong one."""
        made = {name: it for name, it in self._defaults.items() if it is not MISSING} | self._fixed
        made |= {name: inner.take(values) for name, inner in self._inner.items()}
        for it in fields(self._config):
            found = flag_of(it)
            if found is not None and it.name not in self._fixed:
                given = values[self._name(it, found)]
                made[it.name] = _value(it, found, given, self._defaults[it.name])
        check_fields(self._config, made, spelled)
        return self._config(**made)

    def _name(self, it: Field[Any], found: Flag) -> str:
        # Help pages show the name of an argument.
        return it.name if found.argument else f"{self._prefix}__{it.name}"


def _parameter(
    name: str, it: Field[Any], found: Flag, panel: str | None, default: Any
) -> inspect.Parameter:
    """Required, if there is no default."""
    kinds = [kind for kind in kinds_of(it.type) if kind is not NoneType]
    hint = _option_type(kinds, found)
    shown = found.stands_for_none if default is None else default
    options: dict[str, Any] = {
        "help": found.help,
        "rich_help_panel": panel,
        "metavar": found.metavar or _METAVARS.get(found.parse or kinds[0]),
        "hidden": found.hidden,
    }
    if found.parse is not None or get_origin(hint) is list:
        shown = MISSING if default is MISSING else None
    if found.help.endswith("]"):
        options["show_default"] = False
    if shown is None:
        hint |= None
    if found.argument:
        return _keyword(name, Annotated[hint, typer.Argument(**options)], shown)
    main = spelled(it)
    if kinds == [bool] and it.default is not False and found.name is None:
        main = f"{main}/--no-{main.removeprefix('--')}"
    option = typer.Option(main, *found.also, envvar=found.envvar, show_envvar=False, **options)
    return _keyword(name, Annotated[hint, option], shown)


def _option_type(kinds: list[Any], found: Flag) -> Any:
    """The type for Typer: a list for a sequence, str for values that `Flag.parse` reads."""
    if found.parse is not None:
        return str
    for kind in kinds:
        if get_origin(kind) is not None:  # tuple[int, ...], Sequence[str]
            return list[get_args(kind)[0]]  # type: ignore[misc]
    return kinds[0]


def _value(it: Field[Any], found: Flag, given: Any, default: Any) -> Any:
    if given is None or given == []:
        return default
    if found.parse is not None:
        return found.parse(spelled(it), given)
    if found.stands_for_none is not None and given == found.stands_for_none:
        return None
    return tuple(given) if isinstance(given, list) else given


def _keyword(name: str, hint: Any, default: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=empty if default is MISSING else default,
        annotation=hint,
    )


class GroupedHelp(TyperCommand):
    """Help in groups of flags. Typer's tables would cut long flag names on usual terminals.

    The error for an unknown flag gives the reason, or a similar flag.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; UsageError for an unknown flag."""
        whole = [*args]  # the parser empties the other
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = _unknown(error, whole)
            if name is None:
                raise
            declared = [it for parameter in self.get_params(ctx) for it in parameter.opts]
            raise unknown_flag(name, declared, ctx.command_path) from None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the flags under the headings of their panels."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = f"{parameter.param_type_name}s".capitalize()
                heading = getattr(parameter, "rich_help_panel", None) or kind
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
        if any(getattr(parameter, "hidden", False) for parameter in self.get_params(ctx)):
            formatter.write_paragraph()
            formatter.write_text("Rare flags and those of other engines: docs/from_vllm.md.")


def _unknown(error: Any, arguments: Sequence[str]) -> str | None:
    """The flag as it was typed, if an error of the parser is about one that does not exist.

    The parser reads letters after one dash singly: of -hf it names -f, and -ngl is a value of -n.
    """
    letters = [it for it in arguments if it[:1] == "-" != it[1:2] and it[2:3].isalpha()]
    name, parameter = getattr(error, "option_name", None), getattr(error, "param", None)
    if name is not None and hasattr(error, "possibilities"):
        is_long = name.startswith("--")
        return name if is_long else next((it for it in letters if name[1:] in it), name)
    options = () if parameter is None else parameter.opts
    return next((it for it in letters if it[:2] in options), None)


class VllmCommand(GroupedHelp):
    """A command that takes what `vllm serve` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; UsageError for a flag that is unknown or refused."""
        ctx.meta[_LINE] = (*args,)
        ctx.meta[_SETTLED] = settled = rewritten(args, self.get_params(ctx))
        return super().parse_args(ctx, [*settled])


def parsed(command: Callable[..., T], arguments: Sequence[str]) -> T:
    """Call a function with the arguments of a command line, which may have vLLM's flags; UsageError
    if they are not valid."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    add_commands(app, command, kind=VllmCommand)
    return cast(T, app([*arguments], standalone_mode=False, obj=DebugState()))
