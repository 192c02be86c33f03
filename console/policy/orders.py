"""Orders that a person writes into a ledger: issuers of tenants, and signatures of earlier orders.

`assign-issuer`: a worker behind a control plane has it assign issuers; one with a ledger of its own assigns them where
the database lets it. On PostgreSQL the role `kvcustody_worker` writes no order, so a person assigns each issuer first.

`sign-orders`: each signature is a leaf of its own, `order-signed`, that names the order's leaf. The order then counts
as it stands and from its own time, so one that was superseded or answered changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import typer

from kvcustody.audit.evidence.processes.orders import UnsignedOrder, orders_to_sign, unsigned_orders
from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.kinds import BARE, QUALIFIED, Event, IssuerAssigned, OrderSigned
from kvcustody.audit.store.database.signed_orders import orders_of
from kvcustody.audit.write.record_operator_act import record_operator_act, record_operator_acts
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
    "    kvcustody policy sign-orders --actor olga --kind legal-hold --author dora --yes\n\n"
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
        typer.Option("--bare", help="The ledger's first issuer, which owns bare ids permanently."),
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
                    f"`{issuer}`: the bare ids of this ledger are `{known.home}`'s permanently; omit `--bare`"
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
    reason: Annotated[str, typer.Option(help="Reason, for the record.")] = "orders are signed from here on",
    order: Annotated[
        list[str] | None,
        typer.Option(help="Choose this order, as `LOG/NUMBER`; may be given again.", metavar="LOG/NUMBER"),
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Choose orders of this kind; may be given again.")] = None,
    author: Annotated[
        list[str] | None,
        typer.Option(help="Choose orders that this actor gave, by their leaves; may be given again."),
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Choose every order on the list.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """List the orders on record that nobody follows because they are not signed; with `--yes`, sign those you choose.

    The key at `KVCUSTODY_ORDER_KEY_PATH` signs: `KVCUSTODY_POLICY_TRUST` names it with the role `orders`. Look at each
    order first: somebody else may have written one of them. Choose by `--order`, `--kind` and `--author`, or `--all`.
    A signed order counts from its own time, as it stands. Orders with a wrong signature are listed, and never signed.
    """
    with writing(ledger) as engine:
        signed = orders_of(engine)
        if signed is None:
            raise ConfigError("orders are not signed here: set KVCUSTODY_POLICY_TRUST")
        with engine.connect() as connection:
            listed = _chosen(orders_to_sign(connection), order, kind, author)
        if not as_json:
            _list_orders(listed)
        if yes and listed:
            if not (every or order or kind or author):
                raise ConfigError(
                    f"{several(len(listed), 'order')} of {_authors(listed)}: nothing is signed. Choose with `--order`, "
                    "`--kind` or `--author`, or give `--all`"
                )
            record_operator_acts(engine, lambda at_us: [order_signature(one, at_us, actor, reason) for one in listed])
        with engine.connect() as connection:
            left = [str(refused) for refused in unsigned_orders(connection)]
    if as_json:
        counts = [one._asdict() for one in _counts(listed)]
        orders = [one._asdict() for one in listed]
        print_json({"orders": orders, "counts": counts, "signed": yes, "not_followed": left})
        return
    orders_said = several(len(listed), "order")
    say(f"{orders_said} signed" if yes else f"{orders_said} without a signature, none signed: give `--yes`")
    for why in left if yes else ():
        say(why)


class OrderCount(NamedTuple):
    """The number of orders of a kind that one author gave."""

    kind: str
    author: str
    orders: int


def _counts(listed: Sequence[UnsignedOrder]) -> list[OrderCount]:
    counted = Counter((one.kind, one.actor) for one in listed)
    return [OrderCount(*named, number) for named, number in sorted(counted.items())]


def _authors(listed: Sequence[UnsignedOrder]) -> str:
    return ", ".join(f"`{name}`" for name in sorted({one.actor for one in listed}))


def _list_orders(listed: Sequence[UnsignedOrder]) -> None:
    """Print each order, and the number by kind and author, before anything is signed."""
    table = make_table("", "order", "kind", "at", "author", left=4)
    for one in listed:
        table.add_row(f"{one.log}/{one.idx}", one.kind, iso(one.at_us), one.actor)
    stdout().print(table)
    for each in _counts(listed):
        say(f"{each.kind} by {each.author}: {each.orders:,}")


def _chosen(
    unsigned: list[UnsignedOrder],
    places: list[str] | None,
    kinds: list[str] | None,
    authors: list[str] | None,
) -> list[UnsignedOrder]:
    """Return the orders that match every given choice.

    Raises:
        ConfigError: a place, kind or author has no such order.
    """
    chosen = unsigned
    choices: tuple[tuple[list[str] | None, str, Callable[[UnsignedOrder], str]], ...] = (
        (places, "at this place", lambda one: f"{one.log}/{one.idx}"),
        (kinds, "of this kind", lambda one: one.kind),
        (authors, "by this author", lambda one: one.actor),
    )
    for wanted, where, name_of in choices:
        known = {name_of(one) for one in unsigned}
        for name in wanted or ():
            if name not in known:
                raise ConfigError(f"`{name}`: there is no unsigned order {where}")
        chosen = [one for one in chosen if not wanted or name_of(one) in wanted]
    return chosen


def order_signature(order: UnsignedOrder, at_us: int, actor: str, reason: str) -> Event:
    """Return the record of an order that `actor` signs."""
    return OrderSigned(at_us, order.tenant, order.kind, order.idx, order.digest, actor, reason)
