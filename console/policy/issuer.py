"""`kvcustody policy assign-issuer`: whose tenants a ledger names, as a person says it.

A worker behind a control plane asks it to; one with a ledger of its own writes it where the database lets it. On
PostgreSQL the role `kvcustody_worker` writes no order, so a person assigns each issuer first.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvcustody.audit.events import BARE, QUALIFIED, IssuerAssigned
from kvcustody.audit.query.issuers import known_issuers
from kvcustody.audit.writer.record_operator_act import record_operator_act
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.opening import writing
from kvcustody.console.options import DEFAULT, Ledger
from kvcustody.errors import ConfigError
from kvcustody.governance.identity.principal import check_identifier

_EXAMPLES = (
    "Examples:\n\n    kvcustody policy assign-issuer https://idp.example --bare --actor olga\n\n"
    "    kvcustody policy assign-issuer https://partner.example --actor olga"
)


def add_to(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(name="assign-issuer", epilog=_EXAMPLES)(assign_command)


def assign_command(
    issuer: Annotated[str, typer.Argument(help="The issuer, as its tokens call it.", metavar="ISSUER")],
    actor: Annotated[str, typer.Option(help="Who assigns it, for the record.")],
    ledger: Ledger = DEFAULT,
    *,
    bare: Annotated[
        bool,
        typer.Option("--bare", help="The ledger's first issuer: ids that stand alone are its own, for good."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Put an issuer of tenants on record, for workers that write the ledger themselves and may write no order.

    The first issuer of a ledger owns the bare ids; names of every other one's tenants end with `^` and the issuer. With
    `KVCUSTODY_POLICY_TRUST` the order is signed by the key at `KVCUSTODY_ORDER_KEY_PATH`.
    """
    check_identifier("issuer", issuer)
    with writing(ledger) as engine:
        with engine.connect() as connection:
            known = known_issuers(connection)
        if not known.knows(issuer):
            if bare and known.home:
                raise ConfigError(
                    f"`{issuer}`: the bare ids of this ledger are `{known.home}`'s for good; leave `--bare` out"
                )
            if not bare and not known.home:
                raise ConfigError(
                    f"`{issuer}`: this ledger's bare ids have no issuer yet; assign that one first, with `--bare`"
                )
            tenants = BARE if bare else QUALIFIED
            record_operator_act(engine, lambda at_us: IssuerAssigned(at_us, issuer, tenants, actor))
        with engine.connect() as connection:
            issuers = known_issuers(connection).all
    if as_json:
        print_json({"issuers": list(issuers)})
    else:
        say(f"issuers of this ledger: {', '.join(issuers)}")
