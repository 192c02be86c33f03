"""A data owner's view of a release: openings on its own data without consent, and the step that consents.

1. Nothing here shows a document, or what a revision opens on anybody else's data.
2. A consent is of one opening by one manifest: its id is the digest of both, which whoever signs computes anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.policies.workbench.diff.model import WidenedAccess


class PendingConsent(NamedTuple):
    """An opening by a proposed revision that its owner has not consented to; `id` is what a consent names."""

    revision: int
    manifest: str
    author: str
    note: str
    id: str
    opening: WidenedAccess


def pending_consents(state: ReleaseState, owner: str, assess: gates.Assess = gates.assess) -> Iterator[PendingConsent]:
    """Return the openings that wait for this tenant's consent, of the newest revision first."""
    for number in sorted(state.proposals, reverse=True):
        proposal = state.proposals[number]
        if number > state.active_revision and not proposal.activated:
            try:
                missing = gates.review(state, proposal, assess).missing
            except gates.TooCostlyError:
                continue  # nor does it come into effect here
            for opening in missing:
                if opening.owner == owner:
                    id_ = gates.consent_id(proposal, opening)
                    yield PendingConsent(number, proposal.manifest.id, proposal.author, proposal.note, id_, opening)


def revoked_of(state: ReleaseState, owner: str) -> frozenset[str]:
    """Return the revoked ids that ever were a grant, a segment or a sharing group of this tenant."""
    named: set[str] = set()
    for proposal in state.proposals.values():
        policy = proposal.policy
        for grant in (*policy.grants, *policy.group_grants()):
            if grant.owner == owner:
                named |= {grant.id, grant.group or grant.id}
        named |= {segment.id for segment in policy.segments if segment.owner == owner}
    return state.revoked & named


def consent_body(revision: int, manifest: str, what: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a consent to an opening, from `WidenedAccess.data`."""
    return {
        "revision": revision,
        "owner": what["owner"],
        "opening": gates.opening_id(manifest, what),
        "what": dict(what),
    }
