"""`kvcustody principal` and `kvcustody apikey`: on the ledger itself, or against a server with `--server`.

1. A new key is printed once, on stdout, and kept nowhere.
2. Against a server a bootstrap key enrols and issues first keys; everything else needs the machine of the ledger.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.console.command import Json, make_table, print_json, stdout
from kvcustody.console.remote import Authority, KeyFile, Server, connect
from kvcustody.console.serve.command import Config
from kvcustody.errors import ConfigError
from kvcustody.governance.logs import configure
from kvcustody.governance.service.administration import open_administration
from kvcustody.governance.service.principals import Principals
from kvcustody.governance.service.roles import Role
from kvcustody.governance.service.settings import ServiceSettings, load_service_settings
from kvcustody.governance.service.thumbprint import thumbprint_in

principals = typer.Typer(
    no_args_is_help=True,
    help="Enrol, list and disable the people and machines that may ask a control plane.",
    epilog="Roles and what each may do: docs/operations.md. Nobody is both author and approver.",
)
keys = typer.Typer(
    no_args_is_help=True,
    help="Issue, list and revoke the API keys of principals.",
    epilog="Keys end by themselves; `kvcustody apikey issue --replace` gives a new one and lets the old ones end.",
)
_Name = Annotated[str, typer.Argument(help="The principal.", metavar="NAME")]
_Bound = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        help="For a worker: PEM of the client certificate that the key is bound to (`workers_listen`).",
        metavar="FILE",
    ),
]
_Days = Annotated[int | None, typer.Option(min=1, max=366, help="Days until the key ends.")]


@principals.command(
    epilog="Examples:\n\n    kvcustody principal add alice --role auditor\n\n"
    "    kvcustody principal add acme-dpo --role tenant-admin --tenant acme\n\n"
    "    kvcustody principal add gpu-0 --role worker --server unix:/run/kvcustody/api.sock --api-key-file boot.key"
)
def add(
    name: _Name,
    role: Annotated[list[Role], typer.Option("--role", help="A role; may be repeated.")],
    tenant: Annotated[str | None, typer.Option(help="The tenant of a tenant-viewer or tenant-admin.")] = None,
    machine: Annotated[bool, typer.Option("--machine", help="Not a person.")] = False,
    days: _Days = None,
    certificate: _Bound = None,
    config: Config = None,
    server: Server = None,
    key_file: KeyFile = None,
    authority: Authority = None,
    as_json: Json = False,
) -> None:
    """Enrol a principal and print its first key. The key is shown once."""
    kind = "machine" if machine else "person"
    bound = _bound(certificate)
    if bound is not None and Role.WORKER not in role:
        raise ConfigError("--certificate: a key is bound to a certificate for a worker alone")
    if server is not None:
        body = {"name": name, "roles": role, "tenant": tenant, "kind": kind, "key_days": days}
        body["certificate"] = bound
        with connect(server, key_file, authority) as connection:
            made = connection.post(
                "/v1/principals", {key: value for key, value in body.items() if value is not None}
            )
        _print_key(made["key"], as_json)
        return
    with _local(config) as (book, by, settings):
        book.enrol(name, role, tenant=tenant, kind=kind, by=by)
        made = book.issue_key(name, days=days or settings.key_days, certificate=bound, by=by)
        _print_key(made._asdict(), as_json)


@principals.command("list", epilog="Example: `kvcustody principal list --json`")
def list_principals(
    config: Config = None,
    server: Server = None,
    key_file: KeyFile = None,
    authority: Authority = None,
    as_json: Json = False,
) -> None:
    """List everybody who was ever enrolled, in the order of names."""
    found: list[dict[str, Any]] = []
    if server is not None:
        cursor = None
        with connect(server, key_file, authority) as connection:
            while True:
                page = connection.get("/v1/principals", cursor=cursor, limit=1000)
                found += page["items"]
                cursor = page["next"]
                if cursor is None:
                    break
    else:
        with _local(config) as (book, _, _):
            while rows := book.listed(after=found[-1]["name"] if found else "", limit=1000):
                found += [row._asdict() | {"roles": sorted(row.roles)} for row in rows]
    if as_json:
        print_json(found)
        return
    table = make_table("", "principal", "kind", "roles", "tenant", "state", left=5)
    for row in found:
        state = "disabled" if row["disabled_us"] else "enrolled"
        table.add_row(row["name"], row["kind"], ", ".join(row["roles"]), row["tenant"] or "", state)
    stdout().print(table)


@principals.command(epilog="Example: `kvcustody principal disable alice`")
def disable(name: _Name, config: Config = None, as_json: Json = False) -> None:
    """End a principal, all of its keys and all of its sessions at once. Its name is not given again."""
    with _local(config) as (book, by, _):
        found = book.disable(name, by=by)
    if as_json:
        print_json(found._asdict() | {"roles": sorted(found.roles)})
    else:
        print(f"disabled: {name}")


@keys.command(
    epilog="Examples:\n\n    kvcustody apikey issue alice --days 30\n\n"
    "    kvcustody apikey issue gpu-0 --replace --overlap-days 1 --certificate gpu-0.pem"
)
def issue(
    name: _Name,
    days: _Days = None,
    replace: Annotated[bool, typer.Option("--replace", help="The principal's other keys end.")] = False,
    overlap_days: Annotated[
        float, typer.Option(min=0.0, max=30.0, help="With --replace: days that the other keys still work.")
    ] = 1.0,
    certificate: _Bound = None,
    config: Config = None,
    server: Server = None,
    key_file: KeyFile = None,
    authority: Authority = None,
    as_json: Json = False,
) -> None:
    """Issue a key to a principal, and print it. It is shown once.

    With --replace it is bound to the certificate that the key before was bound to, unless --certificate names another.
    """
    bound = _bound(certificate)
    if server is not None:
        if replace:
            raise ConfigError(
                "--replace works on the ledger itself; with a server, a principal replaces its own keys"
            )
        with connect(server, key_file, authority) as connection:
            body = {"days": days or 90, "certificate": bound}
            _print_key(connection.post(f"/v1/principals/{name}/keys", body), as_json)
        return
    with _local(config) as (book, by, settings):
        overlap = overlap_days if replace else None
        made = book.issue_key(
            name, days=days or settings.key_days, overlap_days=overlap, certificate=bound, by=by
        )
    _print_key(made._asdict(), as_json)


@keys.command(epilog="Example: `kvcustody apikey rotate --server https://kv.example --api-key-file me.key`")
def rotate(
    server: Annotated[str, typer.Option("--server", envvar="KVCUSTODY_SERVER", help="The control plane.")],
    key_file: KeyFile = None,
    authority: Authority = None,
    days: Annotated[int, typer.Option(min=1, max=366, help="Days until the new key ends.")] = 90,
    overlap_days: Annotated[int, typer.Option(min=0, max=30, help="Days that the old keys still work.")] = 1,
    as_json: Json = False,
) -> None:
    """Replace your own key: prints a new one, and lets the old ones end after the overlap."""
    with connect(server, key_file, authority) as connection:
        _print_key(connection.post("/v1/keys:rotate", {"days": days, "overlap_days": overlap_days}), as_json)


@keys.command("list", epilog="Example: `kvcustody apikey list alice --json`")
def list_keys(name: _Name, config: Config = None, as_json: Json = False) -> None:
    """List the keys of a principal: when each was issued, last used, ends or was revoked. Never the keys."""
    with _local(config) as (book, _, _):
        book.get(name)
        found = [key._asdict() for key in book.keys(name)]
    if as_json:
        print_json(found)
        return
    table = make_table("", "prefix", "issued", "ends", "last used", "revoked", "bound to", left=6)
    for key in found:
        days = [_day(key[at]) for at in ("issued_us", "expires_us", "used_us", "revoked_us")]
        table.add_row(key["prefix"], *days, key["certificate"] or "")
    stdout().print(table)


@keys.command(epilog="Example: `kvcustody apikey revoke 0f1e2d3c4b5a`")
def revoke(
    prefix: Annotated[str, typer.Argument(help="The key's public prefix: its 12 digits.", metavar="PREFIX")],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Refuse a key from now on."""
    with _local(config) as (book, by, _):
        found = book.revoke_key(prefix, by=by)
    if as_json:
        print_json(found._asdict())
    else:
        print(f"revoked: {prefix} of {found.principal}")


def _bound(certificate: Path | None) -> str | None:
    """How a key names the certificate in a file."""
    return None if certificate is None else thumbprint_in(certificate)


def _print_key(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    print(made["key"])
    typer.echo(f"prefix {made['prefix']}, ends {_day(made['expires_us'])}; shown this once", err=True)


def _day(at_us: int | None) -> str:
    if at_us is None:
        return ""
    return datetime.datetime.fromtimestamp(at_us / 1e6, datetime.UTC).strftime("%Y-%m-%d %H:%M")


@contextmanager
def _local(config: Path | None) -> Iterator[tuple[Principals, str, ServiceSettings]]:
    """The book of principals of the ledger that the settings name."""
    configure("warning", "console")
    settings = load_service_settings(config)
    with open_administration(settings) as administration:
        yield administration.principals, administration.by, settings
