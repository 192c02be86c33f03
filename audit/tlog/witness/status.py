"""How far witnesses have seen the ledger, for health, reports and exports.

1. Without a witness the answer says so, in words that a report has to print: `UNWITNESSED`.
2. Everything is read from stored lines; a reader who does not trust the database checks them again
   (`witnessed_note`).
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.store.schema.retention import cosignatures
from kvcustody.audit.store.schema.trees import checkpoints
from kvcustody.audit.tlog.database_proofs import LedgerProofs

UNWITNESSED = "no witness has signed this ledger: split views and truncated tails stay undetected"
BEHIND = "no witness has signed newer records"


class WitnessSeen(NamedTuple):
    """One witness's last signature: root leaves, and its own clock's time (µs UTC); `age_us` is the time since then."""

    name: str
    size: int
    at_us: int
    age_us: int


class WitnessStatus(NamedTuple):
    """All witnesses, and the size that at least one of them covers.

    `unwitnessed_us` is how long the oldest uncovered checkpoint has waited (0: everything is covered). `warning` is
    what a report prints; None when a witness has seen everything that is signed.
    """

    size: int
    signed_size: int
    witnessed_size: int
    unwitnessed_us: int
    witnesses: tuple[WitnessSeen, ...]
    warning: str | None


def witness_status(connection: Connection, now_us: int) -> WitnessStatus:
    """Return what witnesses have seen at `now_us` (UTC)."""
    newest = connection.scalar(select(func.max(checkpoints.c.size))) or 0
    signed = LedgerProofs(connection).signed_or_none()
    each = select(cosignatures.c.witness, func.max(cosignatures.c.size), func.max(cosignatures.c.at_us))
    rows = connection.execute(each.group_by(cosignatures.c.witness).order_by(cosignatures.c.witness))
    seen = tuple(WitnessSeen(name, size, at_us, max(0, now_us - at_us)) for name, size, at_us in rows)
    covered = max((witness.size for witness in seen), default=0)
    first = select(func.min(checkpoints.c.at_us)).where(checkpoints.c.size > covered)
    waiting = connection.scalar(first)
    unwitnessed_us = 0 if waiting is None else max(0, now_us - waiting)
    warning = UNWITNESSED if not seen else BEHIND if covered < newest else None
    return WitnessStatus(newest, signed.size if signed else 0, covered, unwitnessed_us, seen, warning)


def witnessed_note(connection: Connection, size: int) -> bytes:
    """Return the signed checkpoint of this size with its witnesses' lines; raises `ProofError` if none is signed."""
    note = LedgerProofs(connection).signed(size).note
    query = select(cosignatures.c.line).where(cosignatures.c.size == size).order_by(cosignatures.c.witness)
    return note + b"".join(map(bytes, connection.scalars(query)))


def newest_witnessed(connection: Connection) -> int | None:
    """Return the newest checkpoint that any witness signed, by size; None if there is none."""
    size: int | None = connection.scalar(select(func.max(cosignatures.c.size)))
    return size
