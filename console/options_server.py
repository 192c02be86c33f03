"""The options by which a command asks a control plane instead of a local ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcustody.console.command import tell_history
from kvcustody.errors import ConfigError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection, read_key_file

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="KVCUSTODY_SERVER",
        help="Ask this control plane: https://HOST:PORT, http://127.0.0.1:PORT or unix:PATH.",
        metavar="URL",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        envvar="KVCUSTODY_API_KEY_FILE",
        help="File of mode 0600 with the key for --server.",
        metavar="FILE",
    ),
]
Authority = Annotated[
    Path | None,
    typer.Option("--ca", envvar="KVCUSTODY_SERVER_CA", help="PEM of the server's authority.", metavar="FILE"),
]


def connect(
    server: str,
    key_file: Path | None,
    authority: Path | None = None,
    certificate: Path | None = None,
    certificate_key: Path | None = None,
) -> ControlPlaneConnection:
    """The connection that the options name; `certificate` is a client's own, with its key."""
    if key_file is None:
        raise ConfigError("--server needs --api-key-file")
    key = read_key_file(key_file)
    return ControlPlaneConnection(
        server,
        key,
        authority=authority,
        certificate=certificate,
        certificate_key=certificate_key,
        on_history=tell_history,
    )
