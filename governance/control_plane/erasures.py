"""A worker's inbox of erasures and orders, over the API.

1. An order is sent to a worker until the worker has answered. An answer is a leaf in the worker's ledger. So an order
   that was lost or interrupted comes again, and one that was carried out does not.
2. The control plane holds the request open until there is something new, so an erasure arrives at once.
3. Where the control plane is unreachable at the start, there is nothing to carry out yet: a process begins with zeroed
   blocks.
4. Three more kinds of order come with the same answer. The answer is given at once if it has an order on keys or on
   enforcement that the worker has not named.
   - Orders on keys.
   - The enforcement order. A worker that has received none enforces for everybody.
   - Restrictions of processing: always all that are in force, so one that is not among them is lifted.
5. Restrictions are kept in a file, which is written as they are received, because copies in a file tier outlive a
   process. Where the control plane is unreachable at the start, the last ones received hold until it sends others. A
   worker whose file cannot be read does not start.
6. Each answer renews the custody lease, counted from when the request was sent, once the owning thread has what it
   names.
7. Destroyed keys may come back with a copy of their file. They are looked for by the erasures that the control plane
   lists as complete. This happens at the start, or once the control plane answers if it is unreachable then.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import orjson

from kvcustody.audit.evidence.erasure.requests_and_answers import Requested, SelectorNames
from kvcustody.audit.evidence.processes.enforcement import EnforcementOrder
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError, ServiceError
from kvcustody.files import write_file
from kvcustody.governance.control_plane.connection import ControlPlaneConnection, is_away
from kvcustody.governance.edge.custody_lease import ERASURES
from kvcustody.governance.erasure.erasure_inbox import (
    ErasureInbox,
    ErasureTarget,
    HeardOrders,
    Named,
    completed_erasures,
)
from kvcustody.governance.erasure.tier_protocol import CompletedErasure
from kvcustody.governance.keys.apply_key_orders import OrderedKeys, newest
from kvcustody.governance.monitoring.enforcement import Enforcement
from kvcustody.governance.monitoring.ordering import followed
from kvcustody.governance.restriction.orders import restricted_from
from kvcustody.governance.restriction.restricted_subjects import (
    NOBODY_RESTRICTED,
    RestrictedSubject,
    RestrictedSubjects,
)
from kvcustody.http_exchange import fact_of
from kvcustody.logger import get_logger

WAIT_SECONDS = 15
_END_SECONDS = 0.5
_log = get_logger(__name__)


class RemoteInbox(ErasureInbox):
    """The inbox of a worker whose ledger is behind a control plane. `offset_us`: UTC less boot time of this process."""

    def __init__(
        self,
        connection: ControlPlaneConnection,
        offset_us: int,
        kept_path: Path | None = None,
        *,
        clock: Clock,
        lease_seconds: float,
    ) -> None:
        """`kept_path`: the file of rule 5; without one nothing outlives the process."""
        super().__init__(None, "", offset_us)
        self._clock = clock
        self._lease_us = int(lease_seconds * MICROSECONDS)
        self._wait_seconds = min(WAIT_SECONDS, int(lease_seconds // 6))
        self._until_us = 0  # of the lease, by the last answer that was handed over
        self._renewal: Future[None] | None = None
        self._kept_path = kept_path
        self._kept_orders: frozenset[RestrictedSubject] | None = None  # in that file, as far as is known
        self._connection = connection
        self._key_answer: tuple[OrderedKeys, ...] = ()
        self._newest_key_order = 0
        self._enforcement_answer: Enforcement | None = None
        self._restriction_answer = NOBODY_RESTRICTED
        self._completed_unheard = False  # rule 7: still to be asked for

    def stop(self) -> None:
        """Take no more orders; an open request ends with the connection."""
        self._stop.set()
        if self._thread is not None:
            self._thread.end(_END_SECONDS)
            self._thread = None

    def recover_pending(self, facade: ErasureTarget) -> int:
        """Carry out the orders that are owed, on the owning thread (rule 3)."""
        sent_us = self._clock.now_us()
        try:
            new = super().recover_pending(facade)
        except ServiceError as error:
            unasked = _unasked(error)
        else:
            facade.renew_custody(ERASURES, sent_us + self._lease_us)
            return new
        self._restriction_answer = self._restricted = _kept(self._kept_path)
        self._kept_orders = self._restricted.orders
        facade.restrict(self._restricted)
        return unasked

    def completed(self) -> list[CompletedErasure]:
        """Return completed erasures, as any inbox; none where the control plane is away, and `look` asks again (rule
        7).
        """
        try:
            rows = self._connection.get("/v1/worker/erasures", completed="true")["items"]
        except ServiceError as error:
            self._completed_unheard = True
            _unasked(error)
            return []
        self._completed_unheard = False
        return completed_erasures(map(_named, rows))

    def look(self, facade: ErasureTarget) -> int:
        """Pass owed orders to the owning thread's next step, from any thread (rule 3)."""
        sent_us = self._clock.now_us()
        try:
            new = super().look(facade)
            if not self._stop.is_set():
                self._renew(facade, sent_us)
            if self._completed_unheard:
                found = self.completed()
                facade.call(lambda owner: owner.erasures.destroy_returned(lambda: found, at_start=False))
            return new
        except ServiceError as error:
            if self._stop.is_set():
                return 0
            if self._thread is not None:
                raise
            return _unasked(error)

    def _renew(self, facade: ErasureTarget, sent_us: int) -> None:
        """Rule 6. An engine that sleeps has one renewal waiting, behind the erasures that came before it."""
        self._until_us = sent_us + self._lease_us
        if self._renewal is None or self._renewal.done():
            self._renewal = facade.call(lambda owner: owner.renew_custody(ERASURES, self._until_us))

    def _keep(self, heard: RestrictedSubjects) -> None:
        """Follow these from now on, and after a start at which nobody can be asked (rule 5)."""
        self._restriction_answer = heard
        if self._kept_path is None or heard.orders == self._kept_orders:
            return
        try:
            write_file(self._kept_path, orjson.dumps([one._asdict() for one in sorted(heard.orders)]))
        except OSError as error:  # what was heard is followed all the same, and kept with the next answer
            _log.error("restrictions cannot be kept for the next start", reason=error.strerror)
            return
        self._kept_orders = heard.orders

    def _heard(self) -> HeardOrders:
        """What the control plane says now; what it does not say again is as it was (rule 4)."""
        wait = (
            self._wait_seconds if self._taken or self._thread is not None else 0
        )  # the first question waits for nothing
        known = ",".join(sorted(self._taken)[-64:])
        ask = self._connection.get
        heard = self._enforcement_answer
        orders = ask(
            "/v1/worker/erasures",
            wait=wait,
            known=known or None,
            keys=self._newest_key_order,
            enforcement=heard.order if heard is not None else -1,
            restrictions=self._restriction_answer.digest(),
        )
        self._keep(restricted_from(orders["restrictions"]))
        ordered = orders["enforcement"]
        if ordered is not None:
            order = fact_of(EnforcementOrder, {**ordered, "tenants": tuple(ordered["tenants"])})
            self._enforcement_answer = followed(order)
        keys = orders["keys"]
        self._newest_key_order = max((item["order"] for item in keys), default=0)
        self._key_answer = newest(OrderedKeys(item["tenant"], item["action"], item["at_us"]) for item in keys)
        owed = [] if self._stop.is_set() else [_named(item) for item in orders["items"]]
        return HeardOrders(owed, self._key_answer, self._enforcement_answer, self._restriction_answer)


def _named(item: dict[str, Any]) -> Named:
    """An erasure as the control plane names it."""
    who = SelectorNames(item["subject_name"], item["session_name"])
    return fact_of(Requested, item), who if item["named"] else None


def _unasked(error: ServiceError) -> int:
    if not is_away(error):
        raise error
    _log.warning("erasures cannot be requested yet", reason=error.message)
    return 0


def _kept(path: Path | None) -> RestrictedSubjects:
    """What was heard last, by the file of rule 5; nobody where there is none."""
    if path is None:
        return NOBODY_RESTRICTED
    try:
        return restricted_from(orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return NOBODY_RESTRICTED
    except (OSError, ValueError, TypeError, KeyError) as problem:
        why = f"cannot be read ({type(problem).__name__}), and the control plane is away"
        raise ConfigError(f"kept restrictions `{path}`: {why}", path=path) from None
