"""Keys that sign orders, and a ledger whose orders are signed by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine

from kvcustody.audit.evidence.cases.restrictions import restrictions_in_force
from kvcustody.audit.evidence.processes.enforcement import newest_order, order_at
from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.evidence.query.key_orders import key_orders
from kvcustody.audit.kinds import (
    BARE,
    CaseOpened,
    CaseStepped,
    EnforcementOrdered,
    Event,
    IssuerAssigned,
    KeysOrdered,
    LegalHoldChanged,
)
from kvcustody.audit.store.database.signed_orders import ORDERS_OPTION, OwnKey, SignedOrders
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import Clock
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import Selector
from kvcustody.policies.bundle.trust import KeyRole, TrustedKey
from standins import builders

OLGA, ONE, EVE = map(SigningKey.generate, ("olga", "one", "eve"))
TRUSTED = {key.name: TrustedKey(key.name, key.verifier.public, frozenset({KeyRole.ORDERS})) for key in (OLGA, ONE)}


class AnyKey(SignedOrders):
    """Orders of a process that signs with whatever key it has, trusted or not."""

    @property
    def may_sign(self) -> bool:
        return self._own is not None


def orders(key: SigningKey | None = None, *, name: str = "", ledger: str = "example.com/ledger") -> SignedOrders:
    """The orders of a deployment that trusts Olga and the worker `one`; this process signs with `key`, under a name."""
    own = None if key is None else OwnKey(name or key.name, key.raw)
    return AnyKey("prod", ledger, lambda: TRUSTED, own)


def opened_as(store: Engine, signed: SignedOrders | None) -> Engine:
    """The same ledger as a process has it that signs its orders so, and believes these alone."""
    return store.execution_options(**{ORDERS_OPTION: signed})


def put(store: Engine, folder: Path, clock: Clock, make: Callable[[int], Event], signed: SignedOrders | None) -> None:
    """An order on record, as a process that signs so writes it."""
    writer = builders.writer(opened_as(store, signed), folder / "desk", worker="desk", clock=clock)
    writer.submit_durable(make(clock.now_us()))
    writer.close()


def monitor(at_us: int) -> Event:
    return EnforcementOrdered(at_us, "monitor", (), 0, "ab" * 16, 1 << 40, "olga", "test")


def enforce(at_us: int) -> Event:
    return EnforcementOrdered(at_us, "enforce", (), 0, "ab" * 16, 0, "olga", "back")


def erase_alpha(at_us: int) -> Event:
    return request_event(Selector("alpha"), "e-1", "olga", at_us + 60_000_000, at_us)


class Read(NamedTuple):
    """An order of one kind, and what a reader makes of those on record."""

    orders: tuple[Callable[[int], Event], ...]
    read: Callable[[Connection], Any]


def case_opened(at_us: int) -> Event:
    return CaseOpened(at_us, "case-1", "acme", "ada", "restriction", "mail", at_us, "UTC", (), "dora")


def case_step(step: str, **more: str) -> Callable[[int], Event]:
    words = {"outcome": "", "ground": "", "about": "", "reason": "", "digest": ""} | more
    return lambda at_us: CaseStepped(at_us, "case-1", "acme", step, actor="dora", **words)


def hold(action: str) -> Callable[[int], Event]:
    return lambda at_us: LegalHoldChanged(at_us, "h-1", "acme", action, "test", "dora")


READERS: dict[str, Read] = {
    "enforcement": Read((monitor,), newest_order),
    "one order on enforcement": Read(
        (monitor,), lambda connection: order_at(connection, 0) or newest_order(connection)
    ),
    "keys": Read((lambda at_us: KeysOrdered(at_us, "acme", "destroy", "olga", "test"),), key_orders),
    "issuers": Read((lambda at_us: IssuerAssigned(at_us, "evil", BARE, "olga"),), lambda c: known_issuers(c).home),
    "a restriction": Read((case_opened, case_step("restrict", ground="18(1)(a)")), restrictions_in_force),
}


def without_rules(connection: Connection) -> None:
    """Without the triggers and keys that keep leaves as they are: who forges here has the file, or owns the tables."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET session_replication_role = replica")
        return
    names = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'trigger'").scalars().all()
    for name in names:
        connection.exec_driver_sql(f"DROP TRIGGER {name}")
    connection.exec_driver_sql("DROP INDEX IF EXISTS ix_events_incarnation_sequence")
