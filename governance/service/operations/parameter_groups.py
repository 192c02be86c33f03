"""Groups of parameters, declared once: a function takes them as one object, its callers pass them singly.

    @dataclass(frozen=True, kw_only=True)
    class Period(ParameterGroup):
        since: Annotated[str | None, typer.Option(help="From this time on.")] = None
        until: Annotated[str | None, typer.Option(help="Before this time.")] = None

    @grouped
    def show(name: str, *, period: Period) -> None: ...

1. Typer and the API read a function's signature. `grouped` gives it one in which each field of a group stands, in the
   group's place and order, with the field's annotation and default. The function itself is given all by name.
2. A field that is a group itself is laid out too. Two parameters of one name are an error at import.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, update_wrapper
from typing import Any, TypeVar, get_type_hints

Function = TypeVar("Function", bound=Callable[..., Any])
Group = TypeVar("Group", bound="ParameterGroup")


class ParameterGroup:
    """Base of every group; a subclass is a frozen dataclass."""

    __slots__ = ()


def grouped(function: Function) -> Function:
    """Return the function with each group's fields as parameters (rule 1)."""
    signature = inspect.signature(function, eval_str=True)
    laid_out: list[inspect.Parameter] = []
    groups: dict[str, type[ParameterGroup]] = {}
    for parameter in signature.parameters.values():
        if _is_group(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            laid_out += parameters_of(parameter.annotation)
        else:
            laid_out.append(parameter)
    names = [parameter.name for parameter in laid_out]
    assert len(set(names)) == len(names), f"{function.__qualname__}: two parameters have one name: {names}"
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in laid_out]

    def call(*places: Any, **given: Any) -> Any:
        given |= zip(names, places, strict=False)
        made = {name: taken(group, given) for name, group in groups.items()}
        return function(**given, **made)

    update_wrapper(call, function)
    call.__signature__ = signature.replace(parameters=keyword_only)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword_only}
    return call  # type: ignore[return-value]


def _is_group(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, ParameterGroup)


@cache
def _kinds(group: type[Any]) -> dict[str, Any]:
    assert is_dataclass(group)
    hints = get_type_hints(group, include_extras=True)
    return {field.name: hints[field.name] for field in fields(group) if field.init}


def parameters_of(group: type[ParameterGroup]) -> Iterator[inspect.Parameter]:
    """Return each field of a group as a parameter (rule 2)."""
    assert is_dataclass(group)
    defaults = {field.name: field.default for field in fields(group)}
    for name, kind in _kinds(group).items():
        if _is_group(kind):
            yield from parameters_of(kind)
        else:
            default = inspect.Parameter.empty if defaults[name] is MISSING else defaults[name]
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def taken(group: type[Group], given: dict[str, Any]) -> Group:
    """Build a group from `given`, and remove its parameters there."""
    values = {}
    for name, kind in _kinds(group).items():  # type: ignore[arg-type]  # a class is hashable
        if _is_group(kind):
            values[name] = taken(kind, given)
        elif name in given:
            values[name] = given.pop(name)
    return group(**values)
