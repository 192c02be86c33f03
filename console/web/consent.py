"""Consents: what a revision would open on one tenant's own data, shown to that tenant's administrators alone."""

from __future__ import annotations

from starlette.responses import Response

from kvcustody.console.web.standing import release_of
from kvcustody.console.web.visit import Visit
from kvcustody.governance.release import gates
from kvcustody.governance.release.state import Proposal, ReleaseState
from kvcustody.governance.service.caller import Caller
from kvcustody.governance.service.roles import Action
from kvcustody.policies.workbench.change import Opening


def show(visit: Visit) -> Response:
    """Everything that waits for this tenant's consent."""
    visit.caller.must(Action.CONSENT)
    state = release_of(visit)
    waiting = []
    if state is not None:
        for number in sorted(state.proposals, reverse=True):
            found = state.proposals[number]
            if number > state.active_revision and not found.activated:
                waiting += [
                    (found, opening, gates.consent_id(found, opening))
                    for opening in openings_of(visit.caller, state, found)
                ]
    return visit.page("consents.html", "Consents", waiting=waiting)


def openings_of(caller: Caller, state: ReleaseState, found: Proposal) -> tuple[Opening, ...]:
    """What this revision opens on the caller's own tenant and has no consent yet."""
    if caller.tenant is None:
        return ()
    missing = gates.review(state, found).missing
    return tuple(opening for opening in missing if opening.owner == caller.tenant)
