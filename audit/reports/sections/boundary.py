"""The system boundary: the checkpoint, logs, workers, versions, policies and witnesses of a report.

1. Everything is read from leaves and checkpoints in the state, so that what happens later changes nothing.
2. Of witnesses, only what they had signed when this checkpoint was: later signatures are not part of the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.evidence.processes.enforcement import CHANGED, monitored_in, qualification
from kvcustody.audit.evidence.processes.marked_processes import history
from kvcustody.audit.evidence.processes.orders import orders_statement
from kvcustody.audit.evidence.processes.work_periods import LIVES
from kvcustody.audit.kinds import BARE, DECLARED, SILENCE, log_of, tenant_of
from kvcustody.audit.reports.leaf_counts import LeafCounts, newest_leaf_us
from kvcustody.audit.reports.section import Citation, PagePart, ReportFacts, ReportReading, Section
from kvcustody.audit.store.schema.retention import cosignatures
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signed_note import parse_note
from kvcustody.audit.tlog.witness.status import UNWITNESSED
from kvcustody.tenants import SEPARATOR

CLOSED_FOR_SILENCE, DECLARED_DEAD = " (closed for a silence", " (declared dead"


class ReportedCheckpoint(NamedTuple):
    """The root log's head, its note as text, and the times (UTC) of its newest leaf and its signature."""

    origin: str
    size: int
    root: str
    at_us: int
    signed_us: int
    note: str


class ReportedLog(NamedTuple):
    """One sub-log under the checkpoint; `root` is hexadecimal."""

    name: str
    size: int
    root: str


class StoppedTier(NamedTuple):
    """A tier's own counters of copies, recorded by its worker when it stopped."""

    tier: str
    stored: int
    ended: int
    destroyed: int


class ReportedWorker(NamedTuple):
    """One incarnation, described by its own leaves; `end` is empty while it runs according to the state."""

    name: str
    incarnation: str
    started_us: int
    software: str
    device: str
    shards: int
    blocks: int
    bytes_per_block: int
    generation: int
    end: str
    allocated: int | None
    scrubbed: tuple[int, ...]
    origin: str = ""
    tiers: tuple[StoppedTier, ...] = ()


_ACTIVATED = "activated"  # the step of a release that puts a revision into effect


class ReportedPolicy(NamedTuple):
    """A policy revision in effect, according to its worker.

    `released`: a step of a release puts this revision and document into effect. Workers hand in no such step.
    """

    revision: int
    name: str
    profile: str
    digest: str
    actor: str
    at_us: int
    released: bool


class ReportedIssuer(NamedTuple):
    """An issuer of tenants, and the form of their names: `bare` ids, or `qualified` by it."""

    issuer: str
    tenants: str
    at_us: int


class Witnessed(NamedTuple):
    """The witnesses' signatures at the time of the checkpoint; `age_us` is None if none had signed anything."""

    witnesses: tuple[str, ...]
    size: int
    age_us: int | None
    warning: str


class Boundary(NamedTuple):
    """The whole boundary. `extends` is an earlier checkpoint that a reader named, with the proof that it is a prefix.

    `history` says what in it is replayed or generated, `monitored` when the policy was not enforced for everybody in
    the period; empty: nothing, never. `orders` says who checks who gave workers their orders, and how many are signed.
    """

    checkpoint: ReportedCheckpoint
    logs: tuple[ReportedLog, ...]
    workers: tuple[ReportedWorker, ...]
    policies: tuple[ReportedPolicy, ...]
    witnessed: Witnessed
    extends: int | None
    consistency: tuple[str, ...]
    issuers: tuple[ReportedIssuer, ...] = ()
    history: str = ""
    monitored: str = ""
    orders: str = ""


def stated_policies(boundary: Boundary) -> tuple[str, ...]:
    """Return policies that workers state but no recorded release put into effect: in words, each once."""
    stated = (item for item in boundary.policies if not item.released)
    return tuple(dict.fromkeys(f"`{item.name}` revision {item.revision}" for item in stated))


def stated_tenants(boundary: Boundary) -> tuple[str, ...]:
    """Return tenants that workers name but no recorded issuer has."""
    issuers = {"" if item.tenants == BARE else item.issuer for item in boundary.issuers}
    names = (tenant_of(log.name) for log in boundary.logs if log.name.startswith(log_of("")))
    return tuple(name for name in names if name.partition(SEPARATOR)[2] not in issuers)


def read_boundary(reading: ReportReading) -> Boundary:
    """Return the boundary as of a signed checkpoint; for one tenant it names only its log and no worker's counters.

    Raises `ProofError` where the checkpoint is not signed, or the one that it should extend is later.
    """
    connection, asked, counts = reading.connection, reading.asked, reading.counts
    checkpoint, tenant, extends = asked.checkpoint, asked.tenant, asked.extends
    proofs = LedgerProofs(connection)
    head, note = proofs.checkpoint(checkpoint), proofs.signed(checkpoint)
    parsed = parse_note(note.note)
    path = [] if extends is None else proofs.root_consistency(extends, checkpoint)
    heads = [log for log in proofs.logs(as_of=checkpoint) if tenant is None or log.name == log_of(tenant)]
    return Boundary(
        ReportedCheckpoint(
            parsed.text.splitlines()[0],
            head.size,
            head.root.hex(),
            newest_leaf_us(connection, checkpoint),
            note.at_us,
            note.note.decode(),
        ),
        tuple(ReportedLog(log.name, log.head.size, log.head.root.hex()) for log in heads),
        tuple(_without_counters(item) if tenant else item for item in _workers(counts, named=tenant is None)),
        tuple(_policies(counts)),
        _witnessed(connection, checkpoint, note.at_us),
        extends,
        tuple(item.hex() for item in path),
        tuple(_issuers(counts, tenant)),
        history(reading.marked),
        qualification(monitored_in(counts.of_kind(*LIVES, CHANGED), reading.since_us, reading.until_us)),
        orders_statement(connection, reading.state, counts.of_kind(*LIVES), tenant),
    )


def _issuers(overview: LeafCounts, tenant: str | None) -> Iterator[ReportedIssuer]:
    """Whose tenants the report may be about; of one tenant, its own issuer alone."""
    own = None if tenant is None else tenant.partition(SEPARATOR)[2]
    for body in overview.of_kind("issuer-assigned"):
        if own is None or own == ("" if body["tenants"] == BARE else body["issuer"]):
            yield ReportedIssuer(body["issuer"], body["tenants"], int(body["at_us"]))


def _workers(overview: LeafCounts, *, named: bool) -> list[ReportedWorker]:
    """Every process that announced memory; `named`: with who closed one, and why."""
    workers: dict[str, ReportedWorker] = {}
    for body in overview.of_kind(*LIVES):
        uuid = body.get("of_incarnation") or body["incarnation"]
        if body["kind"] == "worker-started":
            workers[uuid] = ReportedWorker(
                body["worker"],
                uuid,
                int(body["at_us"]),
                body["software"],
                body["device"],
                int(body["shards"] or 0),
                int(body["blocks"] or 0),
                int(body["bytes_per_block"] or 0),
                int(body.get("generation") or 0),
                "",
                None,
                (),
                str(body.get("origin", "")),
            )
        elif uuid in workers and body["kind"] == "worker-stopped":
            counters = tuple(int(number) for number in body["scrubbed"])
            workers[uuid] = workers[uuid]._replace(
                end=body["cause"],
                allocated=int(body["allocated"]),
                scrubbed=counters,
                tiers=_stopped_tiers(body),
            )
        elif uuid in workers and body["kind"] == "worker-died":
            workers[uuid] = workers[uuid]._replace(end=f"died{_closed_by(body, named=named)}: {body['teardown']}")
        elif uuid in workers:
            workers[uuid] = workers[uuid]._replace(end="", allocated=None, scrubbed=(), tiers=())
    return list(workers.values())


def _stopped_tiers(body: dict[str, Any]) -> tuple[StoppedTier, ...]:
    """Leaves of earlier versions have none."""
    counters = (map(int, body.get(f"copies_{step}", ())) for step in ("stored", "ended", "destroyed"))
    return tuple(map(StoppedTier, body.get("tiers", ()), *counters))


def _closed_by(body: dict[str, Any], *, named: bool) -> str:
    """Who closed a dead process, where it was no successor."""
    if body.get("closed_by") == SILENCE:
        days = int(body["bound_seconds"]) / 86_400
        return f"{CLOSED_FOR_SILENCE} of {days:g} days{' by ' + str(body['actor']) if named else ''})"
    if body.get("closed_by") == DECLARED:
        by = f" by {body['actor']} and {body['approver']}: {body['reason']}" if named else " by two people"
        return f"{DECLARED_DEAD}{by})"
    return ""


def deaths(workers: Iterable[ReportedWorker]) -> tuple[int, int, int]:
    """Return how many processes ended without recording it: closed by a successor, for silence, or declared dead."""
    ends = [worker.end for worker in workers if worker.end.startswith("died")]
    silent, declared = (
        sum(end.startswith("died" + how) for end in ends) for how in (CLOSED_FOR_SILENCE, DECLARED_DEAD)
    )
    return len(ends) - silent - declared, silent, declared


def _without_counters(worker: ReportedWorker) -> ReportedWorker:
    """Return a worker without its counters, which cover all its tenants together."""
    return worker._replace(blocks=0, generation=0, allocated=None, scrubbed=(), tiers=())


def _policies(overview: LeafCounts) -> list[ReportedPolicy]:
    released = {
        (int(body["revision"]), body["digest"])
        for body in overview.of_kind("release-step")
        if body["action"] == _ACTIVATED
    }
    return [
        ReportedPolicy(
            int(body["revision"]),
            body["name"],
            body["profile"],
            body["digest"],
            body["actor"],
            int(body["at_us"]),
            (int(body["revision"]), body["digest"]) in released,
        )
        for body in overview.of_kind("policy-activated")
    ]


def _witnessed(connection: Connection, checkpoint: int, signed_us: int) -> Witnessed:
    table = cosignatures.c
    before = (table.size <= checkpoint, table.at_us <= signed_us)
    rows = connection.execute(
        select(table.witness, func.max(table.size), func.max(table.at_us)).where(*before).group_by(table.witness)
    ).all()
    if not rows:
        return Witnessed((), 0, None, UNWITNESSED)
    names = tuple(sorted(row[0] for row in rows))
    newest, at_us = max(row[1] for row in rows), max(row[2] for row in rows)
    return Witnessed(
        names,
        newest,
        signed_us - at_us,
        "what was written after the last witnessed checkpoint is unwitnessed",
    )


def _disagreements(report: ReportFacts) -> Iterator[str]:
    if report[SECTION].checkpoint.size != report.asked.checkpoint:
        yield "the report was asked for as of another checkpoint"
    if report[SECTION].extends != report.asked.extends:
        yield "the report was asked to extend another checkpoint"
    if report.asked.since_us >= report.asked.until_us:
        yield "the period ends before it begins"


SECTION: Section[Boundary] = Section(
    "boundary",
    "System boundary",
    read_boundary,
    order=50,
    about=(
        "the signed checkpoint, workers with software and device, policies with digests and whether a step of "
        "a release on record put them into effect, the policy's proof"
    ),
    part=PagePart.FRONT,
    fields={"boundary": "logs, workers, policies, issuers and witnesses, but for the checkpoint's own note"},
    cited={
        "checkpoint": Citation("System boundary", lambda report: True),
        "policies": Citation("Policies", lambda report: bool(report[SECTION].policies)),
        "witness": Citation("Witnesses", lambda report: report[SECTION].witnessed.age_us is not None),
    },
    disagreements=_disagreements,
)
