"""Cases from the ledger, one or all, with the steps that count.

1. What is read are projections of leaves that are there, so a verified ledger gives the same cases.
2. Who acted is held against `principal-changed` leaves: an actor that no leaf enrolled, or whom one had disabled by
   then, is named (`strangers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson
from sqlalchemy import ColumnElement, Connection, Table, and_, select, true

from kvcustody.audit.evidence.cases.case_record import CaseStep, OpenedCase, SubjectCase, replay
from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.store.database.signed_orders import SignedOrders, orders_of
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of, kinds_of
from kvcustody.audit.store.schema.leaf_tables import case_steps, cases
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.errors import LedgerError

_ENROLLED = frozenset({"enrolled", "enabled"})
_DISABLED = "disabled"
_CASE = [cases.c[name] for name in OpenedCase._fields]
_STEP = [case_steps.c[name] for name in CaseStep._fields if name != "void"]


class PrincipalPeriods(NamedTuple):
    """When each principal could act, from the system log: (from, or None at an end), in order."""

    changes: Mapping[str, tuple[tuple[int, bool], ...]]

    def acted(self, name: str, at_us: int) -> bool:
        """Return whether a principal of this name was enrolled and not disabled at a moment."""
        known = [is_in for since_us, is_in in self.changes.get(name, ()) if since_us <= at_us]
        return bool(known) and known[-1]


def read_cases(
    connection: Connection, *, tenant: str | None = None, as_of: AsOf | None = None
) -> tuple[SubjectCase, ...]:
    """Return every case, newest first; of one tenant, or as of a checkpoint."""
    mine: ColumnElement[bool] = true() if tenant is None else cases.c.tenant == tenant
    steps: dict[str, list[CaseStep]] = {}
    in_cases: ColumnElement[bool] = is_in(as_of, cases)
    in_steps: ColumnElement[bool] = is_in(as_of, case_steps)
    order = (case_steps.c.at_us, case_steps.c.log, case_steps.c.idx)
    of = case_steps.c.case_id.in_(select(cases.c.case_id).where(mine))
    query = select(case_steps.c.case_id, *_STEP).where(and_(of, in_steps, has_leaf(case_steps))).order_by(*order)
    for case_id, *step in connection.execute(query):
        steps.setdefault(case_id, []).append(CaseStep(*step))
    opened = select(*_CASE).where(and_(mine, in_cases, has_leaf(cases)))
    opened = opened.order_by(cases.c.at_us.desc(), cases.c.log, cases.c.idx.desc())
    found = (OpenedCase(*row) for row in connection.execute(opened))
    return tuple(replay(one, steps.get(one.case_id, ())) for one in found)


def read_case(connection: Connection, case_id: str) -> SubjectCase:
    """Return one case; raises `LedgerError` if the ledger has none with this id."""
    row = connection.execute(select(*_CASE).where(cases.c.case_id == case_id, has_leaf(cases))).first()
    if row is None:
        raise LedgerError(f"case `{case_id}` is not in the ledger", case_id=case_id)
    order = (case_steps.c.at_us, case_steps.c.log, case_steps.c.idx)
    query = select(*_STEP).where(case_steps.c.case_id == case_id, has_leaf(case_steps)).order_by(*order)
    return replay(OpenedCase(*row), (CaseStep(*step) for step in connection.execute(query)))


def case_to_follow(connection: Connection, case_id: str) -> SubjectCase | None:
    """Return a case as those who act on it read it: with signed orders (`signed_orders`), only from signed leaves.

    None where no leaf that counts opened it.
    """
    signed = orders_of(connection)
    if signed is None:
        return read_case(connection, case_id)
    opened = _signed_leaves(connection, signed, cases, case_id)
    if not opened:
        return None
    opening = opened[0] | {
        "received_us": int(opened[0]["received_utc"]),
        "holidays": " ".join(opened[0]["holidays"]),
        "ends": " ".join(opened[0].get("ends", ())) or None,
    }
    steps = _signed_leaves(connection, signed, case_steps, case_id)
    return replay(
        OpenedCase(*(opening[name] for name in OpenedCase._fields)),
        (CaseStep(*(step[name] for name in CaseStep._fields if name != "void")) for step in steps),
    )


def _signed_leaves(connection: Connection, signed: SignedOrders, table: Table, case_id: str) -> list[dict[str, Any]]:
    """What the signed leaves behind a table's rows say of a case, in the order of their signed times."""
    query = (
        select(events.c.leaf)
        .select_from(events)
        .join(table, is_leaf_of(table))
        .where(table.c.case_id == case_id)
        .order_by(events.c.log, events.c.idx)
    )
    (kind,) = kinds_of(table)
    every = [signed.accepted(bytes(leaf), kind) for leaf in connection.scalars(query)]
    counted = [body | {"at_us": int(body["at_us"])} for body in every if body is not None]
    return sorted((body for body in counted if body["case_id"] == case_id), key=lambda body: body["at_us"])


def principal_periods(connection: Connection) -> PrincipalPeriods:
    """Return the periods from the leaves of the system log (rule 2)."""
    query = (
        select(events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(logs.c.name == SYSTEM, events.c.kind == "principal-changed", has_leaf(events))
        .order_by(events.c.idx)
    )
    changes: dict[str, list[tuple[int, bool]]] = {}
    for leaf in connection.scalars(query):
        body = orjson.loads(bytes(leaf))
        if body["action"] in _ENROLLED or body["action"] == _DISABLED:
            change = (int(body["at_us"]), body["action"] in _ENROLLED)
            changes.setdefault(body["principal"], []).append(change)
    return PrincipalPeriods({name: tuple(sorted(made)) for name, made in changes.items()})


def strangers(case: SubjectCase, known: PrincipalPeriods, issuers: Iterable[str] = ()) -> tuple[str, ...]:
    """Return actors of a case whom no leaf had enrolled by then. Principals of a token issuer are the issuer's own."""
    marks = tuple(f"{name}:" for name in issuers)
    acts = [(case.opened.actor, case.opened.at_us)]
    acts += [(step.actor, step.at_us) for step in case.steps]
    return tuple(sorted({name for name, at_us in acts if not (name.startswith(marks) or known.acted(name, at_us))}))
