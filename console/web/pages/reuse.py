"""Who reused what of whom: reuse between tenants in a period, by owner, reader and what permitted it.

The figures are the API's own; who acts for one tenant sees what it reused of others, and others of it.
"""

from __future__ import annotations

from starlette.responses import Response

from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.audit import moment_us
from kvcustody.console.web.pages.overview import sees_all
from kvcustody.governance.api.operations import custody as custody_api
from kvcustody.governance.service.access.roles import Permission

_PAGE = 100


def show(visit: PageRequest) -> Response:
    """Return reuse between tenants in a period, the last day without one."""
    visit.caller.must(Permission.READ_CUSTODY)
    tenant, since_us, until_us = visit.text("tenant"), moment_us(visit, "since"), moment_us(visit, "until")
    owner, reader = visit.text("owner"), visit.text("reader")
    visit.check_tenants("owner", "reader")
    visit.record("consoleReuse", tenant)
    crossed = visit.ask(
        custody_api.crossed, since_us, until_us, tenant, owner, reader, visit.text("cursor", 1024), _PAGE
    )
    return visit.page(
        "audit/reuse.html",
        "Reuse between tenants",
        crossed=crossed,
        is_last_day=since_us is None and until_us is None,
        is_filtered=bool(owner or reader or tenant),
        all_tenants=sees_all(visit),
        reads_policy=visit.may(Permission.READ_POLICY),
    )
