"""`kvcustody apikey`: principals' keys, in the ledger itself or at a server with `--server`.

1. A new key is printed once, on stdout, and kept nowhere.
2. Against a server everybody replaces and revokes their own keys, a bootstrap key issues them, a key custodian's
   revokes and keeps those of others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcustody.console.api.client import done
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.opening import connect
from kvcustody.console.options import ActKey, ActSource, Authority, ControlPlane, KeyFile
from kvcustody.console.plugins import add_to_group
from kvcustody.console.principal.print_principals import print_keys
from kvcustody.console.principal.shared import (
    AllowLast,
    Bound,
    Days,
    Name,
    bound_to,
    print_key,
)
from kvcustody.errors import ConfigError
from kvcustody.governance.service.operations.parameter_groups import grouped

keys = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Issue, replace, list and revoke API keys: of principals, and of an engine's tenants.",
    epilog="Keys expire; `kvcustody apikey issue --replace` issues a new one and lets the old ones end.",
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
        int, typer.Option(min=0, max=30, help="With --replace: days that the other keys still work.")
    ] = 1,
    certificate: Bound = None,
    *,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Issue a key to a principal, and print it. It is shown once.

    With --replace it is bound to the certificate that the key before was bound to, unless --certificate names another.
    """
    bound = bound_to(certificate)
    issued = done(
        "issueKey",
        source,
        name=name,
        days=days,
        certificate=bound,
        overlap_days=overlap_days if replace else None,
    )
    print_key(issued, as_json)


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
    key: ActKey = None,
    as_json: Json = False,
) -> None:
    """Replace your own key: prints a new one, and lets the old ones end after the overlap.

    A key that is bound to a client certificate is replaced over the workers' address, by one that is bound to the same.
    """
    body = {"days": days, "overlap_days": overlap_days, "bind": bind}
    plane = ControlPlane(server=server, key_file=key_file, authority=authority)
    with connect(plane, client_certificate, client_key) as connection:
        print_key(connection.post("/v1/keys:rotate", body, key=key), as_json)


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
        typer.Option(help="The key's principal; default: the one with this PREFIX.", metavar="NAME"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every key of the principal, and its sessions.")] = False,
    allow_last: AllowLast = False,
    *,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Refuse a key from now on, or all keys of a principal. `apikey revoke-own` refuses one of your own."""
    if every == (prefix is not None) or (every and of is None):
        raise ConfigError("give the PREFIX of one key, or --all --of NAME")
    whose = done("revokeKeys", source, name=of, prefix=prefix, allow_last=allow_last)["principal"]
    if as_json:
        print_json({"principal": whose, "prefix": prefix, "revoked": True})
    else:
        say(f"revoked: {prefix or 'every key'} of {whose}")


@keys.command(
    epilog="Examples:\n\n    kvcustody apikey keep 0f1e2d3c4b5a --of alice\n\n"
    "    kvcustody apikey keep 0f1e2d3c4b5a --of alice --server https://kv.example --api-key-file custodian.key"
)
@grouped
def keep(
    prefix: Annotated[str, typer.Argument(help="The key's public prefix: its 12 digits.", metavar="PREFIX")],
    of: Annotated[str, typer.Option(help="Whose key it is.", metavar="NAME")],
    days: Annotated[int, typer.Option(min=1, max=366, help="Days until the key expires.")] = 90,
    *,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Let a key that its principal made outlive the key that it was made with. Its principal cannot do this itself."""
    found = done("keepKey", source, name=of, prefix=prefix, days=days)
    if as_json:
        print_json(found)
    else:
        print_keys(found)


add_to_group(keys, "apikey")
