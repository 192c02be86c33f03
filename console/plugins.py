"""Commands that other packages, and our own integrations, add to `kvcustody`: entry points in `kvcustody.commands`.

1. An entry point is a typer app (its commands become `kvcustody NAME …`) or a function (it becomes `kvcustody NAME`;
   its module's `EPILOG` is shown below its help).
2. One that cannot be loaded costs its own command alone: that command says why. A name of ours cannot be taken.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import typer

from kvcustody.errors import ConfigError

GROUP = "kvcustody.commands"


@cache
def installed() -> tuple[EntryPoint, ...]:
    """The entry points of the group in order of name, of each name one."""
    return tuple({entry.name: entry for entry in sorted(entry_points(group=GROUP))}.values())


def add_command(app: typer.Typer, entry: EntryPoint) -> None:
    """Add the command of one entry point, or one that says why it cannot be loaded (rule 2)."""
    try:
        loaded = entry.load()
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=entry.name)
        elif callable(loaded):
            epilog = getattr(sys.modules.get(loaded.__module__), "EPILOG", None)
            app.command(name=entry.name, epilog=epilog)(loaded)
        else:
            raise TypeError(f"`{entry.value}` is neither a typer app nor a function")
    except Exception as error:
        _add_broken(app, entry, error)


def _add_broken(app: typer.Typer, entry: EntryPoint, error: Exception) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]

    def broken() -> None:
        raise ConfigError(
            f"command `{entry.name}` from `{entry.value}` cannot be loaded: {reason}", command=entry.name
        )

    help_text = f"(cannot be loaded: {reason})"
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name=entry.name, help=help_text, context_settings=settings)(broken)
