"""`kvcustody events`: the fleet's NATS server, its credentials, and its stream's keeper."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.files import PRIVATE, write_file
from kvcustody.governance.control_plane.epoch_feed import EpochFeed
from kvcustody.governance.control_plane.opening import connect
from kvcustody.governance.edge.custody_lease import lease_seconds
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.integrations.jetstream import subjects
from kvcustody.integrations.jetstream.accounts import (
    FleetKeys,
    ServerPlan,
    credentials,
    server_configuration,
)
from kvcustody.integrations.jetstream.connection import NatsPlace
from kvcustody.plurals import several

app = typer.Typer(
    no_args_is_help=True,
    help="KV events over NATS JetStream: the server's accounts and credentials, and the stream's keeper.",
    epilog="docs/how-to/fleet/kv-events-over-nats.md says why NATS is used, what it sees, and what happens without it.",
)
_Folder = Annotated[Path, typer.Option(file_okay=False, help="The folder of the server's keys.", metavar="FOLDER")]
_FOLDER = Path("kvcustody-nats")
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
CONFIGURATION = "nats-server.conf"


class Holder(StrEnum):
    """The holder of credentials."""

    WORKER = "worker"
    DOOR = "door"
    KEEPER = "keeper"
    READER = "reader"


@dataclass(frozen=True, kw_only=True)
class TlsOptions(ParameterGroup):
    """The server's TLS files for clients."""

    tls_certificate: Annotated[str, typer.Option(help="PEM; without it, no TLS.")] = ""
    tls_key: Annotated[str, typer.Option(help="PEM, of the certificate.")] = ""


@app.command(
    "nats-config",
    epilog="Example: `kvcustody events nats-config && nats-server -c kvcustody-nats/nats-server.conf`",
)
@grouped
def nats_config(
    *,
    folder: _Folder = _FOLDER,
    listen: Annotated[str, typer.Option(help="Where it listens.", metavar="HOST:PORT")] = "127.0.0.1:4222",
    monitor: Annotated[
        str, typer.Option(help="Address of its own health and metrics; empty: none.", metavar="HOST:PORT")
    ] = "",
    memory_mib: Annotated[int, typer.Option(min=1, help="Maximum size of all streams, in MiB.")] = 256,
    tls: TlsOptions,
    as_json: _Json = False,
) -> None:
    """Write a NATS server's configuration, with an account for the fleet; its keys are made where there are none.

    Whoever has the folder can make credentials for everybody. The server needs the configuration alone. With keys made
    anew, no credentials of before are accepted.
    """
    if bool(tls.tls_certificate) != bool(tls.tls_key):
        raise ConfigError("--tls-certificate and --tls-key: give both, or neither")
    is_new = not (folder / "fleet.seed").exists()
    keys = FleetKeys.create(folder) if is_new else FleetKeys.read(folder)
    plan = ServerPlan(listen, monitor, memory_mib << 20, certificate=tls.tls_certificate, key=tls.tls_key)
    file = folder / CONFIGURATION
    write_file(file, server_configuration(keys, plan, issued=int(time.time())).encode(), mode=PRIVATE)
    if as_json:
        _print_json({"configuration": str(file), "account": keys.fleet.public, "is_new": is_new})
    else:
        typer.echo(f"nats-server -c {file}")


@app.command(
    "credentials",
    epilog="Examples:\n\n    kvcustody events credentials worker gpu-1 --out gpu-1.creds\n\n"
    "    kvcustody events credentials reader acme-index --tenant acme --issuer https://idp.example --out acme.creds",
)
def credentials_(
    role: Annotated[Holder, typer.Argument(help="The role of the credentials.", metavar="ROLE")],
    name: Annotated[str, typer.Argument(help="Of a worker its `worker_name`; of others one of their own.")],
    out: Annotated[Path, typer.Option(help="Where the credentials are written, mode 0600.", metavar="FILE")],
    *,
    folder: _Folder = _FOLDER,
    hours: Annotated[float, typer.Option(min=0.01, help="How long they are valid.")] = 24.0,
    tenant: Annotated[
        str, typer.Option(help="The tenant whose blocks a reader sees; without it, every tenant's.")
    ] = "",
    issuer: Annotated[str, typer.Option(help="The tenant's issuer.")] = "",
    rank: Annotated[int, typer.Option(min=0, help="A worker's data-parallel rank.")] = 0,
    as_json: _Json = False,
) -> None:
    """Make credentials: a worker writes its own subjects, a tenant's reader reads its tenant's, each nothing else.

    They end by themselves: make them anew before, into the same file. For a reader of a tenant the settings
    `control_plane` and `control_plane_key_path` say where its subjects are known.
    """
    if (tenant or issuer) and role is not Holder.READER:
        raise ConfigError("--tenant and --issuer are for a reader")
    if bool(tenant) != bool(issuer):
        raise ConfigError("--tenant and --issuer: give both, or neither")
    known_as = name if not rank else f"{name}-{rank}"
    place = subjects.name_in_subject(known_as)
    if role is Holder.WORKER:
        allowed = subjects.worker_permissions(place)
    elif role is Holder.DOOR:
        allowed = subjects.door_permissions()
    elif role is Holder.KEEPER:
        allowed = subjects.keeper_permissions(place)
    else:
        which = _tag_of(load_settings(), issuer, tenant) if tenant else subjects.EVERY
        allowed = subjects.reader_permissions(place, which)
    now, keys = int(time.time()), FleetKeys.read(folder)
    account = keys.readers if role is Holder.READER else keys.fleet
    text = credentials(account, known_as, allowed, now=now, seconds=int(hours * 3600))
    write_file(out, text.encode(), mode=PRIVATE)
    if as_json:
        _print_json({"file": str(out), "role": role.value, "name": known_as, "expires": now + int(hours * 3600)})
    else:
        typer.echo(f"{out}: {role.value} `{known_as}`, for {hours:g} hours")


@app.command(epilog="Example: `kvcustody events keep --about 127.0.0.1:18149`")
def keep(
    about: Annotated[
        str, typer.Option(help="Where `/ready`, `/live` and `/metrics` are.", metavar="HOST:PORT")
    ] = "127.0.0.1:18149",
    memory_mib: Annotated[int, typer.Option(min=1, help="Maximum size of the stream, in MiB.")] = 128,
    age_seconds: Annotated[float, typer.Option(min=1, help="Maximum age of a message.")] = 3600.0,
) -> None:
    """Keep the stream of KV events until a signal ends it: bounds, purges with each erasure, hints of epochs.

    Settings: `nats`, `nats_credentials_path` (of a keeper), `control_plane` and `control_plane_key_path` (of a
    principal with the role `door`). Messages live no longer than the shortest ceiling of the policies in effect.
    """
    settings = load_settings()
    configure(settings.log_level, settings.log_format)
    if not settings.nats:
        raise ConfigError("`keep` needs the setting `nats`")
    try:
        from kvcustody.integrations.jetstream.keeper_process import run_keeper
    except ImportError as error:
        raise ConfigError(f"`{error.name}` is not installed; pip install 'kvcustody[nats]'") from None
    run_keeper(settings, about, memory_mib << 20, age_seconds)


@app.command(epilog="Example: `kvcustody events watch nats://127.0.0.1:4222 --credentials router.creds --seconds 10`")
def watch(
    server: Annotated[str, typer.Argument(help="The NATS server.", metavar="URL")],
    *,
    file: Annotated[
        Path, typer.Option("--credentials", help="A reader's credentials.", metavar="FILE", dir_okay=False)
    ],
    authority: Annotated[
        Path | None, typer.Option("--ca", help="PEM of the CA of its certificate.", metavar="FILE")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to read the stream.")] = 5.0,
    tenant: Annotated[str, typer.Option(help="The credentials' tenant.")] = "",
    issuer: Annotated[str, typer.Option(help="The tenant's issuer.")] = "",
    as_json: _Json = False,
) -> None:
    """Say how many blocks of each tenant each worker tells, as a router's index reads them.

    Tenants are shown by the tags of their subjects. For a tenant's credentials the settings `control_plane` and
    `control_plane_key_path` say where its subjects are known.
    """
    if bool(tenant) != bool(issuer):
        raise ConfigError("--tenant and --issuer: give both, or neither")
    try:
        from kvcustody.integrations.jetstream.watched_blocks import watch as watched
    except ImportError as error:
        raise ConfigError(f"`{error.name}` is not installed; pip install 'kvcustody[nats]'") from None
    which = _tag_of(load_settings(), issuer, tenant) if tenant else subjects.EVERY
    rows = watched(NatsPlace(server, file, authority), seconds, tenant=which)
    if as_json:
        _print_json({"streams": [row._asdict() for row in rows]})
        return
    for row in rows:
        said = "complete" if row.is_usable else "incomplete"
        typer.echo(f"{row.worker}  {row.tenant}  {several(row.blocks, 'block')}  {said}")
    if not rows:
        typer.echo("no worker has published a block")


def _tag_of(settings: Settings, issuer: str, tenant: str) -> str:
    if not settings.control_plane:
        raise ConfigError("a reader of a tenant needs the setting `control_plane`")
    with ExitStack() as stack:
        connection = connect(settings, stack)
        lease = lease_seconds(settings.custody_lease_seconds, erased_within_us=0)
        feed = EpochFeed(connection, SystemClock(), lease_seconds=lease, acknowledges=False)
        feed.ask()
        known = feed.last_known()
        assert known is not None, "it was asked"
        return subjects.tenant_tag(known, issuer, tenant)


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
