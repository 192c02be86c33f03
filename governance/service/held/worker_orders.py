"""A worker's orders: erasures that it owes an answer for, key orders, enforcement and restrictions.

1. Where there is nothing, that is known from `OrdersSeen` alone, and no leaf is read. What there is, is read anew for
   each answer: a person whose name was destroyed since is not named from memory.
2. An erasure that a worker does not follow is still looked at each time: whom it trusts may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection

from kvcustody.audit.evidence.erasure.requests_and_answers import (
    Requested,
    completed,
    names,
    to_follow,
    unanswered,
)
from kvcustody.audit.evidence.processes.enforcement import newest_order
from kvcustody.audit.evidence.processes.remembered_lives import RememberedLives
from kvcustody.audit.evidence.query.key_orders import key_orders
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.governance.restriction.orders import restricted_now
from kvcustody.governance.service.held.what_changed import OrdersSeen, read_orders_seen

_KEY_ORDER = ("order", "tenant", "action", "at_us")


class WorkerOrders:
    """The orders of one ledger; thread-safe. `reading` gives a connection that sees the system log."""

    def __init__(
        self,
        reading: Callable[[], AbstractContextManager[Connection]],
        lives: RememberedLives,
        subject_keys: SubjectKeys | None,
    ) -> None:
        self._reading = reading
        self._lives = lives
        self._subject_keys = subject_keys
        self._owes_nothing: dict[str, tuple[int, int, int]] = {}  # by worker: erasures, answers and processes then

    def owed(self, worker: str) -> dict[str, Any]:
        """Return a worker's orders, with the erasures that it owes an answer for."""
        with self._reading() as connection:
            seen = read_orders_seen(connection)
            found = self._owed(connection, worker, seen) if seen.erasures else ()
            return self._told(connection, seen, found)

    def completed(self, worker: str) -> dict[str, Any]:
        """Return the same, with the erasures of a subject or tenant that it completed."""
        with self._reading() as connection:
            found = completed(connection, self._lives.of_worker(connection, worker))
            return self._told(connection, read_orders_seen(connection), found)

    def _owed(self, connection: Connection, worker: str, seen: OrdersSeen) -> Sequence[Requested]:
        lives = self._lives.of_worker(connection, worker)
        now = seen.erasures, seen.erasure_results, len(lives)
        if self._owes_nothing.get(worker) == now:
            return ()
        found = unanswered(connection, lives)
        if not found:
            self._owes_nothing[worker] = now
        return to_follow(connection, found)

    def _told(self, connection: Connection, seen: OrdersSeen, erasures: Iterable[Requested]) -> dict[str, Any]:
        keys = {(one.tenant, one.action): one for one in key_orders(connection)} if seen.key_orders else {}
        enforced = newest_order(connection) if seen.enforcement_orders else None
        restricted = restricted_now(connection, self._subject_keys).orders if seen.case_steps else ()
        return {
            "items": [self._named(connection, one) for one in erasures],
            "keys": [{name: getattr(one, name) for name in _KEY_ORDER} for one in keys.values()],
            "enforcement": None if enforced is None else enforced._asdict(),
            "restrictions": [one._asdict() for one in sorted(restricted)],
        }

    def _named(self, connection: Connection, asked: Requested) -> dict[str, Any]:
        who = names(connection, asked, self._subject_keys)
        return asked._asdict() | {
            "named": who is not None,
            "subject_name": who and who.subject,
            "session_name": who and who.session,
        }
