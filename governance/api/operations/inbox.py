"""The operation of the inbox: what waits for whoever asks, and for nobody else."""

from __future__ import annotations

from typing import Any

from kvcustody.governance.api.http.operation import Operation
from kvcustody.governance.api.http.pagination import page
from kvcustody.governance.api.http.route_builder import Api, CallerDep, ServiceDep
from kvcustody.governance.api.models.base import Cursor, Limit
from kvcustody.governance.api.models.inbox import InboxPage
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.inbox.item import InboxItem
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.service import Service


def add_inbox(api: Api) -> None:
    """Declare the operation."""
    listing = Operation("listInbox", "GET", "/v1/inbox", Permission.SELF, "operations", recorded=True)
    api.add(listing, inbox, answers=InboxPage, problems=("cursor-invalid",))


def inbox(
    caller: CallerDep, service: ServiceDep, cursor: Cursor = None, limit: Limit = 100
) -> dict[str, Any]:
    """What waits for you: approvals, consents, missed erasures, and what is about to end; the most urgent first."""
    items = [item.data() for item in inbox_of(service, caller)]
    return page(service, CursorBinding("listInbox", caller.name, {}), items, cursor, limit)


def inbox_of(service: Service, caller: Caller) -> list[InboxItem]:
    """The items that this person can do something about."""
    return [item for item in service.inbox().items if item.is_for(caller)]
