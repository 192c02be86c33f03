"""What the commands on principals and on their keys share: options, the book of the ledger itself, a new key's print.

1. A new key is printed once, on stdout, and kept nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.audit.store.database.engine import check_there
from kvcustody.console.command import print_json, say
from kvcustody.console.opening import service_settings
from kvcustody.console.options import ServiceSource
from kvcustody.governance.credentials.certificate_thumbprint import thumbprint_in
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.access.local_administration import open_administration
from kvcustody.governance.service.access.principals import Principals
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.times import TO_THE_MINUTE, readable

Name = Annotated[str, typer.Argument(help="The principal.", metavar="NAME")]
AllowLast = Annotated[
    bool, typer.Option("--allow-last", help="Even where nobody who manages keys would be left.")
]
Bound = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        help="For a worker: PEM of the client certificate that the key is bound to (`workers_listen`).",
        metavar="FILE",
    ),
]
Days = Annotated[int | None, typer.Option(min=1, max=366, help="Days until the key ends.")]


def say_unread(found: list[dict[str, Any]]) -> None:
    """Say which rows of the book cannot be read."""
    for row in found:
        if row["unread"]:
            say(f"not read: {row['unread']}")


def bound_to(certificate: Path | None) -> str | None:
    """How a key names the certificate in a file."""
    return None if certificate is None else thumbprint_in(certificate)


def print_key(made: dict[str, Any], as_json: bool) -> None:
    """The key on stdout, what is known of it on stderr."""
    if as_json:
        print_json(made)
        return
    say(made["key"])
    typer.echo(
        f"prefix {made['prefix']}, ends {readable(made['expires_us'], TO_THE_MINUTE)}; shown this once",
        err=True,
    )


@contextmanager
def local_book(source: ServiceSource) -> Iterator[tuple[Principals, str, ServiceSettings]]:
    """The book of principals of the ledger that the settings name, by whom it is changed, and the settings."""
    configure("warning", "console")
    settings = service_settings(source.config, source.ledger)
    check_there(settings.database_url)
    with open_administration(settings) as administration:
        yield administration.principals, administration.by, settings
