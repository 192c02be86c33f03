"""What every facade of the governance shares: plans, decisions, keys, commands and the active policy revision.

`Governor` adds a pool that is ours, `EnginePort` a pool that an engine allocates by itself.

A1  Every reuse is decided at the request's own instant under the active revision.
A2  A widening act is durable before it takes effect; a narrowing one takes effect first.
A3  One thread owns the state; commands from elsewhere wait in a queue that `step` drains and acknowledges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

import structlog

from kvcustody.allocator.domain import Domain
from kvcustody.allocator.quota import Account
from kvcustody.audit.events import Event, KeyEvent, PolicyActivated
from kvcustody.clock import Clock, SystemClock
from kvcustody.errors import CapacityError, ConfigError, LedgerUnavailable
from kvcustody.governance.domain import DomainSpec, KeyOwner
from kvcustody.governance.first_use import FirstUses
from kvcustody.governance.keyring import KeyFact, Keyring
from kvcustody.governance.ledger_port import Ledger
from kvcustody.governance.narrowing import Bound, bind
from kvcustody.governance.outcome import Deferred, Refused
from kvcustody.governance.plan import Plan, PlanBook, PlanKey
from kvcustody.governance.reuse import Moment, Reuse
from kvcustody.governance.tally import Tally
from kvcustody.policies.table import DecisionTable

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class Authority(ABC):
    """Who may do what, under the active revision. Not thread-safe, except `call`."""

    def __init__(
        self,
        table: DecisionTable,
        keyring: Keyring,
        ledger: Ledger,
        *,
        block_tokens: int,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._ledger = ledger
        self._keyring = keyring
        self.block_tokens = block_tokens
        self._domains: WeakValueDictionary[tuple[DomainSpec, int], Domain] = WeakValueDictionary()
        self._commands: deque[tuple[Callable[[Any], object], Future[object]]] = deque()
        self._outbox: list[Event] = []
        self._unrecorded: dict[KeyOwner, list[KeyFact]] = {}
        self._first_uses = FirstUses(ledger, self._clock)
        self.tallies: dict[str, Tally] = {}
        self.table = table
        self._book = self._new_book(table)
        self._reuse = Reuse(table, self._first_uses)

    # -- what a facade over a pool provides ---------------------------------------------------------------------------

    @abstractmethod
    def _account(self, tenant: str) -> tuple[Account, Any]:
        """The account of an admitted tenant and the pool it is charged in; raises `CapacityError` without room."""

    @abstractmethod
    def _pools_bound(self) -> Iterable[Bound]:
        """The pools whose domains a new revision binds."""

    @abstractmethod
    def _limit(self, table: DecisionTable) -> None:
        """Apply a revision's quotas."""

    # -- plans --------------------------------------------------------------------------------------------------------

    def _plan(self, key: PlanKey, request_id: object, moment: Moment) -> Plan | Refused | Deferred:
        try:
            plan = self._book.plan(key, moment.utc_us)
        except (
            CapacityError
        ) as error:  # no partition or pool is left for a tenant that is admitted by default
            return Refused(request_id, error.message)
        except LedgerUnavailable:  # the first epoch of a tenant cannot be recorded
            return Deferred(request_id, "ledger")
        return plan if plan is not None else Refused(request_id, "tenant is not in the policy")

    def _tally(self, tenant: str) -> Tally:
        tally = self.tallies.get(tenant)
        if tally is None:
            tally = self.tallies[tenant] = Tally()
        return tally

    def _new_book(self, table: DecisionTable) -> PlanBook:
        return PlanBook(
            table, self._keyring, self._account, self._domains, self.block_tokens, self._record_keys
        )

    def _record_keys(self, owner: KeyOwner, made: tuple[KeyFact, ...]) -> None:
        """Record what was made for `owner`, now or when the ledger could not: until then it has no plan (A2)."""
        if made:
            self._unrecorded.setdefault(owner, []).extend(made)
        waiting = self._unrecorded.get(owner)
        while waiting:
            fact = waiting[0]
            tenant = owner.name if owner.kind == "tenant" else None
            event = KeyEvent(self._clock.now_us(), tenant, fact.kind, fact.epoch, "governor")
            self._ledger.submit_durable(event)
            del waiting[0]
        self._unrecorded.pop(owner, None)

    # -- commands -----------------------------------------------------------------------------------------------------

    def call(self, command: Callable[[Self], T]) -> Future[T]:
        """Run `command` on the owning thread at the next step; the future is its acknowledgement. Thread-safe."""
        future: Future[T] = Future()
        self._commands.append((command, future))  # type: ignore[arg-type]
        return future

    def _run_commands(self) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command(self))
            except Exception as error:
                future.set_exception(error)

    # -- administration -----------------------------------------------------------------------------------------------

    def activate(self, table: DecisionTable, *, actor: str) -> None:
        """Make `table` the active revision: what it narrows at once, what it widens once it is recorded (A2).

        Revisions only rise. Raises `LedgerUnavailable` where it cannot be recorded; the narrowing then stays.
        """
        if table.revision <= self.table.revision:
            raise ConfigError(
                f"policy revision `{table.revision}` is not newer than the active `{self.table.revision}`",
                revision=table.revision,
            )
        policy, now_us = table.policy, self._clock.now_us()
        self._outbox += self._reuse.take_denials(now_us)
        self._reuse = Reuse(self.table, self._first_uses, coming=table)
        bind(self._pools_bound(), list(self._domains.items()), table, now_us, only_narrow=True)
        self._ledger.submit_durable(
            PolicyActivated(
                now_us,
                table.revision,
                policy.name,
                policy.profile.value,
                table.digest,
                actor,
                self.table.revision,
            )
        )
        _log.info("policy activated", revision=table.revision, policy=policy.name, policy_digest=table.digest)
        self.table = table
        self._book.drop()
        self._book = self._new_book(table)
        self._first_uses.forget()
        self._outbox += self._reuse.take_denials(now_us)
        self._reuse = Reuse(table, self._first_uses)
        self._limit(table)
        bind(self._pools_bound(), list(self._domains.items()), table, now_us)

    def reload_keys(self) -> None:
        """After a rotation or destruction in the keyring: forget every primed state; old blocks are unreachable."""
        self._book.drop()

    def settle(self, timeout_seconds: float = 5.0) -> None:
        """Wait until pending first uses are durable (tests and orderly shutdown)."""
        self._first_uses.settle(timeout_seconds)

    @property
    def clock(self) -> Clock:
        """The clock that decides deadlines."""
        return self._clock
