"""Checks workers' leaves against the ledger: what a worker holds, and which orders it was given.

1. A worker may end a tenant's custody only if it recorded a request, a key or a copy of that tenant before. That record
   is in a leaf that is here and names whom it served. A tenant that a worker serves has an issuer that the ledger
   knows.
2. An owner is the reader's own tenant, or a tenant that the ledger knows from a leaf that is not such a claim.
3. Where sequences before the leaf are missing here, the leaves that support it may be in a spill that is handed in
   later. Its claim is then undecided: the leaf is accepted, because evidence is not thrown away, but nothing follows
   from it. Each later claim is checked against stored leaves as if this one had never been made. `fsck` lists claims
   that no leaf has supported since (`life_rows.unshown_holdings`).
4. An erasure, a case or an order on enforcement must be recorded, and must agree with what the leaf states about it.
5. An actor is the worker itself, a part of it, or a person. The person gave the order or approved the revision that the
   leaf follows.
6. A result is kept in memory, because nothing in the ledger is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

from sqlalchemy import Connection, Engine, exists, or_, select

from kvcustody.audit.evidence.cases.case_record import StepKind
from kvcustody.audit.evidence.cases.read_cases import read_case
from kvcustody.audit.evidence.erasure.requests_and_answers import request
from kvcustody.audit.evidence.processes.enforcement import ENFORCE, order_at
from kvcustody.audit.evidence.processes.sequence_gaps import lacks_below
from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.kinds import OWN_ACTORS, log_of
from kvcustody.audit.kinds.event import FieldMeaning
from kvcustody.audit.leaf.batch import LeafBatch, LeafGroup
from kvcustody.audit.leaf.leaf_schema import CLAIMING_KINDS, SCHEMA_OF_NAME, SERVING_KINDS
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, incarnations, logs, workers
from kvcustody.errors import LedgerError
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.governance.service.ingest.check_leaves import Sender, refused_field
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.logger import get_logger
from kvcustody.tenants import SEPARATOR
from kvcustody.times import SECOND_US

_log = get_logger(__name__)
_KEPT_MAX = 1 << 17
_OF_ORDER = ("mode", "tenants", "share_millionths", "until_seconds", "actor")
_OF_REVISION = ("revision", "digest")
_NOBODY = frozenset({None, ""})


class Fact(NamedTuple):
    """A fact that a leaf presupposes: `ask` finds out whether the ledger has it."""

    name: tuple[Hashable, ...]
    ask: Callable[[Connection], bool]


class WorkerClaims:
    """Checks parsed batches; thread-safe."""

    def __init__(self, engine: Engine, released: Callable[[], ReleaseState | None]) -> None:
        """`released`: the release of policies; None where none are released here."""
        self._engine = engine
        self._released = released
        self._found: set[tuple[Hashable, ...]] = set()  # names of facts that the ledger has stated (rule 6)

    def check(self, sender: Sender, batch: LeafBatch) -> None:
        """Raise `refused-leaf` for the first leaf that claims what its worker neither holds nor was ordered."""
        served = {name for group in batch.groups for name in _column(group, FieldMeaning.SERVED)}
        self._keep({("held", sender.worker, name) for name in served})
        new = [
            (group.places[at], group, key, fact)
            for group in batch.groups
            for key, meaning in SCHEMA_OF_NAME[group.kind].meanings.items()
            if meaning in self._READ and key in group.columns
            for at, fact in self._READ[meaning](self, sender, group, key)
            if fact.name not in self._found
        ]
        if not new:
            return
        first = min(batch.sequences)
        with self._engine.connect() as connection:
            for place, group, key, fact in sorted(new, key=lambda row: row[0]):
                if fact.name in self._found:
                    continue
                if fact.ask(connection):
                    self._keep({fact.name})
                elif not (fact.name[0] in _MAY_BE_SPILLED and lacks_below(connection, sender.incarnation, first)):
                    raise _refused(place, group, key)
                else:  # rule 3
                    _log.warning("a claim is not known", worker=sender.worker, claim=[*map(str, fact.name)])

    def _keep(self, facts: set[tuple[Hashable, ...]]) -> None:
        if len(self._found) > _KEPT_MAX:
            self._found = set()
        self._found |= facts

    # -- what a column takes for granted: rows of its group, each with a fact --------------------------------

    def _held(self, sender: Sender, group: LeafGroup, key: str) -> Iterator[tuple[int, Fact]]:
        for at, (tenant,) in _distinct(group, key):
            if tenant not in _NOBODY:
                ask = partial(_has_leaves, worker=sender.worker, tenant=tenant)
                yield at, Fact(("held", sender.worker, tenant), ask)

    def _served(self, sender: Sender, group: LeafGroup, key: str) -> Iterator[tuple[int, Fact]]:
        column = group.columns[key]
        for tenant in {name for name in set(column) if name and SEPARATOR in name}:
            issuer = tenant.partition(SEPARATOR)[2]
            yield column.index(tenant), Fact(("issuer", issuer), partial(_is_assigned, issuer=issuer))

    def _owner(self, sender: Sender, group: LeafGroup, key: str) -> Iterator[tuple[int, Fact]]:
        for at, (owner,) in _distinct(group, key):
            if ("held", sender.worker, owner) not in self._found:
                yield at, Fact(("known", owner), partial(_is_known, tenant=owner))

    def _erasure(self, sender: Sender, group: LeafGroup, key: str) -> Iterator[tuple[int, Fact]]:
        is_exact = SCHEMA_OF_NAME[group.kind].meanings["tenant"] is FieldMeaning.OF_ORDER
        for at, (erasure, tenant) in _distinct(group, key, "tenant"):
            if erasure or is_exact:
                ask = partial(_is_asked, erasure=erasure, tenant=tenant, is_exact=is_exact)
                yield at, Fact(("erasure", erasure, tenant, is_exact), ask)

    def _case(self, sender: Sender, group: LeafGroup, key: str) -> Iterator[tuple[int, Fact]]:
        for at, (case_id, tenant) in _distinct(group, key, "tenant"):
            yield at, Fact(("case", case_id, tenant), partial(_restricts, case_id=case_id, tenant=tenant))

    def _order(self, sender: Sender, group: LeafGroup, key: str) -> Iterator[tuple[int, Fact]]:
        for at, number in enumerate(group.columns[key]):
            about = {name: group.columns[name][at] for name in _OF_ORDER}
            about["tenants"] = tuple(about["tenants"])
            ask = partial(_is_ordered, worker=sender.worker, number=number, **about)
            yield at, Fact(("order", sender.worker, number, *about.values()), ask)

    def _actor(self, sender: Sender, group: LeafGroup, key: str) -> Iterator[tuple[int, Fact]]:
        if FieldMeaning.ORDER in SCHEMA_OF_NAME[group.kind].meanings.values():
            return  # the order says who gave it
        own, more = _own_actors(sender.worker), [name for name in _OF_REVISION if name in group.columns]
        for at, (actor, *about) in _distinct(group, key, *more):
            if actor not in own:
                yield (
                    at,
                    Fact(
                        ("actor", actor, *about),
                        partial(self._approved, actor=actor, **dict(zip(more, about, strict=True))),
                    ),
                )

    def _approved(self, connection: Connection, *, actor: str, revision: int = 0, digest: str = "") -> bool:
        """Whether this approver put a revision into effect."""
        state = self._released()
        proposal = None if state is None else state.proposals.get(revision)
        if proposal is None or proposal.approval is None:
            return False
        return proposal.approval.approver == actor and digest in ("", proposal.manifest.digest)

    _READ: ClassVar[dict[Any, Callable[[Any, Sender, LeafGroup, str], Iterator[tuple[int, Fact]]]]] = {
        FieldMeaning.SERVED: _served,
        FieldMeaning.HELD: _held,
        FieldMeaning.OWNER: _owner,
        FieldMeaning.ERASURE: _erasure,
        FieldMeaning.CASE: _case,
        FieldMeaning.ORDER: _order,
        FieldMeaning.ACTOR: _actor,
    }


_MAY_BE_SPILLED = frozenset({"held", "known"})


def _column(group: LeafGroup, meaning: FieldMeaning) -> set[str | None]:
    meanings = SCHEMA_OF_NAME[group.kind].meanings
    return {value for key, of in meanings.items() if of is meaning for value in group.columns[key]}


def _distinct(group: LeafGroup, *keys: str) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """The values of columns, row by row, each with the first row that has it."""
    rows = list(zip(*(group.columns[key] for key in keys), strict=True))
    first = dict(zip(reversed(rows), range(len(rows) - 1, -1, -1), strict=True))
    for values, at in first.items():
        yield at, values


def _refused(place: int, group: LeafGroup, key: str) -> ProblemError:
    meaning = SCHEMA_OF_NAME[group.kind].meanings[key]
    assert isinstance(meaning, FieldMeaning)
    value = group.columns[key][list(group.places).index(place)]
    problem = refused_field(group.kind, key, value, meaning.value)
    return ProblemError("refused-leaf", f"leaf {place} {problem.message}", leaf=place, **problem.operands)


def _own_actors(worker: str) -> frozenset[str]:
    return OWN_ACTORS | {worker}


# -- what the ledger says ---------------------------------------------------------------------------------------------


def _has_leaves(connection: Connection, worker: str, tenant: str) -> bool:
    """Whether leaves of a worker in a tenant's log say whom it served."""
    lives = select(incarnations.c.id).join(workers, workers.c.id == incarnations.c.worker)
    in_log = exists().where(
        events.c.log == logs.c.id,
        events.c.incarnation.in_(lives.where(workers.c.name == worker)),
        events.c.kind.in_(sorted(SERVING_KINDS)),
        has_leaf(events),
    )
    query = select(logs.c.id).where(logs.c.name == log_of(tenant), in_log)
    return connection.scalar(query) is not None


def _is_assigned(connection: Connection, issuer: str) -> bool:
    """Whether an issuer of tenants is on record."""
    return known_issuers(connection).knows(issuer)


def _is_known(connection: Connection, tenant: str) -> bool:
    """Whether a tenant has a log that is more than claims about it (or whose content retention dropped)."""
    there = exists().where(events.c.log == logs.c.id, has_leaf(events))
    shown = there.where(events.c.kind.not_in(sorted(CLAIMING_KINDS)))
    query = select(logs.c.id).where(logs.c.name == log_of(tenant), or_(shown, ~there))
    return connection.scalar(query) is not None


def _is_asked(connection: Connection, erasure: str, tenant: str | None, is_exact: bool) -> bool:
    """Whether an erasure was asked for, of this tenant; unless `is_exact`, one of everybody is of each tenant too."""
    try:
        asked = request(connection, erasure)
    except LedgerError:
        return False
    return asked.tenant == tenant or (asked.tenant is None and not is_exact)


def _restricts(connection: Connection, case_id: str, tenant: str) -> bool:
    """Whether a case of this tenant has restricted a subject's processing."""
    try:
        case = read_case(connection, case_id)
    except LedgerError:
        return False
    return case.opened.tenant == tenant and case.last(StepKind.RESTRICT) is not None


def _is_ordered(
    connection: Connection,
    worker: str,
    number: int,
    mode: str,
    tenants: tuple[str, ...],
    share_millionths: int,
    until_seconds: int,
    actor: str,
) -> bool:
    """Whether an order on enforcement says this, or a worker enforces all the same."""
    order, said = order_at(connection, number), (mode, tenants, share_millionths, until_seconds * SECOND_US)
    enforces = said == (ENFORCE, (), 0, 0)
    if order is None:
        return number == 0 and enforces and actor in _own_actors(worker)
    ordered = (order.mode, order.tenants, order.share_millionths, order.until_us)
    return actor == order.actor and (enforces or said == ordered)
