"""Commands from entry points: they run, they teach, and a broken one costs itself alone."""

from __future__ import annotations

import sys
import tomllib
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from kvcustody.console.command import CustodyGroup
from kvcustody.console.lazy import ExtendedGroup
from kvcustody.console.main import Kvcustody
from kvcustody.console.plugins import GROUP, add_command
from kvcustody.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package that somebody else installed."""
    plugin = types.ModuleType("foreign_commands")
    source = '''
import typer
EPILOG = "Example: kvcustody greet --name you"
app = typer.Typer()
@app.command()
def again() -> None:
    """Once more."""
    print("again")
@app.command()
def never() -> None:
    """Not once more."""
def greet(name: str = "nobody") -> None:
    """Greet somebody."""
    print(f"hello {name}")
number = 7
'''
    exec(source, plugin.__dict__)
    monkeypatch.setitem(sys.modules, "foreign_commands", plugin)
    return plugin


def cli(*entries: tuple[str, str]) -> typer.Typer:
    app = typer.Typer(cls=CustodyGroup, no_args_is_help=True, add_completion=False)

    @app.command()
    def version() -> None:
        """Ours."""
        print("ours")

    for name, value in entries:
        add_command(app, EntryPoint(name, value, GROUP))
    return app


def run(app: typer.Typer, *arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_functions_and_apps_become_commands(module: types.ModuleType) -> None:
    app = cli(("greet", "foreign_commands:greet"), ("more", "foreign_commands:app"))
    assert run(app, "greet", "--name", "you").stdout == "hello you\n"
    assert run(app, "more", "again").stdout == "again\n"
    assert "kvcustody greet --name you" in run(app, "greet", "--help").stdout
    assert "Greet somebody" in run(app, "--help").stdout


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_package:app", "ModuleNotFoundError"),
        ("foreign_commands:absent", "AttributeError"),
        ("foreign_commands:number", "neither a typer app nor a function"),
    ],
)
def test_a_broken_command_is_reported_and_costs_itself_alone(module: types.ModuleType, value: str, reason: str) -> None:
    app = cli(("broken", value), ("greet", "foreign_commands:greet"))
    assert run(app, "greet").stdout == "hello nobody\n" and run(app, "version").stdout == "ours\n"
    assert "cannot be loaded" in run(app, "--help").stdout
    result = run(app, "broken", "--any", "thing")
    assert result.exit_code == 2 and reason in result.stderr and result.stderr.startswith("error: KVC100")
    assert len(result.stderr.splitlines()) == 1


def test_observe_is_declared_and_loads() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    loaded = EntryPoint("observe", declared["observe"], GROUP).load()
    assert callable(loaded)


def test_observe_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvcustody.integrations.events")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zmq", None)
    from kvcustody.integrations.events.command import observe

    with pytest.raises(ConfigError, match=r"kvcustody\[events\]"):
        observe(policy="regulated-saas")


def test_a_command_of_ours_that_is_not_installed_says_what_installs_it() -> None:
    """`demo attack` and `conformance` are of `kvcustody-testkit`; an entry point of that name comes first."""

    class Group(ExtendedGroup):
        elsewhere: ClassVar = {"far": "kvcustody[far]"}

        def _others(self) -> dict[str, EntryPoint]:
            return {}

    app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False)
    app.callback()(lambda: None)
    result = run(app, "far", "attack", "--seed", "3")
    assert result.exit_code == 2 and "pip install 'kvcustody[far]'" in result.stderr
    assert "far" not in run(app, "--help").stdout
    assert run(app, "further").exit_code == 2
    declared = tomllib.loads((ROOT / "packaging" / "testkit" / "pyproject.toml").read_text())
    assert set(declared["project"]["entry-points"][GROUP]) == {*Kvcustody.elsewhere, "demo.attack"}
