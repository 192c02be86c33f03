"""The openings across tenants that a policy declares: its grants, its groups' grants and its segments."""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.policies.document.model import Policy
from kvcustody.policies.table.crossing import Barriers
from kvcustody.times import DAY_US

_SOON_US = 30 * DAY_US
OVER = ("expired", "revoked", "opens nothing")


class DeclaredOpening(NamedTuple):
    """A grant or a segment that opens an owner's blocks to a reader; `until_us` None: it does not end.

    `kind`: `grant`, `group` or `segment`. `state`: `live`, `ends soon`, `not yet`, `expired`, `revoked` or `opens
    nothing` (its owner has no such blocks, or labels differ). `line` is where the policy's document declares it.
    """

    id: str
    kind: str
    owner: str
    reader: str
    at_most: str
    until_us: int | None
    state: str
    reason: str
    line: int


def declared_openings(policy: Policy, revoked: frozenset[str], now_us: int) -> tuple[DeclaredOpening, ...]:
    """Return every opening across tenants that the policy declares."""
    openings, barriers = [], Barriers(policy)
    for grant in (*policy.grants, *policy.group_grants()):
        state = _state({grant.id, grant.group or grant.id}, grant.from_us, grant.until_us, revoked, now_us)
        if state not in OVER and barriers.of(grant, grant.reader):
            state = "opens nothing"
        kind = "group" if "~" in grant.id else "grant"
        at_most = policy.classifications[grant.at_most]
        parts = (grant.owner, grant.reader, at_most, grant.until_us, state, grant.reason, grant.mark.line)
        openings.append(DeclaredOpening(grant.id, kind, *parts))
    for segment in policy.segments:
        readers = ("every tenant",) if segment.tenants is None else segment.tenants
        state = _state({segment.id}, None, segment.expires_us, revoked, now_us)
        level = policy.classifications[segment.level]
        ends, line = segment.expires_us, segment.mark.line
        openings += [
            DeclaredOpening(
                segment.id,
                "segment",
                segment.owner,
                reader,
                level,
                ends,
                "opens nothing" if state not in OVER and barriers.of(segment, reader) else state,
                "",
                line,
            )
            for reader in readers
            if reader != segment.owner
        ]
    return tuple(sorted(openings))


def _state(ids: set[str], from_us: int | None, until_us: int | None, revoked: frozenset[str], now_us: int) -> str:
    if ids & revoked:
        return "revoked"
    if until_us is not None and until_us <= now_us:
        return "expired"
    if from_us is not None and from_us > now_us:
        return "not yet"
    return "ends soon" if until_us is not None and until_us - now_us < _SOON_US else "live"
