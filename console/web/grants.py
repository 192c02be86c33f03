"""Grants: who may read whose blocks, up to what, and until when: owners down, readers across."""

from __future__ import annotations

from typing import NamedTuple

from starlette.responses import Response

from kvcustody.console.web.standing import active_policy, release_of
from kvcustody.console.web.visit import Visit
from kvcustody.governance.service.roles import Action
from kvcustody.policies.ir import Policy

_SOON_US = 30 * 86_400_000_000
_MATRIX_MAX = 24


class Way(NamedTuple):
    """A grant or a segment that opens an owner's blocks to a reader; `until_us` None: it does not end."""

    id: str
    kind: str
    owner: str
    reader: str
    at_most: str
    until_us: int | None
    state: str
    reason: str
    line: int


def show(visit: Visit) -> Response:
    """The matrix of the active revision, and every way in a table."""
    visit.caller.must(Action.READ_POLICY)
    state = release_of(visit)
    policy = active_policy(state)
    revoked = frozenset() if state is None else state.revoked
    ways = () if policy is None else ways_of(policy, revoked, visit.service.clock.utc_us())
    live = [way for way in ways if way.state not in ("expired", "revoked")]
    owners = sorted({way.owner for way in live})
    readers = sorted({way.reader for way in live})
    return visit.page(
        "grants.html",
        "Grants",
        revision=0 if state is None else state.active_revision,
        ways=ways,
        owners=owners,
        readers=readers,
        cells={
            (o, r): [way for way in live if (way.owner, way.reader) == (o, r)]
            for o in owners
            for r in readers
        },
        fits=len(owners) <= _MATRIX_MAX and len(readers) <= _MATRIX_MAX,
    )


def ways_of(policy: Policy, revoked: frozenset[str], now_us: int) -> tuple[Way, ...]:
    """Every way across a tenant boundary that the policy declares."""
    found = []
    for grant in (*policy.grants, *policy.group_grants()):
        state = _state(grant.id, grant.from_us, grant.until_us, revoked, now_us)
        kind = "group" if "~" in grant.id else "grant"
        at_most = policy.classifications[grant.at_most]
        found.append(
            Way(
                grant.id,
                kind,
                grant.owner,
                grant.reader,
                at_most,
                grant.until_us,
                state,
                grant.reason,
                grant.mark.line,
            )
        )
    for segment in policy.segments:
        readers = ("every tenant",) if segment.tenants is None else segment.tenants
        state = _state(segment.id, None, segment.expires_us, revoked, now_us)
        level = policy.classifications[segment.level]
        found += [
            Way(
                segment.id,
                "segment",
                segment.owner,
                reader,
                level,
                segment.expires_us,
                state,
                "",
                segment.mark.line,
            )
            for reader in readers
            if reader != segment.owner
        ]
    return tuple(sorted(found))


def _state(id_: str, from_us: int | None, until_us: int | None, revoked: frozenset[str], now_us: int) -> str:
    if id_ in revoked:
        return "revoked"
    if until_us is not None and until_us <= now_us:
        return "expired"
    if from_us is not None and from_us > now_us:
        return "not yet"
    return "ends soon" if until_us is not None and until_us - now_us < _SOON_US else "live"
