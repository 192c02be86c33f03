"""`kvcustody principal`: who may ask a control plane; on the ledger itself, or against a server with `--server`.

1. Against a server a bootstrap key enrols and enables, a key custodian's disables; on the ledger's own machine
   whoever may write the ledger does all of it.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvcustody.console.api.asking import listed
from kvcustody.console.command import Json, make_table, print_json, say, stdout
from kvcustody.console.opening import control_plane
from kvcustody.console.options import ServiceSource
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
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.answers.principals import LIST_PRINCIPALS, shown
from kvcustody.governance.service.operations.parameter_groups import grouped

principals = typer.Typer(
    no_args_is_help=True,
    help="Enrol, list, disable and enable the people and machines that may ask a control plane.",
    epilog="Roles and what each may do: docs/operate/service.md. Nobody is both author and approver.",
)


@principals.command(
    epilog="Examples:\n\n    kvcustody principal add alice --role auditor\n\n"
    "    kvcustody principal add acme-dpo --role tenant-admin --tenant acme\n\n"
    "    kvcustody principal add gpu-0 --role worker --server unix:/run/kvcustody/api.sock --api-key-file boot.key"
)
@grouped
def add(
    name: Name,
    role: Annotated[list[Role], typer.Option("--role", help="A role; may be repeated.")],
    tenant: Annotated[str | None, typer.Option(help="The tenant of a tenant-viewer or tenant-admin.")] = None,
    machine: Annotated[bool, typer.Option("--machine", help="Not a person.")] = False,
    days: Days = None,
    certificate: Bound = None,
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Enrol a principal and print its first key. The key is shown once."""
    kind = "machine" if machine else "person"
    bound = bound_to(certificate)
    if bound is not None and Role.WORKER not in role:
        raise ConfigError("--certificate: a key is bound to a certificate for a worker alone")
    if source.plane.server is not None:
        body = {"name": name, "roles": role, "tenant": tenant, "kind": kind, "key_days": days}
        body["certificate"] = bound
        with control_plane(source) as connection:
            made = connection.post(
                "/v1/principals", {key: value for key, value in body.items() if value is not None}
            )
        print_key(made["key"], as_json)
        return
    with local_book(source) as (book, by, settings):
        book.enrol(name, role, tenant=tenant, kind=kind, by=by)
        made = book.issue_key(name, days=days or settings.key_days, certificate=bound, by=by)
        print_key(made._asdict(), as_json)


@principals.command("list", epilog="Example: `kvcustody principal list --json`")
@grouped
def list_principals(
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """List everybody who was ever enrolled, in the order of names."""
    found = listed(LIST_PRINCIPALS, source)
    if as_json:
        print_json(found)
        return
    table = make_table("", "principal", "kind", "roles", "tenant", "state", left=5)
    for row in found:
        state = "enrolled" if row["disabled_us"] is None else "disabled"
        table.add_row(row["name"], row["kind"], ", ".join(row["roles"]), row["tenant"] or "", state)
    stdout().print(table)
    say_unread(found)


@principals.command(
    epilog="Examples:\n\n    kvcustody principal disable alice\n\n"
    "    kvcustody principal disable corp:alice --server https://kv.example --api-key-file custodian.key"
)
@grouped
def disable(
    name: Name,
    allow_last: AllowLast = False,
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """End a principal, all of its keys and all of its sessions at once. Its name is not given again.

    `ISSUER:NAME` is one whom an issuer of tokens keeps: its tokens count no more. --server takes a key custodian.
    """
    if source.plane.server is not None:
        with control_plane(source) as connection:
            found = connection.post("/v1/principals:disable", {"name": name, "allow_last": allow_last})
    else:
        with local_book(source) as (book, by, _):
            found = shown(book.disable(name, allow_last=allow_last, by=by))
    _tell(found, f"disabled: {name}", as_json)


@principals.command(epilog="Example: `kvcustody principal enable alice`")
@grouped
def enable(
    name: Name,
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Let a principal ask again that was disabled. No key or session from before works: issue it a new key."""
    if source.plane.server is not None:
        with control_plane(source) as connection:
            found = connection.post("/v1/principals:enable", {"name": name})
    else:
        with local_book(source) as (book, by, _):
            found = shown(book.enable(name, by=by))
    _tell(found, f"enabled: {name}; it has no key until one is issued", as_json)


def _tell(found: dict[str, Any], says: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        say(says)
