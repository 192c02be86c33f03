"""Inbox: what waits for whoever looks, with the page and the command that deal with it."""

from __future__ import annotations

from starlette.responses import Response

from kvcustody.console.web.page_request import PageRequest
from kvcustody.governance.api.operations.inbox import inbox_of


def show(visit: PageRequest) -> Response:
    """Everything that waits for the caller, the most urgent first."""
    visit.record("consoleInbox")
    return visit.page("operate/inbox.html", "Inbox", items=inbox_of(visit.service, visit.caller))
