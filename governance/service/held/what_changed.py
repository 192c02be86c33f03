"""Whether a ledger has news for waiting workers: one statement, whose cost grows with the orders.

    before = read_orders_seen(connection)
    ...
    if read_orders_seen(connection) != before:   # somebody may have to be told

1. What another process wrote is seen, whichever it was: no writer takes part in this, and none is held up by it.
2. Counts and newest places stand for rows: rows of these tables are added, and marked as ended, but not replaced.
3. Ends of keys are added up in seconds and the rest apart: SQLite refuses a sum that 64 bits do not hold.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Column, ColumnElement, Connection, ScalarSelect, Table, func, select

from kvcustody.audit.evidence.processes.enforcement import ORDERED
from kvcustody.audit.evidence.query.key_orders import KEYS_ORDERED
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import case_steps, erasure_results, erasures
from kvcustody.audit.store.schema.ledger import events, subject_unlinkings
from kvcustody.audit.store.schema.releases import policy_release
from kvcustody.audit.store.schema.service import (
    erase_epochs,
    service_keys,
    service_principals,
    service_scan_orders,
)
from kvcustody.clock import MICROSECONDS

_VERSIONS = 1 << 20  # of a principal: an odd row, however large, ends no sum


class CredentialsSeen(NamedTuple):
    """A value that changes when a key is added, revoked or shortened, or a principal changes."""

    keys: int
    revoked_keys: int
    ends_us: int
    principals: int


class OrdersSeen(NamedTuple):
    """The amount of everything that workers are sent, and of everything that ends a credential."""

    erasures: int
    erasure_results: int
    case_steps: int
    key_orders: int
    enforcement_orders: int
    release_steps: int
    epochs: int
    oldest_epoch: int
    scan_orders: int
    newest_scan_order_us: int
    credentials: CredentialsSeen
    unlinkings: int  # of subjects


def _rows(table: Table, *where: ColumnElement[bool]) -> ScalarSelect[int]:
    return select(func.count()).select_from(table).where(*where).scalar_subquery()


def _most(column: Column[int]) -> ScalarSelect[int]:
    return select(func.coalesce(func.max(column), 0)).scalar_subquery()


def _sum(column: ColumnElement[int]) -> ScalarSelect[int]:
    return select(func.coalesce(func.sum(column), 0)).scalar_subquery()


_SEEN = select(
    _rows(erasures, has_leaf(erasures)),
    _rows(erasure_results, has_leaf(erasure_results)),
    _rows(case_steps, has_leaf(case_steps)),
    _rows(events, events.c.kind == KEYS_ORDERED, has_leaf(events)),
    _rows(events, events.c.kind == ORDERED, has_leaf(events)),
    _most(policy_release.c.number),
    _most(erase_epochs.c.number),
    select(func.coalesce(func.min(erase_epochs.c.number), 0)).scalar_subquery(),
    _rows(service_scan_orders),
    _most(service_scan_orders.c.at_us),
    _rows(service_keys),
    _rows(service_keys, service_keys.c.revoked_us.is_not(None)),
    _sum(service_keys.c.expires_us // MICROSECONDS),
    _sum(service_keys.c.expires_us % MICROSECONDS),
    _sum(service_principals.c.version % _VERSIONS),
    select(func.coalesce(func.max(subject_unlinkings.c.count), 0)).scalar_subquery(),
)


def read_orders_seen(connection: Connection) -> OrdersSeen:
    """Read both in one statement."""
    *orders, keys, revoked, ends_s, ends_us, principals, unlinked = connection.execute(_SEEN).one()
    ends_us = MICROSECONDS * int(ends_s) + int(ends_us)
    return OrdersSeen._make((*orders, CredentialsSeen(keys, revoked, ends_us, int(principals)), unlinked))
