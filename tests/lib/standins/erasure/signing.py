"""Keys that sign orders, and a ledger whose orders are signed by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Engine

from kvcustody.audit.database.signed_orders import ORDERS_OPTION, OwnKey, SignedOrders
from kvcustody.audit.events import Event
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import Clock
from kvcustody.policies.bundle.trust import KeyRole, TrustedKey
from standins import builders

OLGA, ONE, EVE = map(SigningKey.generate, ("olga", "one", "eve"))
TRUSTED = {
    key.name: TrustedKey(key.name, key.verifier.public, frozenset({KeyRole.ORDERS})) for key in (OLGA, ONE)
}


def orders(
    key: SigningKey | None = None, *, name: str = "", ledger: str = "example.com/ledger"
) -> SignedOrders:
    """The orders of a deployment that trusts Olga and the worker `one`; this process signs with `key`, under a name."""
    own = None if key is None else OwnKey(name or key.name, key.raw)
    return SignedOrders("prod", ledger, TRUSTED, own)


def opened_as(store: Engine, signed: SignedOrders | None) -> Engine:
    """The same ledger as a process has it that signs its orders so, and believes these alone."""
    return store.execution_options(**{ORDERS_OPTION: signed})


def put(
    store: Engine, folder: Path, clock: Clock, make: Callable[[int], Event], signed: SignedOrders | None
) -> None:
    """An order on record, as a process that signs so writes it."""
    writer = builders.writer(opened_as(store, signed), folder / "desk", worker="desk", clock=clock)
    writer.submit_durable(make(clock.now_us()))
    writer.close()
