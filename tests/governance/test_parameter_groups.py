"""Groups of parameters: callers see the fields, the function sees the object."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped


@dataclass(frozen=True, kw_only=True)
class Inner(ParameterGroup):
    server: Annotated[str | None, typer.Option(help="Whom to ask.")] = None


@dataclass(frozen=True, kw_only=True)
class Outer(ParameterGroup):
    ctx: typer.Context
    since: Annotated[int, typer.Option(min=0, help="From then on.")] = 3
    inner: Inner


@grouped
def told(
    *,
    name: Annotated[str, typer.Argument()],
    outer: Outer,
    loud: Annotated[bool, typer.Option("--loud")] = False,
) -> None:
    """Tell it."""
    asked = outer.ctx.get_parameter_source("server")
    assert asked is not None
    typer.echo(f"{name} {outer.since} {outer.inner.server} {asked.name} {loud}")


def test_fields_are_options_in_the_groups_place() -> None:
    app = typer.Typer()
    app.command()(told)
    run = CliRunner().invoke
    assert run(app, ["ada"]).output == "ada 3 None DEFAULT False\n"
    assert run(app, ["ada", "--since", "5", "--server", "x", "--loud"]).output == "ada 5 x COMMANDLINE True\n"
    assert run(app, ["ada", "--since", "-1"]).exit_code == 2
    assert list(inspect.signature(told).parameters) == ["name", "ctx", "since", "server", "loud"]


def test_a_function_is_also_called_by_place() -> None:
    @grouped
    def add(*, first: int, group: Pair, last: int = 0) -> int:
        return first + group.left + group.right + last

    assert add(1, 2) == 8
    assert add(1, 2, 3, 4) == 10
    assert add(first=1, left=2, last=9) == 17


@dataclass(frozen=True, kw_only=True)
class Pair(ParameterGroup):
    left: int
    right: int = 5


def test_two_parameters_of_one_name_are_refused() -> None:
    def twice(*, left: int, group: Pair) -> None:
        raise AssertionError("never called")

    with pytest.raises(AssertionError, match="two parameters have one name"):
        grouped(twice)
