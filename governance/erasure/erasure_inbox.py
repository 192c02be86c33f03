"""A worker's inbox: reads erasures, key orders, enforcement orders and restrictions from the ledger, and has its facade
carry them out.

- Before the first request of a process, everything that its worker still owes an answer for is taken up again: what
  was requested while it was away, and what a crash interrupted.
- Looking never runs on the thread that owns the state, and a ledger that cannot be read is read again later.
- An erasure whose subject nobody can name any more, or that cannot be read, is answered by no process: it is logged,
  and stays partial; the others are carried out. Where orders cannot be read, those from before stay in force, and a
  thread that cannot read them again and again closes admission (`guarding_thread`).
- Where orders are signed (`signed_orders`), one that no trusted key signed is followed by nobody. It is
  logged, and found.
- Orders on keys are followed on the owning thread, all of them whenever there is a new one: nothing changes where
  they were followed before. Of orders on enforcement the newest counts; of restrictions those in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.evidence.erasure.requests_and_answers import (
    Requested,
    SelectorNames,
    completed,
    lives_of,
    names,
    pending,
)
from kvcustody.audit.evidence.processes.enforcement import newest_order
from kvcustody.audit.evidence.query.key_orders import key_orders
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.store.database.signed_orders import RefusedOrder, SignedOrders
from kvcustody.errors import CustodyError, ServiceError
from kvcustody.governance.erasure.erasure_run import ErasureResult, ErasureRunner
from kvcustody.governance.erasure.selector import Selector, selector_of
from kvcustody.governance.erasure.tier_protocol import CompletedErasure
from kvcustody.governance.keys.apply_key_orders import OrderedKeys, newest
from kvcustody.governance.monitoring.enforcement import Enforcement
from kvcustody.governance.monitoring.ordering import followed
from kvcustody.governance.restriction.orders import restricted_now
from kvcustody.governance.restriction.restricted_subjects import NOBODY_RESTRICTED, RestrictedSubjects
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger

T = TypeVar("T")
_log = get_logger(__name__)


class ErasureTarget(Protocol):
    """A `Governor` or an `EnginePort`."""

    erasures: ErasureRunner

    def erase(self, selector: Selector, **order: Any) -> ErasureResult:
        """Erase now."""

    def follow_keys(self, orders: Iterable[OrderedKeys]) -> int:
        """Rotate and destroy keys as ordered."""

    def end_keys_in_service(self) -> None:
        """Have the key service destroy the keys of destroyed epochs; never on the owning thread."""

    def order_enforcement(self, ordered: Enforcement) -> None:
        """Enforce for the ordered tenants, and monitor the others."""

    def restrict(self, ordered: RestrictedSubjects) -> None:
        """Stop using these subjects' blocks."""

    def renew_custody(self, source: str, until_us: int) -> None:
        """Note that a source of erasures was heard, in boot time."""

    def call(self, command: Any) -> Future[Any]:
        """Run a command on the owning thread."""


Named = tuple[Requested, SelectorNames | None]
"""An erasure, and who is meant, where somebody can still say."""


class HeardOrders(NamedTuple):
    """The result of a look: owed erasures, and orders."""

    owed: list[Named]
    keys: tuple[OrderedKeys, ...]  # the last on each tenant's
    enforcement: Enforcement | None  # None: nobody gave an order
    restricted: RestrictedSubjects


class ErasureInbox:
    """Looks for erasures that `worker` owes an answer for. `offset_us`: UTC minus boot time of this process."""

    def __init__(
        self,
        engine: Engine | None,
        worker: str,
        offset_us: int,
        keys: SubjectKeys | None = None,
        *,
        orders: SignedOrders | None = None,
        on_refused: Callable[[RefusedOrder], object] = lambda refused: None,
    ) -> None:
        """`engine` None: another source stands in for the ledger (`_heard`).

        `keys` say who is meant where the ledger has tags instead of names. `on_refused` hears once of each order that
        is not followed because none of the keys of `orders` signed it.
        """
        self._signed = orders
        self._on_refused = on_refused
        self._engine = engine
        self._keys = keys
        self._worker = worker
        self._offset_us = offset_us
        self._taken: set[str] = set()
        self._keys_asked: tuple[OrderedKeys, ...] = ()  # handed to the owning thread last
        self._keys_followed: Future[Any] | None = None
        self._enforcement_asked: Enforcement | None = None  # handed to the owning thread last
        self._enforcement_followed: Future[Any] | None = None
        self._restricted = NOBODY_RESTRICTED  # handed to the owning thread last
        self._last: HeardOrders | None = None
        self._odd: list[Exception] = []  # why parts of the last look could not be read
        self._stop = threading.Event()
        self._thread: GuardingThread | None = None

    def recover_pending(self, facade: ErasureTarget) -> int:
        """Carry out what is owed, on the owning thread; returns the number of new erasures."""
        heard = self._heard()
        orders = self._orders(heard)
        for selector, order in orders:
            facade.erase(selector, **order)
        self._keys_asked = heard.keys
        facade.follow_keys(heard.keys)
        self._hand_over_enforcement(facade, heard.enforcement)
        self._restricted = heard.restricted
        facade.restrict(heard.restricted)
        return len(orders)

    def completed(self) -> list[CompletedErasure]:
        """Return the erasures that this worker completed, whose older keys are all destroyed. Any thread.

        An erasure whose subject nobody can name any more is left out: nobody can say whose key it was.
        """
        assert self._engine is not None
        with self._engine.connect() as connection:
            erasures = completed(connection, lives_of(connection, self._worker))
            return completed_erasures((one, names(connection, one, self._keys)) for one in erasures)

    def look(self, facade: ErasureTarget) -> int:
        """Pass owed erasures to the owning thread's next step; returns the number of new ones. Any thread."""
        self._odd = []
        heard = self._heard()
        orders = self._orders(heard)
        for selector, order in orders:
            facade.call(_Command(selector, order))
        self._hand_over_keys(facade, heard.keys)
        self._hand_over_enforcement(facade, heard.enforcement)
        if heard.restricted.orders != self._restricted.orders:
            self._restricted = heard.restricted
            facade.call(_RestrictionCommand(heard.restricted))
        facade.end_keys_in_service()  # no other order waits for a key service
        if self._odd:
            raise self._odd[0]
        return len(orders)

    def _heard(self) -> HeardOrders:
        """What the ledger says now."""
        assert self._engine is not None
        with self._engine.connect() as connection:
            owed = []
            for requested in pending(connection, self._worker):
                try:
                    owed.append((requested, names(connection, requested, self._keys)))
                except (ValueError, TypeError, LookupError, CustodyError):
                    _log.error("an erasure cannot be read", erasure=requested.erasure, exc_info=True)
            self._last = last = HeardOrders(
                owed,
                self._part(lambda: _key_orders(connection), "keys", ()),
                self._part(lambda: _enforcement(connection), "enforcement", None),
                self._part(lambda: restricted_now(connection, self._keys), "restricted", NOBODY_RESTRICTED),
            )
        for refused in () if self._signed is None else self._signed.newly_refused():
            _log.error("an order is not followed", why=str(refused))
            self._on_refused(refused)
        return last

    def _part(self, read: Callable[[], T], name: str, before: T) -> T:
        """What is heard of one kind; where that cannot be read, what was heard last, and `before` at the start.

        The other kinds are followed all the same, and `look` raises once they are: a process starts, and its guarding
        thread closes admission while orders cannot be read.
        """
        try:
            return read()
        except (SQLAlchemyError, ServiceError):
            raise
        except Exception as problem:
            _log.error("orders cannot be read", orders=name, problem=type(problem).__name__)
            self._odd.append(problem)
            last: T = before if self._last is None else getattr(self._last, name)
            return last

    def _hand_over_enforcement(self, facade: ErasureTarget, order: Enforcement | None) -> None:
        """Hand over an order that is new, and once more one that could not be recorded."""
        last = self._enforcement_followed
        if order is None or (last is not None and not last.done()):
            return
        if order != self._enforcement_asked or (last is not None and last.exception() is not None):
            self._enforcement_asked = order
            self._enforcement_followed = facade.call(_EnforcementCommand(order))

    def _hand_over_keys(self, facade: ErasureTarget, orders: tuple[OrderedKeys, ...]) -> None:
        """Hand over orders on keys that are new, and once more those that failed."""
        last = self._keys_followed
        if last is not None and not last.done():
            return
        if orders != self._keys_asked or (last is not None and last.exception() is not None):
            self._keys_asked = orders
            self._keys_followed = facade.call(_KeyCommand(orders))

    def start(self, facade: ErasureTarget, every_seconds: float) -> None:
        """Look repeatedly on a thread of its own, until `stop`."""
        self._thread = GuardingThread(self._run, args=(facade, every_seconds), name="kvcustody-erasures")
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a second call changes nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, facade: ErasureTarget, every_seconds: float) -> None:
        while not self._stop.wait(every_seconds):
            try:
                self.look(facade)
            except (SQLAlchemyError, ServiceError) as problem:
                _log.warning("erasures cannot be read", problem=type(problem).__name__)

    def _orders(self, heard: HeardOrders) -> list[tuple[Selector, dict[str, Any]]]:
        """Those that are new."""
        orders = []
        for requested, known in heard.owed:
            if requested.erasure in self._taken:
                continue
            if known is None:
                _log.error("an erasure's subject cannot be named any more", erasure=requested.erasure)
                continue
            try:
                selector = selector_of(requested.tenant, known.subject, known.session, requested.detail)
            except (ValueError, TypeError, LookupError, CustodyError):
                _log.error("an erasure cannot be read", erasure=requested.erasure, exc_info=True)
                continue
            self._taken.add(requested.erasure)
            orders.append((selector, self._order(requested)))
        return orders

    def _order(self, requested: Requested) -> dict[str, Any]:
        return {
            "erasure": requested.erasure,
            "actor": requested.actor,
            "deadline_us": requested.deadline_us - self._offset_us,
            "before_us": requested.at_us - self._offset_us,
            "on_record": True,
        }


def completed_erasures(found: Iterable[Named]) -> list[CompletedErasure]:
    """Return the erasures whose selector is still known."""
    return [
        CompletedErasure(one.erasure, selector_of(one.tenant, known.subject, known.session, one.detail), one.at_us)
        for one, known in found
        if known is not None
    ]


class _Command:
    """An erasure as a command for the owning thread."""

    def __init__(self, selector: Selector, order: dict[str, Any]) -> None:
        self._selector = selector
        self._order = order

    def __call__(self, facade: ErasureTarget) -> ErasureResult:
        return facade.erase(self._selector, **self._order)


class _KeyCommand:
    """Orders on keys as a command for the owning thread."""

    def __init__(self, orders: tuple[OrderedKeys, ...]) -> None:
        self._orders = orders

    def __call__(self, facade: ErasureTarget) -> int:
        return facade.follow_keys(self._orders)


class _EnforcementCommand:
    """For whom is enforced, as a command for the owning thread."""

    def __init__(self, order: Enforcement) -> None:
        self._order = order

    def __call__(self, facade: ErasureTarget) -> None:
        facade.order_enforcement(self._order)


class _RestrictionCommand:
    """Whose processing is restricted, as a command for the owning thread."""

    def __init__(self, ordered: RestrictedSubjects) -> None:
        self._ordered = ordered

    def __call__(self, facade: ErasureTarget) -> None:
        facade.restrict(self._ordered)


def _key_orders(connection: Connection) -> tuple[OrderedKeys, ...]:
    return newest(OrderedKeys(order.tenant, order.action, order.at_us) for order in key_orders(connection))


def _enforcement(connection: Connection) -> Enforcement | None:
    ordered = newest_order(connection)
    return None if ordered is None else followed(ordered)
