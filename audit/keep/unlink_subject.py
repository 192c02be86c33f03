"""Detach a subject's pseudonyms from the person, while every leaf, hash and proof stays unchanged.

1. It is on record before it happens (`SubjectUnlinked`, class A), without the name and without the pseudonyms.
2. Key and names go: the key in its own store, the rows in the ledger's database. After that no copy of the ledger,
   older or newer, tells who a pseudonym was; without subject keys this holds for copies made later alone.
3. A legal hold on the tenant or the subject refuses it: the hold is on ledger content, and who it is about is part of
   that. So does a case that restricts the subject's processing: workers follow it by the name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, Engine

from kvcustody.audit.evidence.cases.restrictions import restrictions_in_force
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys, empty_wal
from kvcustody.audit.evidence.subjects.subject_table import names_of, unlink
from kvcustody.audit.keep.purge_and_legal_hold import RetentionError, check_no_hold
from kvcustody.audit.kinds import SubjectUnlinked
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.write.record_operator_act import record_operator_act
from kvcustody.clock import Clock, SystemClock

NO_KEYS = "names stood in the ledger's database itself: backups and archived logs from before still hold them"
BUSY = "a reader kept the write-ahead log from being emptied: run `kvcustody audit redact` again"
SERVER_LOG = "PostgreSQL keeps deleted rows until VACUUM, and archived WAL for as long as you keep it"


class UnlinkedSubject(NamedTuple):
    """What was destroyed, and what remains in which copies (`remains`: sentences for a report)."""

    pseudonyms: int
    keys: int
    remains: tuple[str, ...]


def unlink_subject(
    engine: Engine,
    tenant: str,
    subject: str,
    *,
    keys: SubjectKeys | None,
    actor: str,
    reason: str,
    clock: Clock | None = None,
    put: Callable[[SubjectUnlinked], object] | None = None,
) -> UnlinkedSubject:
    """Destroy the link between a subject and its pseudonyms (rules 1–3); safe to repeat.

    `put` makes the event durable or raises; without it a writer is opened for it.
    Raises `LedgerError` under a legal hold, `LedgerUnavailable` where it cannot be put on record.
    """
    with engine.connect() as connection:
        names = names_of(connection, tenant, subject, keys)
        check_no_hold(connection, tenant, names)
        _check_not_restricted(connection, tenant, names)
        count = len(names)
    clock = clock or SystemClock()
    if put is None:
        record_operator_act(engine, lambda at_us: SubjectUnlinked(at_us, tenant, count, actor, reason), clock=clock)
    else:
        put(SubjectUnlinked(clock.now_us(), tenant, count, actor, reason))
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        gone = unlink(connection, tenant, subject, keys)
    destroyed = 0 if keys is None else keys.destroy(tenant, subject)
    return UnlinkedSubject(count if gone else 0, destroyed, _remains(engine, destroyed))


def _check_not_restricted(connection: Connection, tenant: str, names: Sequence[str]) -> None:
    """A restriction is of a person: nobody could follow it once the pseudonym names nobody."""
    for one in restrictions_in_force(connection):
        if one.tenant == tenant and one.subject in names:
            raise RetentionError(f"case `{one.case_id}` restricts this subject's processing: lift it first")


def _remains(engine: Engine, destroyed: int) -> tuple[str, ...]:
    remains = []
    if not destroyed:
        remains.append(NO_KEYS)
    if not empty_wal(engine):
        remains.append(BUSY)
    if dialect_of(engine).roles and not destroyed:
        remains.append(SERVER_LOG)
    return tuple(remains)
