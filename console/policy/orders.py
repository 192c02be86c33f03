"""Orders that a person writes into a ledger: whose tenants it names, and signatures of orders from before.

`assign-issuer`: a worker behind a control plane has it assign issuers; one with a ledger of its own assigns them where
the database lets it. On PostgreSQL the role `kvcustody_worker` writes no order, so a person assigns each issuer first.

`sign-orders`: each signature is a leaf of its own, `order-signed`, that names the order's leaf. The order then counts
as it stands and from its own time, so one that was superseded or answered changes nothing.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvcustody.audit.database.signed_orders import orders_of
from kvcustody.audit.events import BARE, QUALIFIED, Event, IssuerAssigned, OrderSigned
from kvcustody.audit.processes.orders import UnsignedOrder, orders_to_sign, unsigned_orders
from kvcustody.audit.query.issuers import known_issuers
from kvcustody.audit.writer.record_operator_act import record_operator_act, record_operator_acts
from kvcustody.console.command import Json, Yes, make_table, print_json, say, stdout
from kvcustody.console.opening import writing
from kvcustody.console.options import DEFAULT, Ledger
from kvcustody.errors import ConfigError
from kvcustody.governance.identity.principal import check_identifier
from kvcustody.plurals import several
from kvcustody.times import iso

_ASSIGN = (
    "Examples:\n\n    kvcustody policy assign-issuer https://idp.example --bare --actor olga\n\n"
    "    kvcustody policy assign-issuer https://partner.example --actor olga"
)
_SIGN = (
    "Examples:\n\n    kvcustody policy sign-orders --actor olga\n\n"
    "    kvcustody policy sign-orders --actor olga --reason 'orders are signed from today' --order system/12 --yes"
)


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="assign-issuer", epilog=_ASSIGN)(assign_command)
    app.command(name="sign-orders", epilog=_SIGN)(sign_orders_command)


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


def sign_orders_command(
    actor: Annotated[str, typer.Option(help="Who signs, for the record.")],
    ledger: Ledger = DEFAULT,
    reason: Annotated[str, typer.Option(help="Why, for the record.")] = "orders are signed from here on",
    order: Annotated[
        list[str] | None,
        typer.Option(
            help="Sign this order alone, as `LOG/NUMBER`; may be given again.", metavar="LOG/NUMBER"
        ),
    ] = None,
    *,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """List the orders on record that nobody follows because they are not signed; with `--yes`, sign them.

    The key at `KVCUSTODY_ORDER_KEY_PATH` signs: `KVCUSTODY_POLICY_TRUST` names it with the role `orders`. Look at each
    order first, and name those that you mean with `--order` where somebody else may have written one of them. A signed
    order counts from its own time, as it stands. Orders with a wrong signature are listed, and are never signed.
    """
    with writing(ledger) as engine:
        if orders_of(engine) is None:
            raise ConfigError("orders are not signed here: set KVCUSTODY_POLICY_TRUST")
        with engine.connect() as connection:
            listed = _chosen(orders_to_sign(connection), order)
        if yes and listed:
            record_operator_acts(
                engine, lambda at_us: [order_signature(one, at_us, actor, reason) for one in listed]
            )
        with engine.connect() as connection:
            left = [str(refused) for refused in unsigned_orders(connection)]
    if as_json:
        print_json({"orders": [one._asdict() for one in listed], "signed": yes, "not_followed": left})
        return
    table = make_table("", "order", "kind", "at", "actor", left=4)
    for one in listed:
        table.add_row(f"{one.log}/{one.idx}", one.kind, iso(one.at_us), one.actor)
    stdout().print(table)
    orders = several(len(listed), "order")
    say(f"{orders} signed" if yes else f"{orders} without a signature: `--yes` signs them")
    for why in left if yes else ():
        say(why)


def _chosen(unsigned: list[UnsignedOrder], places: list[str] | None) -> list[UnsignedOrder]:
    """Those that were named; all where none was. Raises `ConfigError` for a place without such an order."""
    by_place = {f"{one.log}/{one.idx}": one for one in unsigned}
    for place in places or ():
        if place not in by_place:
            raise ConfigError(f"`{place}`: there is no unsigned order at this place")
    return unsigned if places is None else [by_place[place] for place in dict.fromkeys(places)]


def order_signature(order: UnsignedOrder, at_us: int, actor: str, reason: str) -> Event:
    """What is put on record of an order that `actor` signs."""
    return OrderSigned(at_us, order.tenant, order.kind, order.idx, order.digest, actor, reason)
