"""The signed certificate of an erasure: the request, every worker's actions, and the leaves that show them.

1. It says nothing that its leaves do not show: every figure is computed from the leaves that it carries, here when it
   is issued and again by whoever checks it (`verify_certificate`).
2. It names no subject and no session: pseudonyms, and a commitment to the selector's text that the requester opens.
3. A block counts as destroyed only where every shard of its process has a receipt for that block and generation. What
   has none is listed: kept for other holders, or unproven.
4. A copy off the device is waiting until a leaf proves its end: its bytes are gone, or a key that it needs is. What is
   unlinked later is in a later certificate.
5. It is `complete` only if every worker that owes an answer has given it, by the leaves that it carries. Those are the
   request, the start and end of every process that was at work then, and the answers (`who_owes`).
6. It says when any process did not enforce its policy for everybody, as its issuer's word: the leaves that show it name
   other tenants.
7. Where orders are signed (`signed_orders`), it is not `complete` where nobody follows its request, and says why.
8. Legal holds on everything, on its tenant and on its subject are listed, from their leaves (`erasure_holds`).
9. Where it raised erase epochs, `routers` says when routers' names of the scope ended and which doors follow
   (`ended_names`). What routers keep is unproven, and changes no outcome.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import orjson
from sqlalchemy import Connection, and_, exists, func, or_, select, union

from kvcustody.audit.evidence.copies.copy_rows import DESTROYED, ENDED
from kvcustody.audit.evidence.erasure.ended_names import ended_name_leaves, ended_names
from kvcustody.audit.evidence.erasure.erasure_holds import hold_leaves, holds_among
from kvcustody.audit.evidence.erasure.figures_from_leaves import ErasureFigures, figures_of, waiting_copies
from kvcustody.audit.evidence.erasure.requests_and_answers import Status, status
from kvcustody.audit.evidence.erasure.who_owes import without_answer
from kvcustody.audit.evidence.processes.enforcement import monitored_periods, unnamed
from kvcustody.audit.evidence.processes.marked_processes import marked_processes
from kvcustody.audit.evidence.processes.work_periods import about, life_leaves, work_periods
from kvcustody.audit.evidence.query.evidence_columns import read
from kvcustody.audit.evidence.subjects.subject_filter import of_subjects, of_tenant
from kvcustody.audit.kinds import KINDS, SYSTEM, CopiesLocked, ErasureRequested
from kvcustody.audit.reports.document import Document, DocumentKind
from kvcustody.audit.reports.signing.document_signature import sign_document
from kvcustody.audit.store.database.signed_orders import SIGNED_LATER, orders_of
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import (
    copy_steps,
    erasure_effects,
    erasure_remains,
    erasure_rereads,
    erasure_results,
    erasures,
    receipts,
    residencies,
)
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signing_key import SigningKey

CERTIFICATE = DocumentKind("certificate", "kvcustody/erasure-certificate@1", "log", ("ledger", "checkpoint_size"))
REQUESTED = KINDS[ErasureRequested].name
_LOCKED = KINDS[CopiesLocked].name
SALT_BYTES = 32
LIMITS = (
    "it covers memory and tiers that the named workers manage; not copies outside of them",
    "`sampled` and `retired` blocks were overwritten and not all read back; only `full` ones were",
    "a process whose start is not carried here is not shown: an export of the system log has them all",
    "a copy whose key is destroyed opens for nobody; its bytes are gone where it is `unlinked` or `zeroed`",
    "custody of a process that died is unproven: its memory went back to the driver and was not re-read",
    "while a worker monitors, requests that its policy would refuse may read a block before it ends: "
    "`request-monitored` leaves say how much",
)


class SelectorOpening(NamedTuple):
    """The opening of the commitment: the salt and the selector's text. It belongs to the requester."""

    salt: str
    selector: str

    def commitment(self) -> str:
        """SHA-256 over salt and text."""
        return hashlib.sha256(bytes.fromhex(self.salt) + self.selector.encode()).hexdigest()


def new_opening(selector: str) -> SelectorOpening:
    """Return an opening with a fresh random salt."""
    return SelectorOpening(secrets.token_hex(SALT_BYTES), selector)


def issue(connection: Connection, erasure: str, key: SigningKey, opening: SelectorOpening, *, now_us: int) -> Document:
    """Return the signed certificate of an erasure as of `now_us` (UTC).

    `key` is the ledger's own. Raises `LedgerError` for an unknown erasure and `ProofError` where a leaf is not under a
    signed checkpoint yet: ask again after the next one.
    """
    facts = certificate_facts(connection, erasure, opening.commitment(), now_us)
    return sign_document(connection, CERTIFICATE.document(facts), key)


def certificate_facts(
    connection: Connection, erasure: str, commitment: str, now_us: int, *, is_proved: bool = True
) -> dict[str, Any]:
    """Return a certificate's facts; raises like `issue`. Without `is_proved` its leaves have no proofs."""
    erasure_status = status(connection, erasure, now_us)
    places = _places(connection, erasure, erasure_status)
    proofs = LedgerProofs(connection)
    note = proofs.signed()
    carried: list[dict[str, Any]] = []
    heads: dict[str, str] = {}
    for log, idx in sorted(places):
        heads.setdefault(log, "")
        path: list[str] = []
        if is_proved:
            shown = proofs.inclusion(log, idx, as_of=note.size)
            heads[log] = shown.head.to_bytes().decode()
            path = [base64.b64encode(hash_).decode() for hash_ in shown.path]
        leaf = proofs.leaf(log, idx)
        carried.append({"log": log, "idx": idx, "leaf": leaf.decode(), "path": path})
    bodies = [orjson.loads(one["leaf"]) for one in carried]
    figures = figures_of(bodies, erasure)
    why = _not_followed(connection, carried, erasure)
    is_shown = not (why or figures.unproven or waiting_copies(figures.as_dict()) or without_answer(bodies, erasure))
    facts = {
        "erasure": erasure,
        "issued_us": now_us,
        "outcome": erasure_status.outcome if is_shown else "partial",
        "request": erasure_status.request._asdict() | {"commitment": commitment},
        "marked": [one._asdict() for one in marked_processes(bodies)],
        "workers": [answer._asdict() for answer in erasure_status.answers],
        "waiting": list(erasure_status.waiting),
        "unreachable": list(erasure_status.unreachable),
        "monitored": [one._asdict() for one in unnamed(monitored_periods(connection, 0, now_us))],
        "holds": [
            one._asdict() for one in holds_among(bodies, erasure_status.request.tenant, erasure_status.request.subject)
        ],
        "population": _population(connection, erasure_status, figures),
        "figures": figures.as_dict(),
        "ledger": {"checkpoint_size": note.size, "heads": heads},
        "leaves": carried,
        "limits": list(LIMITS),
    }
    names = ended_names(bodies, erasure)
    if names is not None:
        facts["routers"] = names
    if why:
        facts["order"] = why
    return facts


def _not_followed(connection: Connection, carried: list[dict[str, Any]], erasure: str) -> str:
    """Why nobody follows the request of an erasure; empty where it counts."""
    signed = orders_of(connection)
    for leaf in [] if signed is None else [one["leaf"].encode() for one in carried]:
        body = orjson.loads(leaf)
        if body["kind"] == REQUESTED and body["erasure"] == erasure:
            refused = signed.refusal(leaf) if signed is not None else None
            if refused is not None:
                return refused.why
    return ""


def _population(connection: Connection, found: Status, figures: ErasureFigures) -> dict[str, Any]:
    """Return how many residencies of the selector the ledger has from before the request, with the query used."""
    requested, column = found.request, residencies.c
    where = [column.part == 1, column.opened_us <= requested.at_us, has_leaf(residencies)]
    text = "residencies with part = 1 and opened_us <= requested"
    if requested.tenant is not None:
        text += " and tenant = requested"
    if requested.selector in ("subject", "session"):
        text += f" and {requested.selector} = pseudonym"
    if requested.selector == "subject" and requested.tenant is not None and requested.subject is not None:
        where += of_subjects(connection, requested.tenant, [requested.subject])
    else:
        if requested.tenant is not None:
            where.append(of_tenant(requested.tenant))
        if requested.selector in ("subject", "session"):
            where.append(column[requested.selector] == getattr(requested, requested.selector))
    known = requested.selector in ("tenant", "subject", "session")
    count = connection.scalar(select(func.count()).select_from(residencies).where(*where)) if known else None
    return {
        "residencies": count,
        "query": text if known else "domains and models are in no residency's row",
        "units": figures.units,
    }


def _places(connection: Connection, erasure: str, erasure_status: Status) -> set[tuple[str, int]]:
    """Every leaf that the certificate carries: the request, what each process said, its start, and its receipts."""
    places: set[tuple[str, int]] = set()
    names = {row.id: row.name for row in connection.execute(select(logs.c.id, logs.c.name))}
    places |= _lives(connection, erasure, erasure_status)
    places |= {*_signed_later(connection, erasure)}
    places |= ended_name_leaves(connection, erasure)
    held = (connection, erasure_status.request.tenant, erasure_status.request.subject)
    places |= {(leaf.log, leaf.idx) for leaf in hold_leaves(*held)}
    for table in (erasures, erasure_effects, erasure_remains, erasure_rereads, erasure_results):
        query = select(table.c.log, table.c.idx).where(table.c.erasure == erasure, has_leaf(table))
        places |= {(names[row.log], row.idx) for row in connection.execute(query)}
    effect = read(connection, erasure_effects, (erasure_effects.c.incarnation,), erasure_effects.c.erasure == erasure)
    life = effect.column("incarnation")[effect.owner]
    for incarnation in np.unique(life).tolist():
        generations = effect.pairs.generations[life == incarnation]
        places |= _receipts(connection, incarnation, np.unique(generations), names)
    return places | _copies(connection, erasure, names)


def _signed_later(connection: Connection, erasure: str) -> Iterator[tuple[str, int]]:
    """Leaves that sign its request later (`signed_orders`, 5)."""
    leaf = events.c.leaf
    asked = select(leaf).select_from(events).join(erasures, is_leaf_of(erasures)).where(erasures.c.erasure == erasure)
    digests = {hashlib.sha256(bytes(data)).hexdigest() for data in connection.scalars(asked)}
    query = (
        select(logs.c.name, events.c.idx, leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(events.c.kind == SIGNED_LATER, has_leaf(events))
    )
    for log, idx, data in connection.execute(query):
        if orjson.loads(bytes(data))["digest"] in digests:
            yield log, idx


def _copies(connection: Connection, erasure: str, names: dict[int, str]) -> set[tuple[str, int]]:
    """Return the leaves that end copies for it, those that prove the copies' end, and those about locked copies."""
    places: set[tuple[str, int]] = set()
    destroyed = copy_steps.alias("destroyed")
    column, of = copy_steps.c, destroyed.c
    ended = and_(column.step == ENDED, column.erasure == erasure, has_leaf(copy_steps))
    proving = and_(
        of.incarnation == column.incarnation,
        of.tier == column.tier,
        of.step == DESTROYED,
        of.high >= column.low,
        of.low <= column.high,
    )
    for log, idx, leaf in connection.execute(
        select(events.c.log, events.c.idx, events.c.leaf).where(events.c.kind == _LOCKED, has_leaf(events))
    ):
        if orjson.loads(leaf)["erasure"] == erasure:
            places.add((names[log], idx))
    for query in (
        select(column.log, column.idx).where(ended),
        select(of.log, of.idx).where(has_leaf(destroyed), exists(select(column.idx).where(ended, proving))),
    ):
        places |= {(names[log], idx) for log, idx in connection.execute(query)}
    return places


def _lives(connection: Connection, erasure: str, erasure_status: Status) -> set[tuple[str, int]]:
    """Starts and ends of the processes that were at work when it was requested, that had something to say of it, or
    that replayed or generated what they recorded.
    """
    leaves = life_leaves(connection)
    periods = work_periods(leaf.body for leaf in leaves)
    query = [
        select(table.c.incarnation).where(table.c.erasure == erasure, has_leaf(table))
        for table in (erasure_effects, erasure_results)
    ]
    chosen = set(connection.scalars(select(incarnations.c.uuid).where(incarnations.c.id.in_(union(*query))))) | {
        life for life, period in periods.items() if period.at_work(erasure_status.request.at_us)
    }
    chosen |= {one.incarnation for one in marked_processes(leaf.body for leaf in leaves)}
    return {(SYSTEM, leaf.idx) for leaf in leaves if about(leaf.body) in chosen}


def _receipts(
    connection: Connection, incarnation: int, generations: Any, names: dict[int, str]
) -> set[tuple[str, int]]:
    """Return the receipts that name any of these generations."""
    if not len(generations):
        return set()
    column = receipts.c
    spans = _spans(generations)
    places: set[tuple[str, int]] = set()
    for start in range(0, len(spans), 50):
        some = [and_(column.high >= low, column.low <= high) for low, high in spans[start : start + 50]]
        where = and_(column.incarnation == incarnation, column.high > 0, or_(*some))
        found = read(connection, receipts, (column.log, column.idx), where)
        for place in np.unique(found.owner[np.isin(found.pairs.generations, generations)]).tolist():
            places.add((names[int(found.column("log")[place])], int(found.column("idx")[place])))
    return places


def _spans(generations: Any) -> list[tuple[int, int]]:
    """Consecutive generations as (first, last)."""
    cuts = np.flatnonzero(np.diff(generations) > 1)
    firsts = generations[np.concatenate(([0], cuts + 1))]
    lasts = generations[np.concatenate((cuts, [len(generations) - 1]))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
