"""Assigns the policy's tenants to labels, by rank."""

from __future__ import annotations

from collections.abc import Sequence

from kvcustody.errors import IdentityError
from kvcustody.governance.identity.principal import Principal, check_identifier
from kvcustody.ids import SessionId, SubjectId, TenantId
from kvcustody.lab.replay.traces.model import Key
from kvcustody.lab.replay.traces.seeded_draws import name_digest
from kvcustody.lab.replay.workload.labels import Label
from kvcustody.policies.document.model import Policy

ISSUER = "replay"


def tenant_names(policy: Policy, count: int) -> list[str]:
    """Return names by rank, heaviest first: the policy's tenants in order, then invented ones (`tenant-009`)."""
    listed = [tenant.id for tenant in policy.tenants[:count]]
    return listed + [f"tenant-{rank + 1:03d}" for rank in range(len(listed), count)]


class LabelledPrincipals:
    """Principals by label; one object per (tenant, subject, session, classification), as an engine would cache them.

    Tenants are the policy's, or those `named` by the trace.
    """

    def __init__(self, policy: Policy, tenants: int, named: Sequence[str] = ()) -> None:
        self._known: dict[Label, Principal] = {}
        self.follow(policy, list(named) or tenant_names(policy, tenants))

    def follow(self, policy: Policy, names: Sequence[str]) -> None:
        """Go on under another policy. `names` by rank: those so far in their places, then added ones."""
        self.names = list(names)
        self._readable = [self._readable_by(policy, name) for name in self.names]

    def principal(self, label: Label) -> Principal:
        """Return the principal behind a labelled request: every claim counts as verified."""
        principal = self._known.get(label)
        if principal is None:
            principal = self._known[label] = Principal(
                issuer=ISSUER,
                tenant=TenantId(self.names[label.tenant]),
                subject=SubjectId(label.subject),
                session=_session_id(label.session),
                classification=label.classification,
            )
        return principal

    def readable(self, tenant: int) -> tuple[int, ...]:
        """Return the tenants, by rank, whose K/V this tenant may read: its own, and those of grants and segments."""
        return self._readable[tenant]

    def _readable_by(self, policy: Policy, name: str) -> tuple[int, ...]:
        readable = {name}
        for grant in (*policy.grants, *policy.group_grants()):
            if grant.reader == name:
                readable.add(grant.owner)
        for segment in policy.segments:  # a segment's blocks are computed by whoever sends it first
            if segment.tenants is None:
                readable.update(self.names)
            elif name in segment.tenants:
                readable.update(segment.tenants)
        return tuple(rank for rank, other in enumerate(self.names) if other in readable)


def _session_id(session: Key) -> SessionId:
    """Return a session's identifier; a trace's own name that may not be one stands as its digest."""
    name = f"s-{session}"
    try:
        return SessionId(check_identifier("session", name))
    except IdentityError:
        return SessionId(f"s-{name_digest(0, session).hex()}")
