"""The control plane's erase epochs: what each erasure raises, and what doors and workers know of it.

    book.raise_for(selector, erasure, deadline_us)     # before the erasure's own leaf: narrowing takes effect first
    book.page(after=17, floor=3)                       # what came after version 17, for who asks `takeEpochs`

1. A subject's erasure raises the subject. A session's raises the session and its subject: the one that the selector
   names, else those that the ledger has for it, else the whole tenant. An erasure of a tenant, or of a tenant's domain,
   raises the tenant. One without a tenant, or for a tenant whose issuer is unknown, raises the fleet.
2. The name that a tenant's subjects share waits. `raise_batches` raises it for all erasures of its subjects and
   sessions at once. It does so before the earliest of their deadlines, and at most `epoch_minutes` after the previous
   batch.
3. Among all processes of the ledger, one transaction at a time gives out numbers. So whoever sees a number sees every
   lower one. The newest row stays, so that each number is given only once.
4. A raise ends after `namespace_days` and after the longest ceiling of the policies in effect, both then and at the
   check. Rows end in the order of their numbers; ended rows are at or below the floor.
5. Tags are under a key of the service's secret, which the processes of one ledger share. Rows that erasures raised
   under another key are not found by these tags: the fleet is raised before anything is given out.
6. A database that was restored has lost raises that doors and workers know. A process that notices it sends the version
   that it knows (`raise_above`). The fleet is then raised above that version, to the current time in microseconds. No
   count of raises gets that high, so the number is new to everybody. A version that nobody can know is refused. A
   recorded break of the log raises the fleet too, even one that the service finds when it starts.
7. An epoch that an erasure raised is in an `epoch-raised` leaf. The epoch of a batch is in one such leaf for each
   erasure that waited.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from sqlalchemy import Connection, Engine, delete, func, insert, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.evidence.erasure.requests_and_answers import request
from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.evidence.subjects.subject_table import subjects_of_session
from kvcustody.audit.kinds import EpochRaised, Event
from kvcustody.audit.kinds.epoch_events import FLEET, SESSION, SHARED, SUBJECT, TENANT
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import erase_epochs
from kvcustody.audit.tlog.log_break import parse_break, recorded_breaks
from kvcustody.audit.tlog.signed_note import NoteError
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import CustodyError, LedgerError
from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    RaisedEpoch,
)
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.service.epochs.epoch_takers import EpochTakers, newest_and_floor
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger
from kvcustody.times import DAY_US

PAGE_RAISES: Final = 10_000
BATCH_SECONDS: Final = 10.0  # between two looks at what waits: a batch is raised so long before its deadline
_PRUNE_SECONDS, _END_SECONDS = 3600.0, 5.0
_RAISING = 7_215_415  # the number of the lock
_KEY_CHANGED, _RESTORED = "key", "restored"  # of the fleet, by no erasure (rules 5 and 6)
RESTORED_SECONDS: Final = 60  # between two raises of rule 6, each of which ends every name
_PRIVATE = (SUBJECT, SESSION)
_OF_FLEET = (FLEET, _KEY_CHANGED, _RESTORED)
_table = erase_epochs.c
_log = get_logger(__name__)


class Raise(NamedTuple):
    """A scope to raise: its kind, its tag, and the tag of its tenant's shared name."""

    kind: str
    tag: bytes
    shared: bytes | None


class EpochPage(NamedTuple):
    """Raises after a version, up to `version`; `digest` is empty where more follow."""

    version: int
    floor: int
    digest: str
    raised: tuple[RaisedEpoch, ...]


class EpochBook:
    """The raises of one ledger; thread-safe."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        key: bytes,
        *,
        ceiling_us: Callable[[], int | None],
        epoch_minutes: int,
        namespace_days: int,
    ) -> None:
        """`key`: rule 5. `ceiling_us`: the longest of the policies in effect; None: of one nobody knows it."""
        self.key, self._tags, self.namespace_days = key, EpochTags(key), namespace_days
        self._key_id = hashlib.blake2b(key, digest_size=8, person=b"epoch-key-id").hexdigest()
        self._engine, self._clock = engine, clock
        self._ceiling_us = ceiling_us
        self._batch_us = epoch_minutes * 60 * MICROSECONDS
        self._namespace_us = namespace_days * DAY_US
        self._snapshot, self._digest = EraseEpochs(), EraseEpochs().digest
        self._checked = -1  # the version up to which rule 5 was seen to
        self.takers = EpochTakers(engine, clock)
        self._unrecorded: list[Event] = []  # leaves of what was raised while a question was answered
        self._lock = threading.Lock()

    # -- raising -----------------------------------------------------------------------------------------------

    def raise_for(self, selector: Selector, erasure: str, deadline_us: int, at_us: int) -> list[Event]:
        """Raise the epochs that an erasure narrows (rule 1); returns leaves to queue at once.

        `deadline_us` is UTC, `at_us` boot time.
        """
        ends_us = self._end_us()
        with self._writing() as connection:
            wanted = self._scopes(connection, selector)
            numbers = self._insert(connection, wanted, erasure, deadline_us, ends_us)
            made: list[Event] = []
            for one, number in zip(wanted, numbers, strict=True):
                made.append(EpochRaised(at_us, erasure, selector.tenant, one.kind, number))
                if one.kind in (TENANT, FLEET):
                    made += self._settle(connection, at_us, one.shared, one.kind, number)
        return made + self._taken_events()

    def raise_batches(self, at_us: int, *, now_us: int | None = None) -> list[Event]:
        """Raise the shared names that are due (rule 2); returns the waiting erasures' leaves, to queue at once."""
        now_us = self._clock.utc_us() if now_us is None else now_us
        with self._engine.connect() as connection:
            is_due = bool(self._due(connection, now_us))
        events: list[Event] = []
        if is_due:
            ends_us = self._end_us()
            with self._writing() as connection:  # seen again: another process may have been first
                for shared in self._due(connection, now_us):
                    [number] = self._insert(connection, [Raise(SHARED, shared, shared)], "", None, ends_us)
                    events += self._settle(connection, at_us, shared, SHARED, number)
        return events + self._taken_events()

    def raise_above(self, known: int | None, at_us: int) -> list[Event]:
        """Raise the fleet above a version that somebody knows (None: any) unless it is (rule 6); returns leaves to
        queue.

        Raises `conflict` for a version that nobody can know, `unavailable` within `RESTORED_SECONDS` of the last time.
        """
        ends_us, now_us = self._end_us(), self._clock.utc_us()
        with self._writing() as connection:
            own = select(func.max(_table.number)).where(_table.key == self._key_id, _table.kind.in_(_OF_FLEET))
            if known is not None and (connection.scalar(own) or 0) > known:
                return []
            newest, _ = newest_and_floor(connection)
            most = max(newest, now_us)
            if known is not None and known > most:
                raise ProblemError("conflict", f"version `{known}` was never issued")
            last_us = connection.scalar(select(func.max(_table.raised_us)).where(_table.kind == _RESTORED))
            if known is not None and 0 <= now_us - (last_us or 0) < RESTORED_SECONDS * MICROSECONDS:
                raise ProblemError("unavailable", "the fleet was raised for that just now")
            made = self._raise_fleet(connection, _RESTORED, ends_us, at_us, above=most)
        with self._lock:
            self._snapshot = EraseEpochs()
        _log.warning("erase epochs were lost, as in a restore: the fleet is raised, and every router's name ends")
        return made

    def _raise_fleet(
        self, connection: Connection, kind: str, ends_us: int, at_us: int, *, above: int = 0
    ) -> list[Event]:
        """Raise the fleet by no erasure."""
        one = Raise(kind, self._tags.of(EpochScope()), None)
        [number] = self._insert(connection, [one], "", None, ends_us, above=above)
        return [
            EpochRaised(at_us, "", None, FLEET, number),
            *self._settle(connection, at_us, None, FLEET, number),
        ]

    def prune(self) -> int:
        """Forget ended raises (rule 4); returns the number of rows."""
        ceiling_us = self._ceiling_us()
        if ceiling_us is None:
            return 0
        now_us, bound_us = self._clock.utc_us(), max(ceiling_us, self._namespace_us)
        with self._writing() as connection:
            stays = or_(_table.ends_us > now_us, _table.raised_us > now_us - bound_us)
            first = connection.scalar(select(func.min(_table.number)).where(stays))
            newest = connection.scalar(select(func.max(_table.number)))
            if newest is None:
                return 0
            below = newest if first is None else min(first, newest)
            return connection.execute(delete(erase_epochs).where(_table.number < below)).rowcount

    def _scopes(self, connection: Connection, selector: Selector) -> list[Raise]:
        """Rule 1."""
        fleet = [Raise(FLEET, self._tags.of(EpochScope()), None)]
        if selector.tenant is None:
            return fleet
        issuer, tenant = known_issuers(connection).parts(selector.tenant)
        if not issuer:
            return fleet
        shared = self._tags.of(EpochScope(issuer, tenant, is_shared=True))
        whole = [Raise(TENANT, self._tags.of(EpochScope(issuer, tenant)), shared)]
        people: Sequence[str] | None = [selector.subject] if selector.subject else []
        if not (selector.subject or selector.session):
            return whole
        raises: list[Raise] = []
        if selector.session:
            own = EpochScope(issuer, tenant, session=selector.session)
            raises.append(Raise(SESSION, self._tags.of(own), shared))
            if not people:
                people = subjects_of_session(connection, selector.tenant, selector.session)
        if people is None:
            return whole
        return raises + [Raise(SUBJECT, self._tags.of(EpochScope(issuer, tenant, one)), shared) for one in people]

    def _insert(
        self,
        connection: Connection,
        wanted: Sequence[Raise],
        erasure: str,
        deadline_us: int | None,
        ends_us: int,
        *,
        above: int = 0,
    ) -> list[int]:
        """A row for each, under the lock (rule 3); their numbers, which are above `above`."""
        newest = max(newest_and_floor(connection)[0], above)
        now_us = self._clock.utc_us()
        rows = [
            {
                "number": newest + place,
                "tag": one.tag,
                "shared": one.shared,
                "kind": one.kind,
                "raised_us": now_us,
                "deadline_us": deadline_us if one.kind in _PRIVATE else None,
                "ends_us": ends_us,
                "erasure": erasure,
                "key": self._key_id,
            }
            for place, one in enumerate(wanted, 1)
        ]
        connection.execute(insert(erase_epochs), rows)
        return [newest + place for place, _ in enumerate(wanted, 1)]

    def _end_us(self) -> int:
        return self._clock.utc_us() + max(self._ceiling_us() or 0, self._namespace_us)

    def _settle(self, connection: Connection, at_us: int, shared: bytes | None, kind: str, number: int) -> list[Event]:
        """End the waiting for a tenant's shared name (None: every tenant's), which ends with this number.

        A leaf for each erasure that waited.
        """
        waits = [_table.deadline_us.is_not(None), *([] if shared is None else [_table.shared == shared])]
        erasures = connection.scalars(select(_table.erasure).where(*waits).order_by(_table.number)).all()
        connection.execute(update(erase_epochs).where(*waits).values(deadline_us=None))
        events: list[Event] = []
        for erasure in dict.fromkeys(erasures):
            try:
                tenant = request(connection, erasure).tenant
            except LedgerError:  # it was raised for, and then not recorded
                continue
            events.append(EpochRaised(at_us, erasure, tenant, kind, number))
        return events

    def _due(self, connection: Connection, now_us: int) -> list[bytes]:
        """The tags of shared names whose end is due (rule 2): a raise waits for one while it has a deadline."""
        earliest = select(_table.shared, func.min(_table.deadline_us)).where(_table.deadline_us.is_not(None))
        due = []
        for shared, deadline_us in connection.execute(earliest.group_by(_table.shared)).all():
            batch = select(func.max(_table.raised_us)).where(_table.shared == shared, _table.kind == SHARED)
            at_us = min((connection.scalar(batch) or 0) + self._batch_us, deadline_us)
            if at_us <= now_us + BATCH_SECONDS * MICROSECONDS:
                due.append(bytes(shared))
        return due

    def _note(self, made: Sequence[Event]) -> None:
        """Keep leaves until who answers hands them over."""
        with self._lock:
            self._unrecorded += made

    def _taken_events(self) -> list[Event]:
        with self._lock:
            taken, self._unrecorded = self._unrecorded, []
        return taken

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A writing transaction, of which one at a time runs (rule 3)."""
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            dialect_of(connection).one_at_a_time(connection, _RAISING)
            yield connection

    # -- giving out --------------------------------------------------------------------------------------------

    def page(self, *, after: int) -> EpochPage:
        """Return at most `PAGE_RAISES` raises after a version; the present ones where that version is no
        longer kept.
        """
        snapshot, digest = self._current()
        rows = snapshot.after(after, PAGE_RAISES)
        if len(rows) < PAGE_RAISES or rows[-1].number == snapshot.version:
            return EpochPage(snapshot.version, snapshot.floor, digest, rows)
        return EpochPage(rows[-1].number, snapshot.floor, "", rows)

    def _current(self) -> tuple[EraseEpochs, str]:
        """The snapshot as it is in the database now."""
        self._follow_key()
        with self._lock, self._engine.connect() as connection, connection.begin():
            dialect_of(connection).begin_reading(connection)
            version, floor = newest_and_floor(connection)
            known = self._snapshot
            if (version, floor) != (known.version, known.floor):
                is_later = version >= known.version and floor >= known.floor
                known = known if is_later else EraseEpochs()
                query = select(_table.number, _table.tag).where(_table.number > known.version)
                rows = connection.execute(query.order_by(_table.number))
                raised = [RaisedEpoch(number, bytes(tag)) for number, tag in rows]
                self._snapshot = known.extended(raised, version=version, floor=floor)
                self._digest = self._snapshot.digest
            return self._snapshot, self._digest

    def _follow_key(self) -> None:
        """Raise the fleet where erasures raised something under another key since it was raised last (rule 5)."""
        with self._engine.connect() as connection:
            version, _ = newest_and_floor(connection)
            if version <= self._checked:
                return
            is_behind = self._has_foreign(connection)
            is_broken = self._checked < 0 and self._has_break(connection)
        if is_broken:
            self._note(self.raise_above(None, self._clock.now_us()))
        if is_behind and not is_broken:
            ends_us = self._end_us()
            with self._writing() as connection:
                if self._has_foreign(connection):
                    at_us = self._clock.now_us()
                    self._note(self._raise_fleet(connection, _KEY_CHANGED, ends_us, at_us))
                    _log.warning(
                        "erase epochs were raised under another key: every router's name ends. Processes of one ledger "
                        "share one `service.key`"
                    )
        self._checked = version

    def _has_break(self, connection: Connection) -> bool:
        """Whether a break of the log is on record, and the fleet was not raised since."""
        try:
            broken = [parse_break(one.note) for one in recorded_breaks(connection)]
        except NoteError:  # `fsck` says which leaf is malformed
            return True
        if not broken:
            return False
        own = select(func.max(_table.raised_us)).where(_table.key == self._key_id, _table.kind.in_(_OF_FLEET))
        return broken[-1].at_seconds * MICROSECONDS > (connection.scalar(own) or 0)

    def _has_foreign(self, connection: Connection) -> bool:
        own = select(func.max(_table.number)).where(_table.key == self._key_id, _table.kind.in_(_OF_FLEET))
        foreign = select(func.max(_table.number)).where(_table.key != self._key_id, _table.kind != _KEY_CHANGED)
        return (connection.scalar(foreign) or 0) > (connection.scalar(own) or 0)


class EpochTurns:
    """One thread that raises shared names when due and forgets ended raises; close it at the end."""

    def __init__(self, book: EpochBook, clock: Clock, record: Callable[[Sequence[Event]], None]) -> None:
        """`record` queues leaves, and tells whoever waits that there is something new."""
        self._book, self._clock, self._record = book, clock, record
        self._wake, self._ending = threading.Event(), False
        self._thread = GuardingThread(self._run, name="kvcustody-erase-epochs")
        self._thread.start()

    def wake(self) -> None:
        """Look now, because an erasure was recorded."""
        self._wake.set()

    def turn(self) -> None:
        """Raise what is due."""
        made = self._book.raise_batches(self._clock.now_us())
        if made:
            self._record(made)

    def close(self) -> None:
        """Stop looking."""
        self._ending = True
        self._wake.set()
        self._thread.end(_END_SECONDS)

    def _run(self) -> None:
        pruned = float("-inf")
        while not self._ending:
            try:
                self.turn()
                if time.monotonic() - pruned >= _PRUNE_SECONDS:
                    pruned = time.monotonic()
                    self._book.prune()
            except (
                SQLAlchemyError,
                CustodyError,
            ) as error:  # the database is away: the next turn tries again
                _log.warning("erase epochs cannot be checked", reason=type(error).__name__)
            self._wake.wait(BATCH_SECONDS)
            self._wake.clear()
