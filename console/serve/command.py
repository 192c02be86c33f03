"""`kvcustody init` and `kvcustody serve`.

1. `init` prints a bootstrap key once: it can only enrol principals, and ends after hours.
2. `serve` listens where only this machine reaches it, unless TLS is configured; nothing but health checks and the
   console's sign-in page is open. `console: false` leaves the console's pages out.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvcustody.console.command import Json, print_dated, say
from kvcustody.console.opening import service_settings
from kvcustody.console.options import Config, SettledLedger
from kvcustody.errors import ConfigError
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.access.local_administration import make_bootstrap, open_administration

INIT_EPILOG = (
    "Examples:\n\n    kvcustody init\n\n    kvcustody init --config /etc/kvcustody/service.yaml --hours 2 --json"
)
SERVE_EPILOG = (
    "Examples:\n\n    kvcustody serve\n\n    kvcustody serve --listen 127.0.0.1:8443\n\n"
    "    kvcustody serve --config /etc/kvcustody/service.yaml\n\n"
    "docs/how-to/operate/start-the-service.md has every setting, and what to do about backups, upgrades and lost keys."
)


def init(
    config: Config = None,
    ledger: SettledLedger = None,
    hours: Annotated[float, typer.Option(min=0.1, max=168.0, help="Hours until the key ends.")] = 24.0,
    as_json: Json = False,
) -> None:
    """Prepare a ledger for a control plane, and print a bootstrap key that can only enrol principals.

    The key is shown once. Enrol the people and workers with it (`kvcustody principal add --server …`), then let it end.
    """
    settings = service_settings(config, ledger)
    configure("warning", "console")
    with open_administration(settings) as administration:
        made = make_bootstrap(administration, hours=hours)
    if as_json:
        print_dated({"key": made.key, "prefix": made.prefix, "expires_us": made.expires_us})
    else:
        say(made.key)
        typer.echo(
            f"a bootstrap key for {hours:g} hours, shown this once; it can only enrol principals:\n"
            "  kvcustody principal add alice --role auditor --server … --api-key-file …",
            err=True,
        )


def serve(
    config: Config = None,
    listen: Annotated[
        str | None,
        typer.Option(help="`unix:PATH` or HOST:PORT; stronger than the settings.", metavar="WHERE"),
    ] = None,
    ledger: SettledLedger = None,
) -> None:
    """Serve the control plane of one ledger until a signal ends it.

    On SIGTERM or Ctrl-C it stops accepting, finishes what runs, and closes the ledger with nothing lost.
    """
    settings = service_settings(config, ledger, listen=listen)
    configure(settings.log_level, settings.log_format)
    try:
        from kvcustody.console.web.app import Console
        from kvcustody.governance.api.app import create_app
        from kvcustody.governance.api.http.server import serve as run
    except ImportError as error:
        raise ConfigError(f"`{error.name}` is not installed; pip install 'kvcustody[service]'") from None
    from kvcustody.console.documents import ConsoleDocuments
    from kvcustody.governance.service.service import open_service

    with open_service(settings, documents=ConsoleDocuments()) as service:
        run(service, app=create_app(service, pages=Console(service) if settings.console else None))
