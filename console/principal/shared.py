"""Shared parts of the commands about principals and keys: options, the ledger's own book, and printing a new key.

1. A new key is printed once, on stdout, and kept nowhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.console.command import print_json, say
from kvcustody.governance.credentials.certificate_thumbprint import thumbprint_in
from kvcustody.times import TO_THE_MINUTE, readable

Name = Annotated[str, typer.Argument(help="The principal.", metavar="NAME")]
AllowLast = Annotated[bool, typer.Option("--allow-last", help="Permit it even if no one could manage keys afterwards.")]
Bound = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        help="For a worker: PEM of the client certificate that the key is bound to (`workers_listen`).",
        metavar="FILE",
    ),
]
Days = Annotated[int | None, typer.Option(min=1, max=366, help="Days until the key expires.")]


def bound_to(certificate: Path | None) -> str | None:
    """Return a key's name for the certificate in a file."""
    return None if certificate is None else thumbprint_in(certificate)


def print_key(issued: dict[str, Any], as_json: bool) -> None:
    """Print the key on stdout and its facts on stderr."""
    if as_json:
        print_json(issued)
        return
    say(issued["key"])
    typer.echo(
        f"prefix {issued['prefix']}, ends {readable(issued['expires_us'], TO_THE_MINUTE)}; shown this once",
        err=True,
    )
