"""The recipients of a tenant's data: readers by grant, group or segment, each up to the granted classification.

1. They follow from the policies that processes enforced in a period (`policies_in_period`). A policy's document counts
   if its digest is the stated one. If nobody has the document, nothing is known about the policy, and it is named.
2. A way across counts where it was open at some moment of the period: after its first day, before it ended or was taken
   back everywhere.
3. An actual reading is recorded in a `decision` leaf of the first use under a revision (`first_use_us`). It may be of
   any grant of the owner's to this reader, or of any segment; the leaf does not record which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.evidence.processes.policies_in_period import PeriodPolicy
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import decisions
from kvcustody.governance.release.policies_in_effect import policy_of_document
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.policies.document.model import Policy

EVERY_TENANT = "every admitted tenant"


class KnownPolicy(NamedTuple):
    """A policy of a period with its document; None where no document is known."""

    period: PeriodPolicy
    policy: Policy | None


class GrantedRecipient(NamedTuple):
    """A tenant that could reuse another owner's blocks. Times are UTC microseconds; `until_us` 0: it does not end.

    `first_use_us` 0: no leaf says that it read anything.
    """

    owner: str
    reader: str
    by: str
    at_most: str
    reason: str
    policy_digest: str
    since_us: int
    until_us: int
    first_use_us: int


def known_policies(periods: Iterable[PeriodPolicy], state: ReleaseState | None = None) -> tuple[KnownPolicy, ...]:
    """Return each policy with its document, from a worker's record or a revision of the release (rule 1)."""
    policies = []
    for one in periods:
        policy = policy_of_document(one.document, one.digest) if one.document else None
        proposal = None if state is None else state.proposals.get(one.revision)
        if policy is None and proposal is not None and proposal.manifest.digest == one.digest:
            policy = proposal.policy
        policies.append(KnownPolicy(one, policy))
    return tuple(policies)


def recipients_in(
    connection: Connection,
    policies: Sequence[KnownPolicy],
    since_us: int,
    until_us: int,
    *,
    owner: str | None = None,
    as_of: AsOf | None = None,
) -> tuple[GrantedRecipient, ...]:
    """Return every recipient of the period, for one owner or for all."""
    used = _first_uses(connection, as_of)
    found = set()
    for known in policies:
        if known.policy is not None:
            found |= set(_ways(known.period, known.policy, since_us, until_us, used))
    return tuple(sorted(one for one in found if owner is None or one.owner == owner))


class _DeclaredWay(NamedTuple):
    """A way across, as a policy declares it; `ids` are those that taking it back may name."""

    owner: str
    reader: str
    id: str
    kind: str
    level: int
    reason: str
    since_us: int
    until_us: int | None
    ids: frozenset[str]


def _ways(
    period: PeriodPolicy,
    policy: Policy,
    since_us: int,
    until_us: int,
    used: dict[tuple[str, str, str], int],
) -> Iterator[GrantedRecipient]:
    """The ways of one policy that were open in the period (rule 2)."""
    begins_us = max(since_us, period.since_us)
    for way in _declared(policy):
        last_us = _end(period, way)
        if max(begins_us, way.since_us) >= min(until_us, last_us or until_us):
            continue
        through = "segment" if way.kind == "segment" else "grant"
        uses = [
            at_us
            for (owner, reader, via), at_us in used.items()
            if (owner, via) == (way.owner, through) and way.reader in (reader, EVERY_TENANT)
        ]
        yield GrantedRecipient(
            way.owner,
            way.reader,
            f"{way.kind} {way.id}",
            policy.classifications[way.level],
            way.reason,
            period.digest,
            way.since_us,
            last_us,
            min(uses, default=0),
        )


def _declared(policy: Policy) -> Iterator[_DeclaredWay]:
    for grant in (*policy.grants, *policy.group_grants()):
        ids = frozenset({grant.id, grant.group or grant.id})
        kind = "group" if grant.group is not None else "grant"
        parts = (grant.at_most, grant.reason, grant.from_us or 0, grant.until_us, ids)
        yield _DeclaredWay(grant.owner, grant.reader, grant.id, kind, *parts)
    for segment in policy.segments:
        for reader in (EVERY_TENANT,) if segment.tenants is None else segment.tenants:
            parts = (segment.level, "declared prompt prefix", 0, segment.expires_us, frozenset({segment.id}))
            if reader != segment.owner:
                yield _DeclaredWay(segment.owner, reader, segment.id, "segment", *parts)


def _end(period: PeriodPolicy, way: _DeclaredWay) -> int:
    """When a way ended under this policy: by its date, taken back everywhere, or with the policy; 0: it has not."""
    ends = [period.revoked_us[id_] for id_ in way.ids if id_ in period.revoked_us]
    ends += [end for end in (way.until_us, period.until_us) if end is not None]
    return min(ends, default=0)


def _first_uses(connection: Connection, as_of: AsOf | None) -> dict[tuple[str, str, str], int]:
    column = decisions.c
    query = (
        select(column.owner, column.reader, column.via, func.min(column.at_us))
        .where(
            column.action == "reuse",
            column.effect == "permit",
            column.owner != column.reader,
            has_leaf(decisions),
        )
        .group_by(column.owner, column.reader, column.via)
    )
    if as_of is not None:
        query = query.where(as_of.has(decisions))
    return {(row[0], row[1], row[2]): row[3] for row in connection.execute(query)}
