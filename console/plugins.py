"""Commands that other packages and our integrations add to `kvcustody`, by entry points in `kvcustody.commands`.

1. An entry point is a typer app (its commands become `kvcustody NAME …`) or a function (it becomes `kvcustody NAME`;
   its module's `EPILOG` is shown below its help).
2. `GROUP.NAME` is a command of a group of ours that takes such: `apikey` does.
3. One that cannot be loaded costs its own command alone: that command says why. A name of ours cannot be taken.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvcustody.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "kvcustody.commands"


@cache
def installed() -> tuple[EntryPoint, ...]:
    """Return the group's entry points in order of name, one for each name."""
    from importlib.metadata import entry_points

    return tuple({entry.name: entry for entry in sorted(entry_points(group=GROUP))}.values())


def add_to_group(app: typer.Typer, group: str) -> None:
    """Add others' commands to one of our groups (rule 2)."""
    for entry in installed():
        if entry.name.startswith(f"{group}."):
            add_command(app, type(entry)(entry.name.removeprefix(f"{group}."), entry.value, entry.group))


def summary_of(module: str, attribute: str) -> str | None:
    """Return the first sentence of a command's help from its module's text, or None where that needs the module.

    So a listing imports no command, however much it needs.
    """
    package, *inner = module.split(".")
    try:
        found = find_spec(package)
        roots = (found and found.submodule_search_locations) or ()
        file = next(path for root in roots if (path := Path(root, *inner).with_suffix(".py")).is_file())
        statements = ast.parse(file.read_bytes()).body
    except (StopIteration, ImportError, OSError, SyntaxError, ValueError):
        return None
    for one in statements:
        if isinstance(one, ast.FunctionDef) and one.name == attribute:
            return (ast.get_docstring(one) or "").partition("\n\n")[0] or None
        if isinstance(one, ast.Assign) and [getattr(name, "id", None) for name in one.targets] == [attribute]:
            stated = one.value.keywords if isinstance(one.value, ast.Call) else []
            helps = [item.value for item in stated if item.arg == "help"]
            texts = (item.value for item in helps if isinstance(item, ast.Constant))
            return next((text for text in texts if isinstance(text, str)), None)
    return None


def add_command(app: typer.Typer, entry: EntryPoint, cls: type[typer.core.TyperGroup] | None = None) -> None:
    """Add an entry point's command, or one that says why it cannot be loaded (rule 3); `cls` is its group's class."""
    try:
        loaded = entry.load()
        if isinstance(loaded, typer.Typer):
            if cls is not None:
                loaded.info.cls = cls
            app.add_typer(loaded, name=entry.name)
        elif callable(loaded):
            epilog = getattr(sys.modules.get(loaded.__module__), "EPILOG", None)
            app.command(name=entry.name, epilog=epilog)(loaded)
        else:
            raise TypeError(f"`{entry.value}` is neither a typer app nor a function")
    except Exception as error:
        _add_broken(app, entry, error)


def add_absent(app: typer.Typer, name: str, requirement: str) -> None:
    """Add a command that names the distribution that provides it."""
    says = f"`kvcustody {name}` is not installed: pip install '{requirement}'"
    _add_refusal(app, name, says, f"(pip install '{requirement}')")


def _add_broken(app: typer.Typer, entry: EntryPoint, error: Exception) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    says = f"command `{entry.name}` from `{entry.value}` cannot be loaded: {reason}"
    _add_refusal(app, entry.name, says, f"(cannot be loaded: {reason})")


def _add_refusal(app: typer.Typer, name: str, says: str, help_text: str) -> None:
    def refused() -> None:
        raise ConfigError(says, command=name)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name=name, help=help_text, context_settings=settings)(refused)
