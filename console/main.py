"""The `kvcustody` command."""

from __future__ import annotations

import platform
from typing import Any

import typer

import kvcustody
from kvcustody.console import keys as keys_command
from kvcustody.console import size as size_command
from kvcustody.console.api import group as api_group
from kvcustody.console.audit import command as audit_command
from kvcustody.console.command import CustodyGroup, Json, print_json
from kvcustody.console.coverage import command as coverage_command
from kvcustody.console.db import command as db_command
from kvcustody.console.erasure import command as erasure_command
from kvcustody.console.plugins import add_commands
from kvcustody.console.policy import command as policy_command
from kvcustody.console.principal import command as principal_command
from kvcustody.console.replay import command as replay_command
from kvcustody.console.report import command as report_command
from kvcustody.console.scan import command as scan_command
from kvcustody.console.serve import command as serve_command
from kvcustody.console.subject import command as subject_command
from kvcustody.console.witness import command as witness_command

app = typer.Typer(
    cls=CustodyGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Custody of LLM key/value caches: who may reuse a block, for how long it may exist, "
    "and proof that it is gone.",
    epilog="Start with `kvcustody replay`: it needs no file, no GPU and no configuration.",
)
app.command(name="replay", epilog=replay_command.EPILOG)(replay_command.replay)
app.command(name="size", epilog=size_command.EPILOG)(size_command.size)

app.add_typer(keys_command.app, name="keys")
app.add_typer(db_command.app, name="db")
app.add_typer(policy_command.app, name="policy")
app.command(name="init", epilog=serve_command.INIT_EPILOG)(serve_command.init)
app.command(name="serve", epilog=serve_command.SERVE_EPILOG)(serve_command.serve)
app.add_typer(principal_command.principals, name="principal")
app.add_typer(principal_command.keys, name="apikey")
app.add_typer(api_group.app, name="api")
app.add_typer(audit_command.app, name="audit")
app.add_typer(witness_command.app, name="witness")
audit_command.app.command(name="recompute", epilog=coverage_command.RECOMPUTE)(coverage_command.recompute)
app.add_typer(coverage_command.app, name="coverage")
app.add_typer(report_command.app, name="report")
app.add_typer(subject_command.app, name="subject")
app.add_typer(erasure_command.app, name="erasure")
app.add_typer(scan_command.app, name="scan")


@app.command(epilog="Example: `kvcustody version --json`")
def version(as_json: Json = False) -> None:
    """Print the versions that decide how this installation behaves."""
    found = versions()
    if as_json:
        print_json(found)
    else:
        for name, value in found.items():
            print(f"{name} {value if value is not None else 'not installed'}")


def versions() -> dict[str, Any]:
    """kvcustody, Python and the libraries that touch memory or the ledger."""
    from importlib import metadata

    def installed(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    names = ("numpy", "torch", "triton", "SQLAlchemy", "cryptography")
    return {
        "kvcustody": kvcustody.__version__,
        "python": platform.python_version(),
        **{name: installed(name) for name in names},
    }


add_commands(app)

if __name__ == "__main__":
    app()
