"""Monitored requests: the keys that they use, and what the policy would have decided.

    chain = monitor.chain(own_domain, pool, model, salt)     # the engine's own keys, in a domain of the tenant's own
    request = MonitoredRequest(chain, ...)                   # its standing; a forecast says what it would have found

- A monitored request's blocks are keyed as an engine without governance keys them: by tokens, model and the caller's
  own salt. The keys are under one random key of this process, from which no enforced chain derives. So no enforced
  request can compute the key of a monitored block, nor the reverse.
- A block's owner stays correct. Each tenant's monitored blocks are in its own domains: twins of those that the policy
  gives it. They are under its account, and its erasures end them.
- A twin that is closed serves nobody; the next request gets another.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from kvcustody.allocator.pool.accounting import Domain, OwnerData
from kvcustody.allocator.prefix.key_chain import HashState
from kvcustody.allocator.prefix.longest_prefix import Chain, ReadPlan
from kvcustody.governance.decisions.access_plan import DomainPool, label_of
from kvcustody.governance.external.block_keys import KeyChain
from kvcustody.governance.monitoring.enforcement import ORDER_DAYS_MAX
from kvcustody.governance.monitoring.forecast_cache import ForecastEntry

NO_TENANT = "unknown-tenant"
FORECAST_WAITING_MAX = 256  # requests that would be put off; the oldest is given up
FORECAST_TRIES = 8  # of them, at each look-up
WOULD_PERMIT, WOULD_DENY = "would-permit", "would-deny"
_REALM = -1  # of every twin: their keys are common, by model and salt
_ANY_TIME_US = 2 * ORDER_DAYS_MAX * 86_400_000_000  # longer than any order: the engine's own eviction ends it


class ForecastRun:
    """One monitored request in the forecast of enforcement."""

    __slots__ = ()


class MonitoredRequest(OwnerData):
    """One monitored request: its chain under the engine's own keys, and what the policy would let it read."""

    __slots__ = (
        "blocks",
        "chain",
        "domains",
        "entries",
        "expected",
        "forecast_blocks",
        "governed",
        "granted_blocks",
        "is_reserved",
        "keys",
        "model",
        "private",
        "published",
        "read",
        "reader",
        "reasons",
        "refusal",
        "reserved_blocks",
        "run",
        "salt",
        "segment_blocks",
        "segment_domain",
    )

    def __init__(
        self,
        chain: Chain,
        governed: KeyChain | None,
        model: bytes,
        salt: str | None,
        *,
        reader: str,
        refusal: str = "",
    ) -> None:
        self.chain = chain
        self.governed = governed  # its keys under the policy; None where it would have none
        self.model = model
        self.salt = salt
        self.refusal = refusal  # the rule by which it would not be admitted
        self.read: ReadPlan | None = None
        self.reasons: tuple[str, ...] = ()
        self.keys: list[bytes] = []
        self.forecast_blocks = 0
        self.run: ForecastRun | None = None
        self.entries: list[ForecastEntry] = []
        self.domains: dict[int, Domain] = {}  # of its keys under the policy, by tag
        self.published = 0  # of its keys
        self.reserved_blocks = 0  # for its whole length
        self.is_reserved = False
        self.private: int | None = None  # blocks without a key that it would have; None: it has not begun
        self.blocks = 0  # that the engine gave it, found or new: as many as it would have
        self.reader = reader  # the tenant that is charged
        # What a look-up tells whoever attaches (`ExternalResidency`).
        self.expected: np.ndarray[tuple[int, ...], np.dtype[np.int32]] | int = 0
        self.segment_blocks = 0
        self.segment_domain: Domain | None = None
        self.granted_blocks = 0

    def forked(self) -> MonitoredRequest:
        """Return the record of a second request on the same blocks, in the same state."""
        child = MonitoredRequest(self.chain, None, self.model, self.salt, reader=self.reader, refusal=self.refusal)
        child.read, child.reasons = self.read, self.reasons
        return child

    def would_serve(self, domains: Iterable[Domain]) -> list[bool]:
        """Return for each leading block, given its domain, whether the policy would let it be read."""
        read = self.read
        if read is None or read.own.state is None:
            return [False for _ in domains]
        opened = [label_of(chain.domain).spec for chain in (read.own, *read.grants) if chain.state is not None]
        segment = self.segment_blocks if read.segment is not None else 0
        return [
            at < segment or ((spec := label_of(domain).spec) is not None and spec in opened)
            for at, domain in enumerate(domains)
        ]


T = TypeVar("T")


class WaitingForecast(ABC, Generic[T]):
    """Forecast requests that wait for room, oldest first, while the real requests run; each begins when it has room."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()

    @property
    def waiting(self) -> int:
        """The requests that run in fact and wait in the forecast."""
        return len(self._waiting)

    def _wait(self, run: T) -> None:
        self._waiting.append(run)
        if len(self._waiting) > FORECAST_WAITING_MAX:
            self._drop(self._waiting[0])

    def start_waiting(self, now_us: int) -> int:
        """Start waiting requests as an engine would: one without room lets the next one try."""
        left = 0
        for run in list(self._waiting)[:FORECAST_TRIES] if self._waiting else ():
            is_idle = self._is_idle()
            if self._start(run, now_us):
                self._waiting.remove(run)
                self._catch_up(run, now_us)
                left += 1
            elif is_idle:
                self._drop(run)  # it could not run alone: it would be refused
                left += 1
        return left

    def settle(self, now_us: int) -> None:
        """Run the waiting requests one after another, because nothing else runs any more."""
        while self.start_waiting(now_us):
            pass

    def close(self) -> None:
        """Record the waiting requests as far as their outcome is known."""
        for run in list(self._waiting):
            self._drop(run)

    @abstractmethod
    def _is_idle(self) -> bool:
        """Whether nothing runs."""

    @abstractmethod
    def _start(self, run: T, now_us: int) -> bool:
        """Whether it has room now; then it runs."""

    @abstractmethod
    def _catch_up(self, run: T, now_us: int) -> None:
        """It began now: it does what the real request did while it waited."""

    @abstractmethod
    def _drop(self, run: T) -> None:
        """Give it up: it is recorded as far as it is known, and waits no more."""


class Monitor:
    """The keys of one pool's monitored requests. Belongs to the thread that owns the state."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._twins: WeakKeyDictionary[Domain, Domain] = WeakKeyDictionary()

    def chain(self, own: Domain, pool: DomainPool, model: bytes, salt: str | None) -> Chain:
        """Return the chain of the engine's own keys for a model and salt, in the twin of a domain."""
        return Chain(self._twin(own, pool), self._state(model, salt))

    def close(self, tenants: Collection[str]) -> None:
        """Close the twin domains of these tenants, even those without a block."""
        for twin in self._twins.values():
            if label_of(twin).tenant in tenants:
                twin.is_open = False

    def tenants(self) -> set[str]:
        """The tenants that have a twin domain."""
        return {label_of(twin).tenant for twin in self._twins.values()}

    def _twin(self, own: Domain, pool: DomainPool) -> Domain:
        twin = self._twins.get(own)
        if twin is None or not twin.is_open:
            twin = self._twins[own] = pool.domain(
                own.owner,
                label=replace(label_of(own), is_monitored=True),
                idle_us=_ANY_TIME_US,
                absolute_us=_ANY_TIME_US,
                scrub_within_us=own.scrub_within_us,
                verify_share=own.verify_share,
                realm=_REALM,
            )
        return twin

    def _state(self, model: bytes, salt: str | None) -> HashState:
        state = hashlib.blake2b(key=self._secret, digest_size=32)
        name = b"" if salt is None else b"\x01" + salt.encode()
        state.update(len(model).to_bytes(4, "little") + model + len(name).to_bytes(4, "little") + name)
        return state
