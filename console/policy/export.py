"""`kvcustody policy export`: the policy in another language, for reviewers who read that one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcustody.console.command import Json, print_json, say
from kvcustody.console.policy.review import Revoked
from kvcustody.console.policy.validate import File
from kvcustody.errors import ConfigError, PolicyError
from kvcustody.files import READABLE, write_file
from kvcustody.policies.workbench.cedar import to_cedar
from kvcustody.policies.workbench.validate import load_file

_EPILOG = "Example:\n\n    kvcustody policy export policy.yaml --cedar --out policy.cedar"
Cedar = Annotated[bool, typer.Option("--cedar", help="As Cedar statements.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the statements here instead of printing them.")]


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="export", epilog=_EPILOG)(export_command)


def export_command(
    file: File, *, cedar: Cedar = False, out: Out = None, revoked: Revoked = None, as_json: Json = False
) -> None:
    """Export a policy to Cedar: the same decisions, each statement under the id that ours would name.

    With --json also the entities: each tenant with its private scope and what it may keep.
    """
    if not cedar:
        raise ConfigError("say what to export to: `--cedar`")
    exported = to_cedar(load_file(file), revoked=frozenset(revoked or ()))
    if out is not None:
        try:
            write_file(out, exported.text.encode(), mode=READABLE)
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise PolicyError(f"file `{out}` cannot be written: {reason}", path=out) from error
    if as_json:
        print_json({"policies": exported.text, "entities": list(exported.entities)})
    else:
        say(f"written: {out}" if out is not None else exported.text, end="\n" if out is not None else "")
