"""Consents: what a revision would open of one tenant's data, shown only to that tenant's administrators."""

from __future__ import annotations

from starlette.responses import Response

from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.policy_status import release_of
from kvcustody.governance.release.consents import pending_consents
from kvcustody.governance.service.access.roles import Permission


def show(visit: PageRequest) -> Response:
    """Return everything that waits for this tenant's consent."""
    visit.caller.must(Permission.CONSENT)
    state = release_of(visit)
    tenant = visit.caller.tenant
    found = () if state is None or tenant is None else pending_consents(state, tenant, visit.service.policy_work.assess)
    return visit.page("policy/consents.html", "Consents", waiting=list(found))
