"""Commands that share flags: a dataclass of options becomes flags of each that takes it."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer wants it: each parameter that is a dataclass becomes its fields.

    A default instance of the dataclass sets the defaults of its flags for this command.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    flat = [flag for parameter in signature.parameters.values() for flag in _flags_of(parameter)]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {flag.name: flag.annotation for flag in flat}
    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return call


def _flags_of(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    group = parameter.annotation
    if not is_dataclass(group):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(group, include_extras=True)
    defaults = group if parameter.default is inspect.Parameter.empty else parameter.default
    for field in fields(group):
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(defaults, field.name, inspect.Parameter.empty),
            annotation=hints[field.name],
        )
