"""`kvcustody principal`: the principals of a control plane, in the ledger itself or at a server with `--server`.

1. Against a server a bootstrap key enrols and enables, a key custodian's disables; on the ledger's own machine
   whoever may write the ledger does all of it.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvcustody.console.api.client import done
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.options import ActSource
from kvcustody.console.principal.shared import (
    AllowLast,
    Bound,
    Days,
    Name,
    bound_to,
    print_key,
)
from kvcustody.errors import ConfigError
from kvcustody.governance.service.access.roles import PROCESSES, Role
from kvcustody.governance.service.operations.parameter_groups import grouped

principals = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Enrol, list, disable and enable the people and machines that may use a control plane.",
    epilog="Roles and their rights: docs/reference/roles.md. No one is both author and approver.",
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
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Enrol a principal and print its first key. The key is shown once."""
    kind = "machine" if machine else "person"
    bound = bound_to(certificate)
    if bound is not None and not PROCESSES.intersection(role):
        raise ConfigError("--certificate: only workers' and doors' keys are bound to certificates")
    principal = done(
        "enrolPrincipal",
        source,
        name=name,
        roles=[one.value for one in role],
        tenant=tenant,
        kind=kind,
        key_days=days,
        certificate=bound,
    )
    print_key(principal["key"], as_json)


@principals.command(
    epilog="Examples:\n\n    kvcustody principal disable alice\n\n"
    "    kvcustody principal disable corp:alice --server https://kv.example --api-key-file custodian.key"
)
@grouped
def disable(
    name: Name,
    allow_last: AllowLast = False,
    *,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """End a principal, all of its keys and all of its sessions at once. Its name is not given again.

    `ISSUER:NAME` is one whom an issuer of tokens keeps: its tokens count no more. --server takes a key custodian.
    """
    found = done("disablePrincipal", source, name=name, allow_last=allow_last)
    _tell(found, f"disabled: {name}", as_json)


@principals.command(epilog="Example: `kvcustody principal enable alice`")
@grouped
def enable(
    name: Name,
    *,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Let a principal ask again that was disabled. No key or session from before works: issue it a new key."""
    found = done("enablePrincipal", source, name=name)
    _tell(found, f"enabled: {name}; it has no key until one is issued", as_json)


def _tell(found: dict[str, Any], says: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        say(says)
