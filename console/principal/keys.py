"""`kvcustody apikey`: the keys of principals; on the ledger itself, or against a server with `--server`.

1. A new key is printed once, on stdout, and kept nowhere.
2. Against a server everybody replaces and revokes their own keys, a bootstrap key issues them, a key custodian's
   revokes and keeps those of others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvcustody.console.api.asking import asked
from kvcustody.console.command import Json, make_table, print_json, say, stdout
from kvcustody.console.opening import connect, control_plane
from kvcustody.console.options import Authority, ControlPlane, KeyFile, ServiceSource
from kvcustody.console.plugins import add_to_group
from kvcustody.console.principal.shared import (
    AllowLast,
    Bound,
    Days,
    Name,
    bound_to,
    local_book,
    print_key,
    say_unread,
)
from kvcustody.errors import ConfigError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.service.answers.principals import LIST_KEYS
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.times import TO_THE_MINUTE, readable

keys = typer.Typer(
    no_args_is_help=True,
    help="Issue, replace, list and revoke API keys: of principals, and of an engine's tenants.",
    epilog="Keys end by themselves; `kvcustody apikey issue --replace` gives a new one and lets the old ones end.",
)


@keys.command(
    epilog="Examples:\n\n    kvcustody apikey issue alice --days 30\n\n"
    "    kvcustody apikey issue gpu-0 --replace --overlap-days 1 --certificate gpu-0.pem"
)
@grouped
def issue(
    name: Name,
    days: Days = None,
    replace: Annotated[bool, typer.Option("--replace", help="The principal's other keys end.")] = False,
    overlap_days: Annotated[
        float, typer.Option(min=0.0, max=30.0, help="With --replace: days that the other keys still work.")
    ] = 1.0,
    certificate: Bound = None,
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Issue a key to a principal, and print it. It is shown once.

    With --replace it is bound to the certificate that the key before was bound to, unless --certificate names another.
    """
    bound = bound_to(certificate)
    if source.plane.server is not None:
        body = {"days": days or 90, "certificate": bound}
        if replace:
            if overlap_days != int(overlap_days):
                raise ConfigError("--overlap-days: whole days, with --server")
            body["overlap_days"] = int(overlap_days)
        with control_plane(source) as connection:
            print_key(connection.post(_place(name), body), as_json)
        return
    with local_book(source) as (book, by, settings):
        overlap = overlap_days if replace else None
        made = book.issue_key(
            name, days=days or settings.key_days, overlap_days=overlap, certificate=bound, by=by
        )
    print_key(made._asdict(), as_json)


@keys.command(
    epilog="Examples:\n\n    kvcustody apikey rotate --server https://kv.example --api-key-file me.key\n\n"
    "    kvcustody apikey rotate --server https://kv.example:8443 --api-key-file gpu-0.key "
    "--client-certificate gpu-0.pem --client-key gpu-0.tls"
)
def rotate(
    *,
    server: Annotated[str, typer.Option("--server", envvar="KVCUSTODY_SERVER", help="The control plane.")],
    key_file: KeyFile = None,
    authority: Authority = None,
    client_certificate: Annotated[
        Path | None, typer.Option(help="PEM of the client certificate to present (`workers_listen`).")
    ] = None,
    client_key: Annotated[Path | None, typer.Option(help="PEM of that certificate's key.")] = None,
    bind: Annotated[
        bool, typer.Option("--bind", help="Bind the new key to the client certificate that is presented.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, max=366, help="Days until the new key ends.")] = 90,
    overlap_days: Annotated[int, typer.Option(min=0, max=30, help="Days that the old keys still work.")] = 1,
    as_json: Json = False,
) -> None:
    """Replace your own key: prints a new one, and lets the old ones end after the overlap.

    A key that is bound to a client certificate is replaced over the workers' address, by one that is bound to the same.
    """
    body = {"days": days, "overlap_days": overlap_days, "bind": bind}
    plane = ControlPlane(server=server, key_file=key_file, authority=authority)
    with connect(plane, client_certificate, client_key) as connection:
        print_key(connection.post("/v1/keys:rotate", body), as_json)


@keys.command("list", epilog="Example: `kvcustody apikey list alice --json`")
@grouped
def list_keys(
    name: Name,
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """List the keys of a principal: when each was issued, last used, ends or was revoked. Never the keys."""
    found = asked(LIST_KEYS, source, name=name)["items"]
    _print_keys(found, as_json)


@keys.command(
    epilog="Examples:\n\n    kvcustody apikey revoke 0f1e2d3c4b5a\n\n    kvcustody apikey revoke --all --of alice\n\n"
    "    kvcustody apikey revoke 0f1e2d3c4b5a --of alice --server https://kv.example --api-key-file custodian.key"
)
@grouped
def revoke(
    prefix: Annotated[
        str | None, typer.Argument(help="The key's public prefix: its 12 digits.", metavar="PREFIX")
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(help="Whose key it is; with --server your own where nobody is named.", metavar="NAME"),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every key of the principal, and its sessions.")
    ] = False,
    allow_last: AllowLast = False,
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Refuse a key from now on, or all keys of a principal. Another's key takes a key custodian, with --server."""
    if every == (prefix is not None) or (every and of is None):
        raise ConfigError("give the PREFIX of one key, or --all --of NAME")
    if source.plane.server is not None:
        with control_plane(source) as connection:
            _revoke_there(connection, prefix, of, allow_last)
    else:
        with local_book(source) as (book, by, _):
            if prefix is None:
                book.revoke_keys(str(of), allow_last=allow_last, by=by)
            else:
                of = book.revoke_key(prefix, principal=of, allow_last=allow_last, by=by).principal
    if as_json:
        print_json({"principal": of, "prefix": prefix, "revoked": True})
    else:
        say(f"revoked: {prefix or 'every key'}{'' if of is None else f' of {of}'}")


@keys.command(
    epilog="Examples:\n\n    kvcustody apikey keep 0f1e2d3c4b5a --of alice\n\n"
    "    kvcustody apikey keep 0f1e2d3c4b5a --of alice --server https://kv.example --api-key-file custodian.key"
)
@grouped
def keep(
    prefix: Annotated[str, typer.Argument(help="The key's public prefix: its 12 digits.", metavar="PREFIX")],
    of: Annotated[str, typer.Option(help="Whose key it is.", metavar="NAME")],
    days: Annotated[int, typer.Option(min=1, max=366, help="Days until the key ends.")] = 90,
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Let a key that its principal made outlive the key that it was made with. Its principal cannot do this itself."""
    if source.plane.server is not None:
        body = {"name": of, "prefix": prefix, "days": days}
        with control_plane(source) as connection:
            found = connection.post("/v1/principals:keep-key", body)["items"]
    else:
        with local_book(source) as (book, by, _):
            book.keep_key(prefix, principal=of, days=days, by=by)
            found = [key._asdict() for key in book.keys(of)]
    _print_keys(found, as_json)


def _place(name: str) -> str:
    return f"/v1/principals/{quote(name, safe='')}/keys"


def _revoke_there(
    connection: ControlPlaneConnection, prefix: str | None, of: str | None, allow_last: bool
) -> None:
    if of is None:
        connection.request("DELETE", f"/v1/keys/{prefix}", params={"allow_last": str(allow_last).lower()})
        return
    named = {} if prefix is None else {"prefix": prefix}
    connection.post("/v1/principals:revoke-keys", {"name": of, "allow_last": allow_last, **named})


def _print_keys(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    table = make_table(
        "", "prefix", "issued", "ends", "last used", "revoked", "bound to", "ends with", left=7
    )
    for key in found:
        days = [
            readable(key[at], TO_THE_MINUTE, none="")
            for at in ("issued_us", "expires_us", "used_us", "revoked_us")
        ]
        ends_with = ", ".join(filter(None, (key["made_with"], "a session" if key["in_session"] else "")))
        table.add_row(key["prefix"], *days, key["certificate"] or "", ends_with)
    stdout().print(table)
    say_unread(found)


add_to_group(keys, "apikey")
