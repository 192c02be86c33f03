"""Policies that the running processes enforce, released or from a file, read only from signed leaves.

1. A process enforces the policy of its last `policy-activated` leaf. For a stage, it also enforces that of a
   `policy-staged` leaf since then. The grants that its `grants-revoked` leaves name are excluded. If two processes of a
   worker have no recorded end, the newer one counts.
2. A document is put together from `policy-text` leaves. Those prove nothing, so whoever uses the document compares its
   digest with the one that the activation states.
3. A process that only replays or generates history serves nobody and is left out. A simulated one serves now and
   counts.
4. A process that was killed counts until its end is recorded, because no leaf shows that it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.evidence.processes.marked_processes import marked_processes
from kvcustody.audit.evidence.processes.work_periods import (
    Body,
    WorkPeriod,
    at_work,
    life_leaves,
    work_periods,
)
from kvcustody.audit.kinds import SIMULATED, SYSTEM
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, incarnations, logs

POLICY_KINDS = ("policy-activated", "policy-staged", "grants-revoked", "policy-text")


class RunningPolicy(NamedTuple):
    """A policy that a process enforces, for everybody or a `stage` in words. Times are UTC microseconds.

    `document` is what its leaves hold of it (rule 2), empty where they hold none or not all. Without a `digest` it is
    not on record which policy it is.
    """

    worker: str
    incarnation: str
    revision: int
    name: str
    digest: str
    since_us: int
    stage: str = ""
    document: str = ""
    revoked: frozenset[str] = frozenset()


def running_policies(bodies: Iterable[Body], periods: Mapping[str, WorkPeriod]) -> tuple[RunningPolicy, ...]:
    """Return the policies that processes at work enforce, by the worker's name; other leaves are ignored (rule 1)."""
    every = sorted((body for body in bodies if body["kind"] in POLICY_KINDS), key=lambda body: int(body["sequence"]))
    texts = documents_of(every)
    policies: list[RunningPolicy] = []
    for worker, life in _newest(periods).items():
        mine = [body for body in every if body["incarnation"] == life]
        revoked = frozenset(id_ for body in mine if body["kind"] == "grants-revoked" for id_ in body["ids"])
        base = RunningPolicy(worker, life, 0, "", "", periods[life].started_us, revoked=revoked)
        staged: RunningPolicy | None = None
        for body in mine:
            if body["kind"] == "policy-activated":
                base, staged = _said(base, body, texts), None
            elif body["kind"] == "policy-staged":
                staged = _said(base, body, texts)._replace(stage=str(body["stage"]))
        policies += [base] if staged is None else [base, staged]
    return tuple(policies)


def read_running_policies(connection: Connection) -> tuple[RunningPolicy, ...]:
    """Return the policies from the system log; raises like `life_leaves`. Only documents of processes at work are
    read.
    """
    leaves = [leaf.body for leaf in life_leaves(connection)]
    marked = {one.incarnation for one in marked_processes(leaves) if one.origin != SIMULATED}
    periods = {life: period for life, period in work_periods(leaves).items() if life not in marked}
    lives = list(_newest(periods).values())
    query = (
        select(events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .join(incarnations, incarnations.c.id == events.c.incarnation)
        .where(
            logs.c.name == SYSTEM,
            events.c.kind.in_(POLICY_KINDS),
            has_leaf(events),
            incarnations.c.uuid.in_(lives),
        )
    )
    bodies = [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)] if lives else []
    return running_policies(bodies, periods)


def _newest(periods: Mapping[str, WorkPeriod]) -> dict[str, str]:
    """Return the process at work of each worker, by the worker's name (rule 1)."""
    lives = sorted(at_work(periods), key=lambda life: (periods[life].started_us, life))
    newest = {periods[life].worker: life for life in lives}
    return {worker: newest[worker] for worker in sorted(newest)}


def _said(base: RunningPolicy, body: Body, texts: Mapping[tuple[str, str], str]) -> RunningPolicy:
    digest = str(body["digest"])
    return base._replace(
        revision=int(body["revision"]),
        name=str(body["name"]),
        digest=digest,
        since_us=int(body["at_us"]),
        document=texts.get((base.incarnation, digest), ""),
    )


def documents_of(bodies: Iterable[Body]) -> dict[tuple[str, str], str]:
    """Return the documents whose pieces are complete, by process and stated digest."""
    pieces: dict[tuple[str, str], dict[int, str]] = {}
    wanted: dict[tuple[str, str], int] = {}
    for body in bodies:
        if body["kind"] == "policy-text":
            key = (str(body["incarnation"]), str(body["digest"]))
            wanted[key] = int(body["of"])
            pieces.setdefault(key, {})[int(body["number"])] = str(body["text"])
    return {
        key: "".join(pieces[key][number] for number in range(1, of + 1))
        for key, of in wanted.items()
        if pieces[key].keys() >= set(range(1, of + 1))
    }
